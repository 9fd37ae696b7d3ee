"""Steps of two to four ranks in random order: whatever happens, nothing is lost, ranks are equal, and errors undo.

A machine of hypothesis draws steps in which gradients come in any order on each rank, collectives are polled in
between, a rank fails, a gradient has a NaN or is missing, a trigger is asked for, a state is saved, loaded or
regrouped, a step is discarded or paused.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hvdcompress.engine import lockstep
from hvdcompress.engine.agreement import SharedConfig, Status
from hvdcompress.engine.collectives import Collectives
from hvdcompress.engine.state import RankState
from hvdcompress.engine.step import Step
from hvdcompress.loopback import _Network, _Transport
from hvdcompress.method import TensorSpec
from hvdcompress.plan import Bucket, plan_of

SHAPES = {"a": (6, 9), "b": (10,), "c": (40,), "d": (5, 5)}
SPECS = [TensorSpec(name, shape) for name, shape in SHAPES.items()]
GROUPINGS = (0, 70, 1000)  #: elements of a bucket
PLANS: list[dict[str, Any]] = [
    {"method": "topk", "density": 0.2, "min_elements": 1},
    {"method": "scalecom", "density": 0.2, "min_elements": 12},
    {"method": "gtopk", "density": 0.2, "min_elements": 12},
    {"method": "powersgd", "matrix_rank": 1, "min_elements": 1},
    {"method": "signsgd", "min_elements": 12, "warmup": {"steps": 2}},
]
Steps = list[Step]


class Ranks(RuleBasedStateMachine):
    """Some ranks under one plan."""

    @initialize(plan=st.sampled_from(PLANS), world_size=st.integers(2, 4), grouping=st.sampled_from(GROUPINGS))
    def begin(self, plan: dict[str, Any], world_size: int, grouping: int) -> None:
        self.plans = [plan_of({**plan, "bucket_elements": each}) for each in GROUPINGS]
        self.world_size = world_size
        self.ranks = [RankState(self.plans[0], rank, world_size) for rank in range(world_size)]
        self.buckets: list[Bucket] = []
        self.regroup(grouping)
        self.random = np.random.default_rng(0)
        self.given = [{name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(world_size)]
        self.received = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.last: Any = None  # what the last step has added to both, if it can be discarded

    # -- a step -------------------------------------------------------------------------------------------

    def steps(self) -> Steps:
        self.medium = _Network(self.world_size, lambda name, requests: lockstep.carry_out(requests))
        found = []
        for local in self.ranks:
            local.begin_round()
            step = Step(local, Collectives(_Transport(local.rank, self.medium), local.observers), SharedConfig({}, {}))
            step.factor = 1.0 / self.world_size
            found.append(step)
        return found

    def gradients(self) -> list[dict[str, np.ndarray]]:
        return [
            {name: self.random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
            for _ in range(self.world_size)
        ]

    def add_all(self, steps: Steps, given: list[dict[str, np.ndarray]], seed: int) -> list[dict[str, np.ndarray]]:
        """Give gradients to all ranks, in an order of its own on each; results are written over the copies."""
        outs = [{name: array.copy() for name, array in one.items()} for one in given]
        place = {member.name: (bucket, i) for bucket in self.buckets for i, member in enumerate(bucket.members)}
        calls = [(step, name) for step, one in zip(steps, outs, strict=True) for name in one]
        random.Random(seed).shuffle(calls)
        for step, name in calls:
            bucket, index = place[name]
            step.add(bucket, [index], [outs[step.local.rank][name].reshape(-1)])
            step._last_poll = 0.0  # polling pauses between two calls
            step.poll()
        return outs

    def end(self, steps: Steps) -> None:
        """Carry out what is left, let the ranks agree, and commit."""
        for step in steps:
            step.fill_missing()
        for _ in range(20):
            for step in steps:
                step._last_poll = 0.0
                step.poll()
        status = Status.of(np.max([step.status().numbers() for step in steps], axis=0).tolist())
        for step in steps:
            step.apply_status(status)
            step.close()

    @rule(seed=st.integers(0, 10**6), missing=st.sets(st.sampled_from(["b", "d"])))
    def good_step(self, seed: int, missing: set[str]) -> None:
        given = self.gradients()
        for name in missing:  # on one rank; another one has it
            given[seed % self.world_size][name] = np.zeros(SHAPES[name], np.float32)
        without = [dict(one) for one in given]
        for name in missing if len(self.buckets) < len(SHAPES) else ():
            if any(len(bucket.members) > 1 and name in [m.name for m in bucket.members] for bucket in self.buckets):
                del without[seed % self.world_size][name]
        steps = self.steps()
        outs = self.add_all(steps, without, seed)
        self.end(steps)
        for one in outs[1:]:
            for name in one.keys() & outs[0].keys():
                np.testing.assert_array_equal(one[name], outs[0][name])
        result = {name: next(one[name] for one in outs if name in one) for name in SHAPES}
        self.last = (given, result)
        self.count(given, result, 1)

    @rule(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(SHAPES)))
    def step_with_a_nan(self, seed: int, name: str) -> None:
        given, before = self.gradients(), self.saved()
        given[seed % self.world_size][name].flat[0] = np.nan if seed % 2 else np.inf
        steps = self.steps()
        outs = self.add_all(steps, given, seed)
        self.end(steps)
        assert all(np.isnan(array).all() for one in outs for array in one.values())
        self.unchanged(before)

    @rule(seed=st.integers(0, 10**6), after=st.integers(0, 15))
    def step_that_fails(self, seed: int, after: int) -> None:
        """Some gradients have come and some collectives are under way, when every rank gives the step up."""
        before = self.saved()
        steps, calls = self.steps(), [0]

        class Failure(Exception):
            pass

        for step in steps:
            add = step.add

            def counted(*given: Any, add: Any = add) -> Any:
                calls[0] += 1
                if calls[0] > after:
                    raise Failure
                return add(*given)

            step.add = counted  # type: ignore[method-assign]
        try:
            self.add_all(steps, self.gradients(), seed)
        except Failure:
            pass
        for step in steps:
            step.abandon()
        self.unchanged(before)

    @rule(seed=st.integers(0, 10**6))
    def paused_step(self, seed: int) -> None:
        given, before = self.gradients(), self.saved()
        for local in self.ranks:
            local.paused = True
        steps = self.steps()
        outs = self.add_all(steps, given, seed)
        self.end(steps)
        for local in self.ranks:
            local.paused = False
        for name in SHAPES:
            np.testing.assert_allclose(outs[0][name], np.mean([one[name] for one in given], axis=0), atol=1e-6)
        self.unchanged(before)

    # -- between steps ------------------------------------------------------------------------------------

    @rule()
    def discard(self) -> None:
        if self.last is None:
            return
        for local in self.ranks:
            local.discard()
        self.count(*self.last, -1)
        self.last = None

    @rule(rank=st.integers(0, 3))
    def trigger(self, rank: int) -> None:
        self.ranks[rank % self.world_size].trigger_requested = True

    @rule(grouping=st.sampled_from(GROUPINGS))
    def regroup(self, grouping: int) -> None:
        plan = self.plans[GROUPINGS.index(grouping)]
        self.buckets = plan.buckets(SPECS, ages=self.ranks[0].ages())
        for local in self.ranks:
            local.regroup(self.buckets)
        self.last = None

    @rule()
    def save_and_load(self) -> None:
        saved = self.saved()
        self.ranks = [RankState(self.plans[0], rank, self.world_size) for rank in range(self.world_size)]
        for local, one in zip(self.ranks, saved, strict=True):
            local.load_state_dict(one)
        self.last = None

    # -- what holds ---------------------------------------------------------------------------------------

    def saved(self) -> list[dict[str, Any]]:
        return [local.state_dict() for local in self.ranks]

    def unchanged(self, before: list[dict[str, Any]]) -> None:
        """Nothing but that tensors are known by now, at step 0 and with zeros."""
        self.last = None
        for one, was in zip(self.saved(), before, strict=True):
            for name, step in one["steps"].items():
                assert step == was["steps"].get(name, 0)
            for name, slots in one["state"].items():
                for slot, array in slots.items():
                    old = was["state"].get(name, {}).get(slot, np.zeros_like(array))
                    np.testing.assert_array_equal(array, old, err_msg=f"{slot} of {name}")

    def count(self, given: list[dict[str, np.ndarray]], result: dict[str, np.ndarray], sign: int) -> None:
        for total, one in zip(self.given, given, strict=True):
            for name in SHAPES:
                total[name] += sign * one[name]
        for name in SHAPES:
            self.received[name] += sign * result[name]

    @invariant()
    def what_was_given_is_received_or_kept(self) -> None:
        for name in set.intersection(*(set(local.names()) for local in self.ranks)):
            kept = [local.residual(name) for local in self.ranks]
            residual = 0.0 if kept[0] is None else np.mean(kept, axis=0).reshape(SHAPES[name])
            given = np.mean([one[name] for one in self.given], axis=0)
            np.testing.assert_allclose(self.received[name] + residual, given, atol=1e-4, err_msg=name)

    @invariant()
    def ranks_are_where_the_others_are(self) -> None:
        first = self.ranks[0]
        for local in self.ranks[1:]:
            assert local.steps() == first.steps() and local.ages() == first.ages()
            for name in local.states.keys() & first.states.keys():  # one may have claimed what others have yet to
                assert local.states[name].bucket == first.states[name].bucket


Ranks.TestCase.settings = settings(
    max_examples=120, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestRanks = Ranks.TestCase


@pytest.mark.parametrize("method", ["topk", "scalecom", "qsgd", "none"])
def test_collectives_start_before_the_last_gradient_comes(method: str) -> None:
    """They overlap with the backward pass, second rounds too."""
    plan = plan_of(method, min_elements=1, bucket_elements=0)
    buckets = plan.buckets(SPECS)
    medium = _Network(1, lambda name, requests: lockstep.carry_out(requests))
    local = RankState(plan, 0, 1)
    step = Step(local, Collectives(_Transport(0, medium), local.observers), SharedConfig({}, {}))
    step.factor, rounds = 1.0, []
    for bucket in buckets:
        step.add(bucket, [0], [np.ones(bucket.spec.size, np.float32)])
        step._last_poll = 0.0
        step.poll()
        rounds.append(local.ledger.collectives())
    assert rounds == sorted(rounds) and 0 < rounds[0] < rounds[-1]
    assert all(not exchange.collective for exchange in step.exchanges.values()), "all have come to their end meanwhile"
