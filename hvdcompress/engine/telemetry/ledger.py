"""The ledger: bytes and seconds per rank and tensor; and the durations of recent steps.

``bytes_sent`` counts the payload bytes that a rank passes to its collectives, including headers, probes and status.
``bytes_on_wire`` is the number of bytes that the rank transmits if the collectives run as rings. Only the latter shows
gradient build-up, because a ring forwards each gathered payload p − 1 times. In an exchange with two levels, both count
the traffic between nodes, and ``bytes_inside_node`` what the rank transmits to other ranks of its node.

==========  =============  ==================================================================
collective  sent           on the wire
==========  =============  ==================================================================
all-reduce  m              2·(p − 1)/p · m
all-gather  own m          sum of m over all ranks, minus the m of the successor
all-to-all  m              m minus the rank's own piece: (p − 1)/p · m for equal pieces
broadcast   m, every rank  as an all-reduce, because it is sent as a sum with zeros
==========  =============  ==================================================================
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict, deque
from dataclasses import dataclass, field, fields
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple

from hvdcompress.engine.telemetry.observer import Observer, Sent

RECENT = 100  #: number of steps that are kept
FEWEST = 4  #: minimum number of steps for a mean


@dataclass
class Entry:
    """Totals of one rank, or of one tensor on one rank.

    Attributes:
        sent: bytes passed to collectives.
        on_wire: bytes transmitted if collectives run as rings.
        dense: bytes of the gradients in their own dtype.
        collectives: number of collectives.
        seconds: codec time.
    """

    sent: int = 0
    on_wire: float = 0.0
    dense: int = 0
    collectives: int = 0
    seconds: float = field(default=0.0, compare=False)  # not compared: no two runs take the same time

    def __add__(self, other: Entry) -> Entry:
        return Entry(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


class StepTime(NamedTuple):
    """Seconds and bytes of one step, or the means of several steps.

    Attributes:
        whole: seconds from the first gradient of the step to the first gradient of the next one.
        blocked: seconds in which the program waited for the exchange.
        codec: codec time in seconds; it may overlap with the backward pass.
        waiting: seconds in which the exchange waited for collectives; they may overlap, too.
        on_wire: bytes that the rank transmits if collectives run as rings.
        dense: bytes that it would transmit without compression.
    """

    whole: float
    blocked: float
    codec: float
    waiting: float
    on_wire: float
    dense: float

    @property
    def computing(self) -> float:
        """Seconds in which the program was not blocked."""
        return max(0.0, self.whole - self.blocked)

    @property
    def overlap(self) -> float:
        """Lower bound of the codec time and waiting that overlap with the backward pass, in seconds."""
        return max(0.0, self.codec + self.waiting - self.blocked)

    @property
    def other(self) -> float:
        """Lower bound of the blocked time that is neither codec time nor waiting, in seconds."""
        return max(0.0, self.blocked - self.codec - self.waiting)


@dataclass
class Ledger(Observer):
    """Observer that adds up bytes and seconds since its creation or the last :meth:`reset`.

    In the methods below, ``rank=None`` means the rank that the ledger was created for.

    Attributes:
        world_size: number of ranks.
        rank: the default rank.
        steps: number of steps that all ranks have committed.
    """

    world_size: int
    rank: int = 0
    steps: int = 0
    _ranks: dict[int, Entry] = field(default_factory=lambda: defaultdict(Entry))
    _tensors: dict[tuple[int, str], Entry] = field(default_factory=lambda: defaultdict(Entry))
    _seconds: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    _counters: dict[tuple[int, str], Any] = field(default_factory=lambda: defaultdict(int))
    _inside_node: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    _before: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)  # the totals after the last step
    # When each step began, whether it counts, and its times. ``whole`` is unknown until the next step begins
    _recent: deque[tuple[float, bool, StepTime]] = field(default_factory=lambda: deque(maxlen=RECENT + 1))

    # -- events -----------------------------------------------------------------------------------------

    def begun(self, rank: int, name: str, num_bytes: int) -> None:
        """Add ``num_bytes`` of gradients."""
        self._ranks[rank].dense += num_bytes
        self._tensors[rank, name].dense += num_bytes

    def sent(self, rank: int, name: str, what: Sent) -> None:
        """Add a collective."""
        index, p = what.group or (rank, self.world_size)
        if what.collective in ("AllReduce", "Broadcast"):
            wire = 2 * (p - 1) / p * what.num_bytes
        elif what.collective == "AllToAll":
            wire = what.num_bytes - what.splits[index] if what.splits else (p - 1) / p * what.num_bytes
        else:  # an all-gather
            lengths = what.lengths
            wire = sum(lengths) - lengths[(index + 1) % p] if lengths else (p - 1) * what.num_bytes
        if what.inside_node:
            self._inside_node[rank] += wire
            return
        for entry in (self._ranks[rank], self._tensors[rank, name]):
            entry.sent += what.num_bytes
            entry.on_wire += wire
            entry.collectives += 1

    def encoded(self, rank: int, name: str, seconds: float) -> None:
        """Add codec time, without the time in which Numba compiled."""
        seconds = max(0.0, seconds - _seconds_compiling())
        self._seconds[rank, "codec"] += seconds
        self._tensors[rank, name].seconds += seconds

    decoded = encoded

    def waited(self, rank: int, seconds: float) -> None:
        """Add time spent waiting for collectives."""
        self._seconds[rank, "wait"] += seconds

    def committed(self, rank: int, name: str, counters: dict[str, Any]) -> None:
        """Add a method's counters, such as "saturated" and "kept"."""
        for counter, amount in counters.items():
            self._counters[rank, counter] += amount

    def _rank(self, rank: int | None) -> int:
        return self.rank if rank is None else rank

    def bytes_sent(self, rank: int | None = None) -> int:
        """Return the payload bytes that the rank passed to its collectives."""
        return self._ranks[self._rank(rank)].sent

    def bytes_on_wire(self, rank: int | None = None) -> int:
        """Return the bytes that the rank transmits if the collectives run as rings."""
        return round(self._ranks[self._rank(rank)].on_wire)

    def bytes_inside_node(self, rank: int | None = None) -> int:
        """Return the bytes that the rank transmitted to ranks of its node, in exchanges with two levels."""
        return round(self._inside_node[self._rank(rank)])

    def dense_bytes(self, rank: int | None = None) -> int:
        """Return the bytes of the gradients in their own dtype."""
        return self._ranks[self._rank(rank)].dense

    def compression_ratio(self, rank: int | None = None) -> float:
        """Return dense bytes / bytes sent; NaN before the first collective. Warns if there is only one rank."""
        sent = self.bytes_sent(rank)
        if self.world_size == 1 and not sent:
            warnings.warn(
                "one rank alone sends nothing, so there is no compression ratio; start several: `horovodrun -np 2 "
                "python train.py`, `torchrun --nproc-per-node 2 train.py` or `mpirun -np 2 python train.py`",
                stacklevel=2,
            )
        return self.dense_bytes(rank) / sent if sent else float("nan")

    def collectives(self, rank: int | None = None) -> int:
        """Return the number of the library's own collectives that the rank took part in."""
        return self._ranks[self._rank(rank)].collectives

    def tensors(self, rank: int | None = None) -> dict[str, Entry]:
        """Return {tensor name: totals}."""
        return {name: entry for (r, name), entry in list(self._tensors.items()) if r == self._rank(rank)}

    def seconds(self, rank: int | None = None) -> dict[str, float]:
        """Return {"codec": codec time, "wait": time spent waiting for collectives}, in seconds."""
        return {what: self._seconds[self._rank(rank), what] for what in ("codec", "wait")}

    def counters(self, rank: int | None = None) -> dict[str, int]:
        """Return the sums of the methods' counters, such as {"kept": 120, "saturated": 0}."""
        return {name: int(amount) for (r, name), amount in self._counters.items() if r == self._rank(rank)}

    def reset(self) -> None:
        """Reset all counts to zero."""
        self.steps = 0
        for table in (self._ranks, self._tensors, self._seconds, self._counters, self._inside_node):
            table.clear()

    # -- durations of steps -----------------------------------------------------------------------------

    def note_step(self, began: float, blocked: float, waited: float = 0.0, counts: bool = True) -> None:
        """Record the duration of a step at its end. A driver that sees the beginning and end of steps calls it.

        Args:
            began: time of the first gradient, in seconds.
            blocked: seconds in which the program waited for the exchange.
            waited: seconds of waiting that the ledger does not count.
            counts: whether it is an ordinary, compressed step.
        """
        totals = self._totals()
        codec, waiting, on_wire, dense = (now - then for now, then in zip(totals, self._before, strict=True))
        self._before = totals
        was_reset = dense < 0
        time = StepTime(0.0, blocked, codec, waiting + waited, on_wire, dense)
        self._recent.append((began, counts and not was_reset, time))

    def mean_step(self) -> StepTime | None:
        """Return the mean of the middle half of the recent steps, sorted by duration; None if there are too few.

        Like a median, this ignores steps with an evaluation or with compiling kernels. Unlike medians of the parts, all
        parts of the mean belong to the same steps.
        """
        steps = sorted(
            time._replace(whole=following - began)
            for (began, counts, time), (following, *_) in pairwise(self._recent)
            if counts
        )
        if len(steps) < FEWEST:
            return None
        quarter = len(steps) // 4
        middle = steps[quarter : len(steps) - quarter]
        return StepTime(*(sum(values) / len(middle) for values in zip(*middle, strict=True)))

    def _totals(self) -> tuple[float, ...]:
        seconds = self.seconds()
        dense = 2 * (self.world_size - 1) / self.world_size * self.dense_bytes()
        return seconds["codec"], seconds["wait"], self.bytes_on_wire(), dense


_lock = Lock()
_reported = 0.0


def _seconds_compiling() -> float:
    """Return the seconds that Numba has compiled in this process since the last call of this function.

    A kernel is compiled, or loaded from disk, on its first call, inside codec work.
    """
    global _reported
    # Not imported here, because the module imports Numba, which takes a second
    kernels = sys.modules.get("hvdcompress.ops.numba._kernels.compiling")
    with _lock:
        now = kernels.LOCKS.seconds if kernels else 0.0
        before = _reported
        _reported = now
        return now - before
