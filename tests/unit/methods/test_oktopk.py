"""oktopk: global top-k by a balanced reduce-scatter and an all-gather (Li & Hoefler 2022, arXiv 2201.07598)."""

from __future__ import annotations

import numpy as np
import pytest

import hvdcompress
from hvdcompress.engine.lockstep import perform
from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec, Workspace
from hvdcompress.parts.regions import SHARES, bounds
from hvdcompress.parts.wire import NUM_BYTES, WireError
from hvdcompress.testing import Trial, numbers


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """Return a mask of the k largest magnitudes; among equal ones, the first."""
    mask = np.zeros(len(x), bool)
    mask[np.argsort(-np.abs(x), kind="stable")[:k]] = True
    return mask


@pytest.mark.parametrize(
    "world_size,n,density", [(1, 40, 0.1), (2, 57, 0.07), (3, 2, 0.5), (3, 61, 0.1), (4, 33, 1.0), (7, 200, 0.1)]
)
def test_matches_a_dense_computation(world_size: int, n: int, density: float) -> None:
    """Given the threshold and the regions, what is sent follows; both follow from what was gathered."""
    net = Loopback("oktopk", world_size=world_size, density=density, min_elements=1)
    memory = [np.zeros(n) for _ in range(world_size)]
    k = min(n, max(1, int(n * density + 1e-9)))
    least, most = -(-k // (2 * world_size)), min(k, 2 * -(-k // world_size))
    ratio, edges = 0.0, np.zeros(SHARES - 1, np.float32)
    for step in range(10):
        gradients = [numbers((n,), rank, step) for rank in range(world_size)]
        memory = [m + g for m, g in zip(memory, gradients, strict=True)]
        at = bounds(edges, n, world_size)
        total, level = np.zeros(n), 0.0
        owners = np.repeat(np.arange(world_size), np.diff(at))
        sums = np.choose(owners, memory) if n else total
        for rank, m in enumerate(memory):
            sent = largest(np.where(owners == rank, 0, m), k - k // world_size) & (owners != rank)
            level += np.abs(m[sent]).min(initial=np.inf) if sent.any() else 0.0
            sums = sums + np.where(sent, m, 0)
            memory[rank] = np.where(sent, 0, m)
        for rank in range(world_size):
            own = np.flatnonzero(owners == rank)
            count = np.clip(np.sum(np.abs(sums[own]) > ratio * level), least, most)
            top = own[largest(sums[own], count)]
            total[top] = sums[top]
            memory[rank][own] = (sums - total)[own]
        np.testing.assert_allclose(net.allreduce(gradients, "w", op="sum")[0], total, atol=1e-4)
        for rank in range(world_size):
            np.testing.assert_allclose(net.residual("w", rank), memory[rank], atol=1e-4)
        slots = net.ranks[0].states["w"].slots
        count = np.count_nonzero(total)
        kth = np.sort(np.abs(total))[-k] if count >= k else min(ratio * level, np.abs(total).max())
        assert slots["ratio"][0] == pytest.approx(kth / level * (4 * k + count) / (5 * k) if level else 0, rel=1e-4)
        ratio, edges = slots["ratio"][0], slots["edges"]


def test_threshold_that_is_far_too_high_is_lowered() -> None:
    """Magnitudes that fall from 1 to 1e-36 within a tensor, and then do not."""
    large, small = np.arange(1, 33, dtype=np.float32), np.full(32, 1e-36, np.float32)
    net = Loopback("oktopk", world_size=2, density=0.25, min_elements=1)
    net.allreduce([np.concatenate([large, small]), np.concatenate([small, large])], name="w")
    counts = []
    for step in range(30):
        out = net.allreduce([numbers((64,), 2 * step + rank) for rank in range(2)], name="w")[0]
        assert np.isfinite(net.ranks[0].state_dict()["state"]["w"]["ratio"]).all()
        counts.append(np.count_nonzero(out))
    assert np.mean(counts[-10:]) >= 12  # of 16


def test_regions_follow_the_entries() -> None:
    """Most entries are in one eighth of the tensor: the edges move into it, until owners send about as many."""
    net = Trial(hvdcompress.get_method("oktopk", density=0.02), 4)
    loads = []
    for step in range(25):
        gradients = [numbers((8000,), rank, step) for rank in range(4)]
        for g in gradients:
            g[1000:2000] *= 10
        net.log.clear()
        net.allreduce(gradients, "w")
        (pieces,) = (c for c in net.log if c.collective == "AllGather")
        loads.append(np.array(pieces.num_bytes) - NUM_BYTES)
    shares = [max(load) / sum(load) for load in loads[-5:]]
    assert np.mean(shares) < 0.4
    inner = bounds(net.ranks[0].states["w"].slots["edges"], 8000, 4)[1:-1]
    assert min(inner) > 1000 and max(inner) < 2000


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "short"])
def test_damaged_piece_is_refused(damage: str) -> None:
    method = hvdcompress.get_method("oktopk", density=0.1)
    state = {"ratio": np.zeros(1, np.float32), "edges": np.zeros(SHARES - 1, np.float32)}
    ranks = [
        method.exchange(
            numbers((200,), rank), state, Context(rank, 2, 0, TensorSpec("w", (200,))), Workspace(hvdcompress.ops.fast)
        )
        for rank in range(2)
    ]
    (own, other), _ = perform([next(rank) for rank in ranks])
    bad = {
        "cut": other[:-4],
        "longer": np.r_[other, other[:4]],
        "flipped": np.r_[other[:3], ~other[3:4], other[4:]],
        "short": other[:10],
    }[damage]
    with pytest.raises(WireError):
        ranks[0].send([own, np.ascontiguousarray(bad)])
