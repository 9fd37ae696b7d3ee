"""gtopk: the k largest of the sum, by a tree of pairwise merges (Shi et al. 2019, arXiv 1901.04359)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec, Workspace
from hvdcompress.parts.wire import WireError
from hvdcompress.testing import Trial, numbers
from tests.oracles.gtopk import Oracle
from tests.unit.methods.comparing import assert_matches_oracle


@pytest.mark.parametrize(
    "world_size,n,density",
    [(1, 40, 0.1), (2, 57, 0.07), (3, 1, 0.5), (4, 33, 1.0), (5, 101, 0.29), (7, 50, 0.1), (9, 80, 0.05)],
)
def test_matches_the_oracle(world_size: int, n: int, density: float) -> None:
    net = Loopback("gtopk", world_size=world_size, density=density, min_elements=1)
    assert_matches_oracle(net, Oracle(world_size, n, density), (n,), kinds=("normal", "normal", "heavy"))


@given(
    st.integers(1, 7),
    st.integers(1, 5),
    st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0]), min_size=7 * 5, max_size=7 * 5),
)
def test_ties_zeros_and_cancellation(world_size: int, tenths: int, values: list[float]) -> None:
    """Small integers are summed exactly, so library and oracle agree on every tie."""
    given = [np.array(values[5 * rank : 5 * rank + 5], np.float32) for rank in range(world_size)]
    net = Loopback("gtopk", world_size=world_size, density=tenths / 5, min_elements=1)
    oracle = Oracle(world_size, 5, tenths / 5)
    for _ in range(2):
        np.testing.assert_array_equal(net.allreduce(given, "w", op="sum")[0], oracle.step(given))
        for rank in range(world_size):
            np.testing.assert_array_equal(net.residual("w", rank), oracle.memory[rank])


@pytest.mark.parametrize("world_size", [1, 2, 3, 6, 9])
def test_one_round_for_each_doubling_and_a_broadcast(world_size: int) -> None:
    net = Trial(hvdcompress.get_method("gtopk", density=0.1), world_size)
    net.allreduce([numbers((50,), rank) for rank in range(world_size)], "w")
    collectives = [c.collective for c in net.log]
    assert collectives == ["AllToAll"] * math.ceil(math.log2(world_size)) + ["Broadcast"]
    assert net.log[-1].root == 0
    for number, collective in enumerate(net.log[:-1]):
        senders = [rank for rank, size in enumerate(collective.num_bytes) if size]
        assert senders == list(range(2**number, world_size, 2 ** (number + 1)))


def test_dropped_entries_are_lost_without_feedback() -> None:
    net = Loopback("gtopk", world_size=2, density=0.25, feedback="none", min_elements=1)
    gradients = [np.float32([4, 1, 0, -2]), np.float32([1, -6, 0, 2])]
    for _ in range(2):
        assert net.allreduce(gradients, "w", op="sum")[0].tolist() == [0, -6, 0, 0]
    assert not net.residual("w", 0).any()


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped"])
def test_damaged_payload_is_refused(damage: str) -> None:
    net = Trial(hvdcompress.get_method("gtopk", density=0.1), 2)
    net.allreduce([numbers((50,), rank) for rank in range(2)], "w")
    payload = np.frombuffer(net.log[0].sent[1], np.uint8)
    bad = {
        "cut": payload[:-4],
        "longer": np.r_[payload, payload[:4]],
        "flipped": np.r_[payload[:3], ~payload[3:4], payload[4:]],
    }[damage].copy()
    with pytest.raises(WireError):
        net.plan.program.main.decode(bad, Context(0, 2, 0, TensorSpec("w", (50,))), Workspace(net.ops))
