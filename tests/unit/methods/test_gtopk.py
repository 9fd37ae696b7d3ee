"""gtopk: the k largest of the sum, by a tree of pairwise merges (Shi et al. 2019, arXiv 1901.04359)."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec, Workspace
from hvdcompress.parts.wire import WireError
from hvdcompress.testing import Collective, Trial, numbers
from tests.oracles.gtopk import Oracle, largest


def run_beside_oracle(world_size: int = 6, n: int = 90, density: float = 0.06, steps: int = 15) -> None:
    """Compare results and residuals of library and oracle, up to rounding."""
    net = Loopback("gtopk", world_size=world_size, density=density, min_elements=1)
    oracle = Oracle(world_size, n, density)
    for step in range(steps):
        gradients = [
            numbers((n,), rank, step, kind="heavy" if step % 4 == 3 else "normal") for rank in range(world_size)
        ]
        total = oracle.step([g.astype(np.float64) for g in gradients])
        out = net.allreduce(gradients, "w", op="sum")[0]
        size = max(np.abs(m).max() for m in oracle.memory) + np.abs(total).max()
        np.testing.assert_allclose(out, total, atol=1e-5 * size)
        for rank in range(world_size):
            np.testing.assert_allclose(net.residual("w", rank), oracle.memory[rank], atol=1e-5 * size)


@pytest.mark.parametrize(
    "world_size,n,density",
    [(1, 40, 0.1), (2, 57, 0.07), (3, 1, 0.5), (3, 61, 0.1), (4, 33, 1.0), (5, 101, 0.29), (7, 50, 0.1), (9, 80, 0.05)],
)
def test_beside_an_independent_oracle(world_size: int, n: int, density: float) -> None:
    run_beside_oracle(world_size, n, density)


def test_two_ranks_get_the_top_k_of_the_sum_of_their_top_ks() -> None:
    a, b, k = numbers((200,), 1), numbers((200,), 2), 20
    net = Loopback("gtopk", world_size=2, density=0.1, min_elements=1)
    out = net.allreduce([a, b], "w", op="sum")[0]
    total = np.zeros(200, np.float32)
    for g in (a, b):
        top = np.argsort(-np.abs(g))[:k]
        total[top] += g[top]
    total[np.argsort(-np.abs(total))[k:]] = 0
    assert np.count_nonzero(out) == k
    np.testing.assert_array_equal(out, total)


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "qsgd4", "rangefloat8"])
@pytest.mark.parametrize("world_size", range(1, 10))
def test_nothing_is_lost(world_size: int, values: str) -> None:
    """Σ sent + Σ residual = Σ gradients: including what merges dropped and what rounding changed."""
    net = Loopback("gtopk", world_size=world_size, density=0.07, values=values, min_elements=1)
    given, sent = np.zeros(100), np.zeros(100)
    for step in range(6):
        gradients = [numbers((100,), rank, step, kind="heavy" if step == 3 else "normal") for rank in range(world_size)]
        given += np.sum(gradients, axis=0, dtype=np.float64)
        outs = net.allreduce(gradients, "w", op="sum")
        assert len({out.tobytes() for out in outs}) == 1
        assert np.count_nonzero(outs[0]) <= 7
        sent += outs[0]
        kept = np.sum([net.residual("w", rank) for rank in range(world_size)], axis=0, dtype=np.float64)
        np.testing.assert_allclose(sent + kept, given, atol=1e-6 * np.abs(given).max() * world_size)
    if values != "fp32" and world_size > 1:
        assert any(net.residual("w", rank)[outs[0] != 0].any() for rank in range(world_size)), (
            "rounding stays somewhere"
        )


@given(
    st.integers(1, 7),
    st.integers(1, 5),
    st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0]), min_size=7 * 5, max_size=7 * 5),
)
def test_ties_zeros_and_cancellation(world_size: int, tenths: int, values: list[float]) -> None:
    """Small integers are summed exactly, so library and oracle agree on every tie."""
    given = [np.array(values[5 * rank : 5 * rank + 5], np.float32) for rank in range(world_size)]
    net, oracle = (
        Loopback("gtopk", world_size=world_size, density=tenths / 5, min_elements=1),
        Oracle(world_size, 5, tenths / 5),
    )
    for _ in range(2):
        total = oracle.step([g.astype(np.float64) for g in given])
        np.testing.assert_array_equal(net.allreduce(given, "w", op="sum")[0], total)
        for rank in range(world_size):
            np.testing.assert_array_equal(net.residual("w", rank), oracle.memory[rank])


def first_owners_get_it_back(world_size: int, steps: int = 40, n: int = 2000) -> float:
    """Return the share that the authors' rule loses: entries return to their senders if not among the final k."""
    lost, given = 0.0, 0.0
    memory = [np.zeros(n) for _ in range(world_size)]
    for step in range(steps):
        u = [m + numbers((n,), rank, step).astype(np.float64) for rank, m in enumerate(memory)]
        oracle = Oracle(world_size, n, 0.01)
        total = oracle.step(u)
        memory = [np.where((total != 0) & _is_top(one, oracle.k), 0, one) for one in u]
        lost += np.abs(np.sum(u, axis=0) - total - np.sum(memory, axis=0)).sum()
        given += np.abs(total).sum()
    return lost / given


def _is_top(u: np.ndarray, k: int) -> np.ndarray:
    mask = np.zeros(len(u), bool)
    mask[list(largest(dict(enumerate(u.tolist())), k))] = True
    return mask


def test_returning_to_first_owners_only_would_lose_mass() -> None:
    """Why the rank that drops an entry keeps it: with more than two ranks, the authors' rule loses entries."""
    assert first_owners_get_it_back(2) < 1e-12
    assert 0.005 < first_owners_get_it_back(4) < 0.02
    assert 0.02 < first_owners_get_it_back(8) < 0.05


def partners(collective: Collective) -> dict[int, int]:
    """Return the bytes that each rank sends, by rank, without ranks that send none."""
    return {rank: size for rank, size in enumerate(collective.num_bytes) if size}


@pytest.mark.parametrize("world_size", range(1, 10))
def test_one_round_for_each_doubling_and_a_broadcast(world_size: int) -> None:
    net = Trial(hvdcompress.get("gtopk", density=0.1), world_size)
    net.allreduce([numbers((50,), rank) for rank in range(world_size)], "w")
    collectives = [c.collective for c in net.log]
    assert collectives == ["AllToAll"] * math.ceil(math.log2(world_size)) + ["Broadcast"]
    assert net.log[-1].root == 0
    senders = [list(partners(c)) for c in net.log[:-1]]
    for number, ranks in enumerate(senders):
        assert ranks == list(range(2**number, world_size, 2 ** (number + 1)))
    assert sorted(sum(senders, [])) == list(range(1, world_size)), "every rank but 0 sends once"


@pytest.mark.parametrize("values,width", [("fp32", 4), ("fp16", 2)])
@pytest.mark.parametrize("n,density", [(100_000, 0.001), (4096, 0.3), (10, 0.1)])
def test_bytes_are_twice_those_of_topk_and_constant_in_p(n: int, density: float, values: str, width: int) -> None:
    one = hvdcompress.get("topk", density=density, values=values).num_bytes(TensorSpec("w", (n,)), 2)
    assert one >= 24 + width * max(1, int(n * density + 1e-9))
    for world_size in (1, 2, 3, 8):
        net = Loopback("gtopk", world_size=world_size, density=density, values=values, min_elements=1)
        net.allreduce([numbers((n,), rank) for rank in range(world_size)], "w")
        assert [net.ledger.bytes_sent(rank) for rank in range(world_size)] == [one] + [2 * one] * (world_size - 1)
        assert net.plan.program.main.num_bytes(TensorSpec("w", (n,)), world_size) == (2 if world_size > 1 else 1) * one


def test_no_gradient_build_up_on_the_wire() -> None:
    """With topk the bytes on the wire grow with p; here they do not."""
    carried: dict[str, list[int]] = {"topk": [], "gtopk": []}
    for id in carried:
        for world_size in (2, 8, 32):
            net = Loopback(id, world_size=world_size, density=0.01, min_elements=1)
            net.allreduce([numbers((5000,), rank) for rank in range(world_size)])
            carried[id].append(max(net.ledger.bytes_on_wire(rank) for rank in range(world_size)))
    assert carried["topk"][2] == 31 * carried["topk"][0]
    assert carried["gtopk"][2] < 1.5 * carried["gtopk"][0]
    assert all(later > earlier for earlier, later in pairwise(carried["topk"]))


def test_density_one_is_the_dense_sum() -> None:
    net = Loopback("gtopk", world_size=5, density=1.0, min_elements=1)
    gradients = [numbers((40,), rank) for rank in range(5)]
    np.testing.assert_allclose(net.allreduce(gradients, op="sum")[0], np.sum(gradients, axis=0), rtol=1e-5, atol=1e-6)


def test_without_feedback_what_is_dropped_is_lost() -> None:
    net = Loopback("gtopk", world_size=2, density=0.25, feedback="none", min_elements=1)
    gradients = [np.float32([4, 1, 0, -2]), np.float32([1, -6, 0, 2])]
    for _ in range(2):
        assert net.allreduce(gradients, "w", op="sum")[0].tolist() == [0, -6, 0, 0]
    assert not net.residual("w", 0).any()


def test_a_damaged_payload_is_refused() -> None:
    method = hvdcompress.get("gtopk", density=0.1)
    net = Trial(method, 2)
    net.allreduce([numbers((50,), rank) for rank in range(2)], "w")
    ctx = Context(0, 2, 0, TensorSpec("w", (50,)))
    for collective in net.log:
        payload = np.frombuffer(next(filter(None, reversed(collective.sent))), np.uint8)
        assert len(method.decode(payload.copy(), ctx, Workspace(net.ops)).index) == 5
        for bad in (payload[:-4], np.r_[payload, payload[:4]], np.r_[payload[:3], ~payload[3:4], payload[4:]]):
            with pytest.raises(WireError):
                method.decode(np.ascontiguousarray(bad), ctx, Workspace(net.ops))
