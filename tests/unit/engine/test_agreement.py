"""What ranks agree on before they exchange anything: any difference is seen, and named on all of them alike."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcompress.engine.agreement import PeerError, Status, compare_configs, factor_of, fingerprint, peer_error


def together(*ranks: Status) -> Status:
    """As an all-reduce of maxima brings them together, in float64."""
    return Status.of(np.max(np.array([one.numbers() for one in ranks], np.float64), axis=0).tolist())


def test_ranks_that_agree() -> None:
    state = fingerprint("plan", [("w", 3)])
    one = together(*[Status(state=state, loss_scale=1024.0)] * 3)
    assert one == Status(state=state, loss_scale=1024.0, least_loss_scale=1024.0)
    assert one.agreed


@pytest.mark.parametrize("flag", ("failed", "non_finite", "triggered", "replaced"))
def test_a_flag_of_one_rank_is_seen_by_all(flag: str) -> None:
    agreed = together(Status(), Status(**{flag: True}), Status())
    assert agreed == Status(**{flag: True}, least_loss_scale=1.0)


def test_a_difference_that_an_average_would_hide() -> None:
    assert not together(Status(state=1.0), Status(state=2.0), Status(state=3.0), Status(state=2.0)).alike


def test_fingerprints_are_held_exactly_and_differ() -> None:
    prints = [fingerprint("plan", step) for step in range(1000)]
    assert len(set(prints)) == 1000
    assert all(0 <= one < 2**52 and one == int(one) for one in prints)
    assert fingerprint("a", 1) == fingerprint("a", 1) != fingerprint("a", 2)
    assert not together(Status(state=2.0**52 - 1), Status(state=2.0**52 - 2)).alike


def test_different_loss_scales() -> None:
    with pytest.raises(PeerError, match=r"1\.0 on one and 8\.0 on another"):
        together(Status(loss_scale=8.0), Status(loss_scale=1.0)).raise_disagreement()


def test_failures_are_told_with_their_ranks() -> None:
    assert "rank 1: no; rank 3: neither" in str(peer_error(["", "no", "", "neither"]))


def test_plans_and_tensors_are_compared_by_key() -> None:
    same = ({"method": "topk", "density": 0.1}, {"w": "(3,) float32"})
    compare_configs([same, same])
    with pytest.raises(PeerError, match="plan key 'method' is 'topk' on rank 0 and 'fft' on rank 2"):
        compare_configs([same, same, ({"method": "fft", "density": 0.2}, same[1])])
    with pytest.raises(PeerError, match=r"tensor 'w' is '\(3,\) float32' on rank 0 and None on rank 1"):
        compare_configs([same, (same[0], {})])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 16])
def test_probes_tell_an_average_from_a_sum_from_anything_else(world_size: int) -> None:
    probes = np.array([[1 / world_size, (rank + 1) / world_size**2] for rank in range(world_size)])
    assert factor_of(probes.mean(0).tolist(), world_size) == 1 / world_size
    assert factor_of(probes.sum(0).tolist(), world_size) == 1.0
    others = [probes.min(0), probes.max(0), probes.prod(0)] if world_size > 1 else []
    joined = [
        probes[:some].sum(0) / by for some in range(1, world_size) for by in (1, world_size)
    ]  # the rest give zeros
    for probe in (*others, *joined):
        with pytest.raises(PeerError, match=r"hvd.Average or hvd.Sum.*Adasum.*hvd.join\(\)"):
            factor_of(probe.tolist(), world_size)


def test_a_rank_that_gives_zeros_has_joined() -> None:
    good = Status(state=5.0, loss_scale=1024.0)
    maxima = np.maximum(good.numbers(), np.zeros(8))
    assert Status.of(maxima.tolist()).saw_join
    assert not together(good, good).saw_join
