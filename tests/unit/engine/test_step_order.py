"""Gradients that are added in any order on each rank, with polls in between: hypothesis draws the orders."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdcompress.engine import lockstep
from hvdcompress.engine.agreement import SharedConfig, Status
from hvdcompress.engine.levels import network_over
from hvdcompress.engine.state import RankState
from hvdcompress.engine.step import Step
from hvdcompress.loopback import _Network, _Transport
from hvdcompress.method import TensorSpec
from hvdcompress.plan import Bucket, plan_of
from tests.unit.engine.helpers import Gradients, gradients

SHAPES = {"a": (6, 9), "b": (10,), "c": (40,), "d": (5, 5)}
SPECS = [TensorSpec(name, shape) for name, shape in SHAPES.items()]
PLANS: list[dict[str, Any]] = [
    {"method": "topk", "density": 0.2, "min_elements": 1},
    {"method": "scalecom", "density": 0.2, "min_elements": 12},
    {"method": "gtopk", "density": 0.2, "min_elements": 12},
    {"method": "powersgd", "matrix_rank": 1, "min_elements": 1},
    {"method": "signsgd", "min_elements": 12, "warmup": {"steps": 2}},
]


def begin_steps(ranks: Sequence[RankState]) -> list[Step]:
    """Return a new step of each rank, over one simulated network."""
    network = _Network(lambda name, requests: lockstep.carry_out(requests))
    steps = []
    for local in ranks:
        local.begin_round()
        transport = _Transport(network, "world", local.rank, len(ranks))
        step = Step(local, network_over(transport, local.observers), SharedConfig({}, {}))
        step.factor = 1.0 / len(ranks)
        steps.append(step)
    return steps


def add_all(steps: list[Step], everyone: Gradients, buckets: list[Bucket], seed: int, count: int | None = None) -> None:
    """Add gradients on all ranks, in another order on each, and poll after each of them. Results overwrite them."""
    index = {member.name: (bucket, i) for bucket in buckets for i, member in enumerate(bucket.members)}
    calls = [(step, name) for step, own in zip(steps, everyone, strict=True) for name in own]
    random.Random(seed).shuffle(calls)
    for step, name in calls[:count]:
        bucket, i = index[name]
        step.add(bucket, [i], [everyone[step.rank_state.rank][name].reshape(-1)])
        step._last_poll = 0.0  # otherwise polls that follow each other within a millisecond do nothing
        step.poll()


def end_steps(steps: list[Step]) -> None:
    """Complete all collectives, and commit the step on all ranks."""
    for step in steps:
        step.fill_missing()
    while any(step.is_busy for step in steps):
        for step in steps:
            step.advance_ready()
    status = Status(*np.max([step.status() for step in steps], axis=0).tolist())
    for step in steps:
        step.apply_status(status)
        step.close()


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan["method"])
@settings(max_examples=10)
@given(world_size=st.integers(2, 4), bucket_elements=st.sampled_from([0, 70, 1000]), data=st.data())
def test_nothing_is_lost_in_any_order(
    plan: dict[str, Any], world_size: int, bucket_elements: int, data: st.DataObject
) -> None:
    """The gradients of all steps are the results plus the residuals. An abandoned step changes nothing."""
    made = plan_of(plan, bucket_elements=bucket_elements)
    buckets = made.buckets(SPECS)
    ranks = [RankState(made, rank, world_size) for rank in range(world_size)]
    total, received = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    joined = {m.name for bucket in buckets if len(bucket.members) > 1 for m in bucket.members}
    for number in range(4):
        everyone = gradients(SHAPES, number, world_size)
        for name in joined & data.draw(st.sets(st.sampled_from("bd"))):
            del everyone[number % world_size][name]  # a missing gradient counts as zeros
        for name in SHAPES:
            total[name] += sum(own[name] for own in everyone if name in own) / world_size
        steps = begin_steps(ranks)
        add_all(steps, everyone, buckets, data.draw(st.integers(0, 10**6)))
        end_steps(steps)
        for name in SHAPES:
            first, *others = [own[name] for own in everyone if name in own]
            np.testing.assert_equal(others, [first] * len(others))
            received[name] += first
        before = [local.state_dict() for local in ranks]
        steps = begin_steps(ranks)
        add_all(steps, gradients(SHAPES, 9, world_size), buckets, number, data.draw(st.integers(0, 15)))
        for step in steps:
            step.abandon()
        np.testing.assert_equal([local.state_dict() for local in ranks], before)
    for name in SHAPES:
        residual = np.mean([local.residual(name) for local in ranks], axis=0)
        np.testing.assert_allclose(received[name] + residual, total[name], atol=1e-4, err_msg=name)


@pytest.mark.parametrize("method", ["scalecom", "qsgd", "none"])
def test_collectives_overlap_with_the_backward_pass(method: str) -> None:
    """They start before the last gradient is added, second rounds too."""
    plan = plan_of(method, min_elements=1, bucket_elements=0)
    local = RankState(plan, 0, 1)
    (step,) = begin_steps([local])
    counts = []
    for name, gradient in gradients(SHAPES, 0, 1)[0].items():
        add_all([step], [{name: gradient}], plan.buckets(SPECS), seed=0)
        counts.append(local.ledger.collectives())
    assert counts == sorted(counts) and 0 < counts[0] < counts[-1]
    assert all(not exchange.collective for exchange in step.exchanges.values()), "all collectives are done"
