"""The ledger: bytes given to collectives, bytes on the wire, and codec time, by rank and tensor."""

from __future__ import annotations

import math
import time
import warnings

import numpy as np
import pytest

from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.observer import Sent
from hvdcompress.loopback import Loopback
from hvdcompress.ops.numba._kernels.compiling import LOCKS
from tests.unit.engine.helpers import trained


@pytest.mark.parametrize(
    "collective,on_wire", [("AllReduce", 1200), ("Broadcast", 1200), ("AllToAll", 600), ("AllGather", 2400)]
)
def test_bytes_on_the_wire_of_a_ring_of_four(collective: str, on_wire: int) -> None:
    """m = 800, p = 4: all-reduce 2·3/4·m, all-to-all 3/4·m, all-gather 3·m."""
    ledger = Ledger(world_size=4)
    ledger.sent(0, "w", Sent(collective, None, 800))
    assert (ledger.bytes_sent(), ledger.bytes_on_wire(), ledger.collectives()) == (800, on_wire, 1)


@pytest.mark.parametrize("lengths", [[9], [3, 0], [5, 1000, 7], [1, 1, 0, 250, 2]], ids=str)
def test_an_all_gather_of_different_lengths_counts_what_a_ring_transmits(lengths: list[int]) -> None:
    """In p − 1 steps each rank passes on what it received last, starting with its own payload."""
    p = len(lengths)
    ledger = Ledger(world_size=p)
    for rank, length in enumerate(lengths):
        ledger.sent(rank, "w", Sent("AllGather", None, length, lengths))
        assert ledger.bytes_on_wire(rank) == sum(lengths[(rank - step) % p] for step in range(p - 1))
        assert ledger.bytes_sent(rank) == length


def test_ranks_and_tensors_are_counted_separately() -> None:
    ledger = Ledger(world_size=2, rank=1)
    ledger.sent(0, "a", Sent("AllReduce", None, 10))
    ledger.sent(1, "a", Sent("AllReduce", None, 20))
    ledger.sent(1, "b", Sent("AllReduce", None, 40))
    ledger.begun(1, "b", 400)
    assert [ledger.bytes_sent(rank) for rank in (0, 1, None)] == [10, 60, 60]
    entries = {name: (e.sent, e.dense, e.collectives) for name, e in ledger.tensors().items()}
    assert entries == {"a": (20, 0, 1), "b": (40, 400, 1)}
    assert ledger.tensors(0).keys() == {"a"}


def test_compression_ratio_is_dense_bytes_divided_by_bytes_sent() -> None:
    ledger = trained("topk", steps=3, shapes={"w": (4000,)}, density=0.01).ledger
    assert ledger.dense_bytes(0) == 3 * 16_000
    assert ledger.compression_ratio(0) == 48_000 / ledger.bytes_sent(0) > 40


def test_one_rank_has_no_compression_ratio() -> None:
    with pytest.warns(UserWarning, match="one rank alone sends nothing.*horovodrun -np 2"):
        assert math.isnan(Ledger(1).compression_ratio())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isnan(Ledger(2).compression_ratio()), "nothing was sent yet"


@pytest.mark.parametrize("dtype,size", [(np.float16, 2), (np.float32, 4), (np.float64, 8)])
def test_dense_bytes_are_in_the_dtype_of_the_gradients(dtype: type, size: int) -> None:
    net = Loopback("none", world_size=1)
    net.allreduce([np.ones(10, dtype)], "w")
    assert net.ledger.tensors(0)["w"].dense == 10 * size


def test_codec_time_does_not_include_compilation() -> None:
    """The time that numba spends compiling in the middle of a step is subtracted once."""
    before = LOCKS.seconds
    with LOCKS.compiling():
        time.sleep(0.02)
    spent = LOCKS.seconds - before
    ledger = Ledger(world_size=2)
    ledger.encoded(0, "w", spent + 0.5)
    assert ledger.seconds()["codec"] == pytest.approx(0.5) and spent > 0.01
    ledger.decoded(0, "w", 0.25)
    assert ledger.tensors()["w"].seconds == ledger.seconds()["codec"] == pytest.approx(0.75)


def test_counters_add_up_until_a_reset() -> None:
    ledger = Ledger(world_size=2)
    ledger.committed(0, "w", {"kept": 3})
    ledger.committed(0, "w", {"kept": 4, "saturated": 1})
    ledger.committed(1, "w", {"kept": 100})
    assert ledger.counters(0) == {"kept": 7, "saturated": 1}
    ledger.sent(0, "w", Sent("AllReduce", None, 8))
    ledger.reset()
    assert ledger.counters(0) == {} and ledger.bytes_sent(0) == 0 and ledger.tensors(0) == {} and ledger.steps == 0
