"""What the ranks compare before they exchange gradients. Every difference is seen, and named alike on all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcompress.engine.agreement import PeerError, Status, compare_configs, fingerprint, peer_error
from hvdcompress.horovod.process_sets import factor_of


def status_of(state: float = 0.0, loss_scale: float = 1.0, **flags: bool) -> Status:
    names = ("failed", "non_finite", "triggered", "replaced")
    return Status(*(float(flags.get(name, False)) for name in names), state, -state, loss_scale, -loss_scale)


def reduced(*ranks: Status) -> Status:
    """Return the status after an all-reduce of maxima, in float64."""
    return Status(*np.max(np.array(ranks, np.float64), axis=0).tolist())


def test_equal_ranks_agree() -> None:
    state = fingerprint("plan", [("w", 3)])
    status = reduced(*[status_of(state=state, loss_scale=1024.0)] * 3)
    assert status == status_of(state=state, loss_scale=1024.0)
    status.require_agreement()


@pytest.mark.parametrize("flag", ["failed", "non_finite", "triggered", "replaced"])
def test_a_flag_of_one_rank_is_seen_by_all(flag: str) -> None:
    status = reduced(status_of(), status_of(**{flag: True}), status_of())
    assert status == status_of(**{flag: True})


def test_differences_do_not_cancel() -> None:
    assert not reduced(status_of(state=1.0), status_of(state=2.0), status_of(state=3.0), status_of(state=2.0)).alike


def test_fingerprints_differ_and_are_exact_in_float64() -> None:
    prints = {fingerprint("plan", step) for step in range(1000)}
    assert len(prints) == 1000 and fingerprint("plan", 1) in prints
    assert all(0 <= one < 2**52 and one == int(one) for one in prints)
    assert not reduced(status_of(state=2.0**52 - 1), status_of(state=2.0**52 - 2)).alike


def test_different_loss_scales_are_an_error() -> None:
    with pytest.raises(PeerError, match=r"1\.0 on one and 8\.0 on another"):
        reduced(status_of(loss_scale=8.0), status_of(loss_scale=1.0)).require_agreement()


def test_failures_are_listed_with_their_ranks() -> None:
    assert "rank 1: no; rank 3: neither" in str(peer_error(["", "no", "", "neither"]))


@pytest.mark.parametrize(
    "config,words",
    [
        (({"method": "fft", "density": 0.2}, {"w": "(3,)"}), "plan key 'method' is 'topk' on rank 0 and 'fft' on rank"),
        (({"method": "topk", "density": 0.1}, {}), r"tensor 'w' is '\(3,\)' on rank 0 and None on rank 2"),
    ],
)
def test_plans_and_tensors_are_compared_by_key(config: tuple[dict, dict], words: str) -> None:
    same = ({"method": "topk", "density": 0.1}, {"w": "(3,)"})
    compare_configs([same, same])
    with pytest.raises(PeerError, match=words):
        compare_configs([same, same, config])


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
def test_probes_tell_an_average_from_a_sum_and_from_anything_else(world_size: int) -> None:
    probes = np.array([[1 / world_size, (rank + 1) / world_size**2] for rank in range(world_size)])
    assert factor_of(probes.mean(0).tolist(), world_size) == 1 / world_size
    assert factor_of(probes.sum(0).tolist(), world_size) == 1.0
    others = [probes.min(0), probes.max(0), probes.prod(0)] if world_size > 1 else []
    # After hvd.join() the other ranks contribute zeros
    joined = [probes[:some].sum(0) / by for some in range(1, world_size) for by in (1, world_size)]
    for probe in (*others, *joined):
        with pytest.raises(PeerError, match=r"hvd.Average or hvd.Sum.*Adasum.*hvd.join\(\)"):
            factor_of(probe.tolist(), world_size)


def test_a_rank_that_contributes_zeros_has_joined() -> None:
    good = status_of(state=5.0, loss_scale=1024.0)
    assert Status(*np.maximum(good, np.zeros(8)).tolist()).minus_loss_scale == 0
    assert reduced(good, good).minus_loss_scale != 0
