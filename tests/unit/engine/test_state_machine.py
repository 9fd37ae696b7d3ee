"""Training in random order of events: hypothesis draws the tensors of each step, and what happens between steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hvdcompress.engine.saving.snapshot import reshard
from hvdcompress.loopback import Loopback
from hvdcompress.plan import IN_ORDER
from tests.unit.engine.helpers import Gradients, gradients, load, state_dicts

SHAPES = {"a": (10,), "b": (10,), "c": (100,), "d": (30,), "e": (8, 8)}
DENSE_RULE = {"match": {"name": "d"}, "method": "none"}
PLANS: list[dict[str, Any]] = [
    {"method": "topk", "density": 0.1, "min_elements": 1, "rules": [DENSE_RULE]},
    {"method": "topk", "density": 0.1, "min_elements": 50, "bucket_elements": 1000},
    {"method": "topk", "density": 0.1, "min_elements": 1, "bucket_elements": 0},
    {"method": "gaussiank", "density": 0.1, "min_elements": 50, "scope": "global"},
    {"method": "scalecom", "density": 0.1, "min_elements": 20, "bucket_elements": 60},
    {"method": "topk", "density": 0.1, "min_elements": 50, "warmup": {"steps": 2}},
    {"method": "powersgd", "matrix_rank": 1, "min_elements": 20, "bucket_elements": 120},
    {
        "method": "gradiveq",
        "dense_steps": 2,
        "compressed_steps": 2,
        "tensors": "all",
        "min_elements": 20,
        "feedback": "plain",
    },
]


class Training(RuleBasedStateMachine):
    """Two ranks, or four with one or two levels. No gradient is lost: it is in the results or in the residuals."""

    @initialize(plan=st.sampled_from(PLANS), tracks_ages=st.booleans(), world_size=st.sampled_from([2, 4]))
    def begin(self, plan: dict[str, Any], tracks_ages: bool, world_size: int) -> None:
        self.plan = plan
        self.tracks_ages = tracks_ages
        self.world_size = world_size
        self.scale = 1.0
        self.net = self.new_net(nodes=0)
        self.given = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.received = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.num_steps = 0
        self.last: Any = None  # the mean gradients and results of the last step, if it can be discarded

    def new_net(self, nodes: int) -> Loopback:
        scale = lambda: self.scale  # noqa: E731
        net = Loopback(self.plan, self.world_size, nodes=nodes, grouping=IN_ORDER, loss_scale=scale)
        for rank in net.ranks:
            rank.tracks_ages = self.tracks_ages
        return net

    def draw(self, names: set[str]) -> Gradients:
        self.num_steps += 1
        return gradients({name: SHAPES[name] for name in sorted(names)}, self.num_steps, self.world_size)

    def reduce(self, everyone: Gradients) -> dict[str, np.ndarray]:
        scaled = [{name: array * np.float32(self.scale) for name, array in own.items()} for own in everyone]
        return {name: array / self.scale for name, array in self.net.allreduce(scaled)[0].items()}

    def count(self, sign: int) -> None:
        for total, change in zip((self.given, self.received), self.last, strict=True):
            for name, array in change.items():
                total[name] += sign * array

    @rule(names=st.sets(st.sampled_from(sorted(SHAPES)), min_size=1), exponent=st.integers(-2, 2))
    def step(self, names: set[str], exponent: int) -> None:
        self.scale = 4.0**exponent
        everyone = self.draw(names)
        mean = {name: np.mean([own[name] for own in everyone], axis=0) for name in names}
        self.last = mean, self.reduce(everyone)
        self.count(1)

    @rule(names=st.sets(st.sampled_from(sorted(SHAPES)), min_size=1))
    def step_with_a_nan(self, names: set[str]) -> None:
        everyone = self.draw(names)
        everyone[1][min(names)].flat[0] = np.nan
        assert all(np.isnan(array).all() for array in self.reduce(everyone).values())
        self.last = None

    @rule()
    def paused_step(self) -> None:
        everyone = self.draw(set(SHAPES))
        with self.net.paused():
            for name, array in self.reduce(everyone).items():
                np.testing.assert_allclose(array, np.mean([own[name] for own in everyone], axis=0), atol=1e-5)
        self.last = None

    @rule()
    def discard(self) -> None:
        if self.last:
            self.net.discard()
            self.count(-1)
        self.last = None

    @rule()
    def trigger(self) -> None:
        self.net.trigger()

    @rule(nodes=st.sampled_from([0, 2]), again=st.booleans())
    def save_and_load(self, nodes: int, again: bool) -> None:
        saved = state_dicts(self.net)
        net = self.new_net(self.net.plan.nodes if again or self.world_size == 2 else nodes)
        self.net = load(net, saved if again else reshard(saved, self.world_size, net.nodes))
        self.last = None

    @invariant()
    def nothing_is_lost(self) -> None:
        for name in self.net.ranks[0].names():
            residuals = [each for rank in self.net.ranks if (each := rank.find(name)[1]) is not None]
            kept = sum(residuals, start=np.zeros(SHAPES[name]).ravel()) / self.world_size
            want = self.given[name]
            np.testing.assert_allclose(self.received[name] + kept.reshape(want.shape), want, atol=1e-4, err_msg=name)


Training.TestCase.settings = settings(settings.get_profile("hvdcompress"), stateful_step_count=15)
TestTraining = Training.TestCase
