"""The ledger: what was handed to collectives, and what rings carry."""

from __future__ import annotations

import math
import time
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.observer import Sent
from hvdcompress.loopback import Loopback
from hvdcompress.ops.numba._kernels.compiling import LOCKS
from hvdcompress.testing import numbers


@pytest.mark.parametrize(
    "collective,wire", [("AllReduce", 1200), ("Broadcast", 1200), ("AllToAll", 600), ("AllGather", 2400)]
)
def test_bytes_on_the_wire_of_a_ring_of_four(collective: str, wire: int) -> None:
    """m = 800, p = 4: all-reduce 2·3/4·m, all-to-all 3/4·m, all-gather 3·m."""
    ledger = Ledger(world_size=4)
    ledger.sent(0, "w", Sent(collective, None, 800))
    assert (ledger.bytes_sent(), ledger.bytes_on_wire(), ledger.collectives()) == (800, wire, 1)


def ring_all_gather(lengths: list[int], rank: int) -> int:
    """Simulated: in p − 1 steps each rank passes on what it got last, starting with its own."""
    p = len(lengths)
    return sum(lengths[(rank - step) % p] for step in range(p - 1))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8))
def test_uneven_all_gather_is_what_a_ring_passes_on(lengths: list[int]) -> None:
    ledger = Ledger(world_size=len(lengths))
    for rank, length in enumerate(lengths):
        ledger.sent(rank, "w", Sent("AllGather", None, length, lengths))
    for rank in range(len(lengths)):
        assert ledger.bytes_on_wire(rank) == ring_all_gather(lengths, rank)
        assert ledger.bytes_sent(rank) == lengths[rank]


def test_one_worker_transmits_nothing() -> None:
    for id in ("none", "topk", "scalecom", "bf16", "fp16", "randomk", "gaussiank"):
        net = Loopback(id, world_size=1, min_elements=1)
        net.allreduce([np.ones(100, np.float32)])
        assert net.ledger.bytes_on_wire(0) == 0 < net.ledger.bytes_sent(0)


def test_ranks_and_tensors_are_kept_apart() -> None:
    ledger = Ledger(world_size=2, rank=1)
    ledger.sent(0, "a", Sent("AllReduce", None, 10))
    ledger.sent(1, "a", Sent("AllReduce", None, 20))
    ledger.sent(1, "b", Sent("AllReduce", None, 40))
    ledger.begun(1, "b", 400)
    assert [ledger.bytes_sent(rank) for rank in (0, 1, None)] == [10, 60, 60]
    assert {name: (e.sent, e.dense, e.collectives) for name, e in ledger.tensors().items()} == {
        "a": (20, 0, 1),
        "b": (40, 400, 1),
    }
    assert ledger.tensors(0).keys() == {"a"}


def test_rate_is_dense_bytes_by_bytes_sent() -> None:
    net = Loopback("topk", world_size=2, density=0.01)
    assert math.isnan(net.ledger.compression_ratio(0))
    for step in range(3):
        net.allreduce([numbers((4000,), rank, step) for rank in range(2)])
    assert net.ledger.dense_bytes(0) == 3 * 16_000
    assert net.ledger.compression_ratio(0) == 48_000 / net.ledger.bytes_sent(0) > 40


def test_dense_bytes_are_in_the_gradients_own_dtype() -> None:
    net = Loopback("none", world_size=1)
    for name, dtype, size in (("h", np.float16, 2), ("s", np.float32, 4), ("d", np.float64, 8)):
        net.allreduce([np.ones(10, dtype)], name)
        assert net.ledger.tensors(0)[name].dense == 10 * size


def test_tensors_sum_to_the_rank() -> None:
    net = Loopback("scalecom", world_size=3, density=0.1, min_elements=50)
    for step in range(2):
        net.allreduce_many([{n: numbers((s,), rank, step) for n, s in (("a", 20), ("b", 500))} for rank in range(3)])
    for rank in range(3):
        entries = net.ledger.tensors(rank).values()
        assert sum(e.sent for e in entries) == net.ledger.bytes_sent(rank)
        assert round(sum(e.on_wire for e in entries)) == net.ledger.bytes_on_wire(rank)
        assert sum(e.collectives for e in entries) == net.ledger.collectives(rank)


def test_a_broadcast_counts_on_every_rank() -> None:
    net = Loopback("scalecom", world_size=3, density=0.01)
    net.allreduce([numbers((2000,), rank) for rank in range(3)])
    assert len({net.ledger.bytes_sent(rank) for rank in range(3)}) == 1


def test_seconds_and_steps() -> None:
    net = Loopback("topk", world_size=2)
    for step in range(2):
        net.allreduce([numbers((5000,), rank, step) for rank in range(2)])
    bad = [numbers((5000,), rank) for rank in range(2)]
    bad[1][0] = np.inf
    net.allreduce(bad)
    assert net.ledger.steps == 2, "an abandoned step is none"
    seconds = net.ledger.seconds(1)
    assert set(seconds) == {"codec", "wait"} and seconds["codec"] > 0


def test_compiling_is_no_codec_work() -> None:
    """What numba takes to compile in the middle of a step is not in its seconds, and is subtracted once."""
    before = LOCKS.seconds
    with LOCKS.compiling():
        time.sleep(0.05)
    spent = LOCKS.seconds - before
    ledger, other = Ledger(world_size=2), Ledger(world_size=2)
    ledger.encoded(0, "w", spent + 0.5)
    assert ledger.seconds()["codec"] < 0.5 + spent / 2 and spent > 0.01
    ledger.decoded(0, "w", 0.25)
    other.encoded(0, "w", 0.25)
    assert other.seconds()["codec"] == 0.25
    assert ledger.tensors()["w"].seconds == ledger.seconds()["codec"] > 0.7


def test_counters_add_up_and_reset_forgets() -> None:
    ledger = Ledger(world_size=2)
    ledger.committed(0, "w", {"kept": 3})
    ledger.committed(0, "w", {"kept": 4, "saturated": 1})
    ledger.committed(1, "w", {"kept": 100})
    assert ledger.counters(0) == {"kept": 7, "saturated": 1}
    ledger.sent(0, "w", Sent("AllReduce", None, 8))
    ledger.reset()
    assert ledger.counters(0) == {} and ledger.bytes_sent(0) == 0 and ledger.tensors(0) == {} and ledger.steps == 0


def test_asking_changes_nothing() -> None:
    ledger = Ledger(world_size=2)
    before = repr(ledger.tensors(5))
    assert ledger.bytes_sent(5) == 0 and repr(ledger.tensors(5)) == before


def test_unknown_op_is_an_error() -> None:
    with pytest.raises(KeyError):
        Ledger(world_size=2).sent(0, "w", Sent("SendRecv", None, 8))


def test_one_rank_is_told_why_it_has_no_rate():
    with pytest.warns(UserWarning, match="one rank alone sends nothing.*horovodrun -np 2"):
        assert math.isnan(Ledger(1).compression_ratio())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isnan(Ledger(2).compression_ratio()), "nothing was sent yet"
