"""Sets of tensors that change from step to step: whatever comes, nothing that was given is lost.

A machine of hypothesis's draws the steps: which tensors come, whether one has a NaN, and when the state is saved and
loaded. What ranks were given is what they have received and what their residuals keep, tensor by tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hvdcompress.engine.saving.snapshot import reshard
from hvdcompress.loopback import Loopback
from hvdcompress.optimizers import SGD
from hvdcompress.plan import IN_ORDER

SIZES = {"a": 10, "b": 10, "c": 100, "d": 30, "e": 64}
PLANS: list[dict[str, Any]] = [
    {"method": "topk", "density": 0.1, "min_elements": 1},
    {"method": "topk", "density": 0.1, "min_elements": 50},
    {"method": "topk", "density": 0.1, "min_elements": 50, "bucket_elements": 1000},
    {"method": "topk", "density": 0.1, "min_elements": 1, "bucket_elements": 0},
    {"method": "gaussiank", "density": 0.1, "min_elements": 50, "scope": "global"},
    {"method": "scalecom", "density": 0.1, "min_elements": 20, "bucket_elements": 60},
    {"method": "topk", "density": 0.1, "min_elements": 50, "warmup": {"steps": 2}},
    {"method": "powersgd", "matrix_rank": 1, "min_elements": 20, "bucket_elements": 120},
]


class Sets(RuleBasedStateMachine):
    """Ranks to which sets of tensors come: two, or four that exchange with one level or with two."""

    @initialize(plan=st.sampled_from(PLANS), momentum=st.sampled_from([None, 0.9]), world_size=st.sampled_from([2, 4]))
    def begin(self, plan: dict[str, Any], momentum: float | None, world_size: int) -> None:
        self.plan, self.optimizer, self.world_size = plan, momentum and SGD(momentum), world_size
        self.net = self.new_net(nodes=0)
        self.given = {name: np.zeros(size) for name, size in SIZES.items()}
        self.received = {name: np.zeros(size) for name, size in SIZES.items()}
        self.random = np.random.default_rng(0)

    @rule(names=st.sets(st.sampled_from(sorted(SIZES)), min_size=1), bad=st.booleans())
    def step(self, names: set[str], bad: bool) -> None:
        gradients = [{name: self.random.standard_normal(SIZES[name]).astype(np.float32) for name in sorted(names)}
                     for _ in range(self.world_size)]  # fmt: skip
        if bad:
            gradients[1][min(names)][0] = np.nan
        got = self.net.allreduce_many(gradients)[0]
        assert all(np.isfinite(array).all() != bad for array in got.values())
        if not bad:
            for name in names:
                self.given[name] += np.mean([one[name] for one in gradients], axis=0)
                self.received[name] += got[name]

    def new_net(self, nodes: int) -> Loopback:
        return Loopback(self.plan, self.world_size, nodes=nodes, grouping=IN_ORDER, optimizer=self.optimizer or None)

    @rule()
    def save_and_load(self) -> None:
        self.load([rank.state_dict() for rank in self.net.ranks], self.new_net(self.net.plan.nodes))

    @rule(nodes=st.sampled_from([0, 2]))
    def move(self, nodes: int) -> None:
        net = self.new_net(nodes if self.world_size == 4 else 0)
        self.load(reshard([rank.state_dict() for rank in self.net.ranks], self.world_size, net.nodes), net)

    def load(self, saved: list[dict[str, Any]], net: Loopback) -> None:
        for rank, one in zip(net.ranks, saved, strict=True):
            rank.load_state_dict(one)
        self.net = net

    @invariant()
    def nothing_is_lost(self) -> None:
        if self.optimizer:  # what is handed over is more, and less later
            return
        for name in self.net.ranks[0].names():
            residuals = [each for rank in self.net.ranks if (each := rank.residual(name)) is not None]
            kept = sum(residuals, start=np.zeros(SIZES[name])) / self.world_size
            np.testing.assert_allclose(self.received[name] + kept, self.given[name], atol=2e-5, err_msg=name)


Sets.TestCase.settings = settings(
    max_examples=60, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestSets = Sets.TestCase


@pytest.mark.parametrize("bucket_elements", [None, 0, 1000])
def test_a_nan_in_the_first_step_of_another_set(bucket_elements: int | None) -> None:
    net = Loopback("topk", world_size=2, density=0.1, min_elements=1, bucket_elements=bucket_elements)
    bad = {"a": np.full(10, np.nan, np.float32), "b": np.ones(10, np.float32)}
    net.allreduce_many([bad, bad])
    good = {"b": np.ones(10, np.float32), "c": np.ones(10, np.float32)}
    for _ in range(3):
        assert all(np.isfinite(array).all() for array in net.allreduce_many([good, good])[0].values())


def test_the_name_of_a_group_is_refused() -> None:
    net = Loopback("topk", world_size=2, density=0.1)
    arrays = {"a+1": np.ones(10, np.float32)}
    with pytest.raises(ValueError, match=r"'a\+1'"):
        net.allreduce_many([arrays, arrays])
