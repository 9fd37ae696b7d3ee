"""The ledger: bytes and seconds, per rank and tensor, as the collectives really carry them.

``bytes_sent`` counts the payload bytes that a rank hands to its collectives (headers, probes and status
included). ``bytes_on_wire`` is what the rank transmits when the collectives run as rings: gradient build-up
shows only there, as a gathered payload is passed on p − 1 times.

=========== ============== ===============================================
collective        sent           on the wire
=========== ============== ===============================================
all-reduce  m              2·(p − 1)/p · m
all-gather  own m          Σ over ranks of m, less the successor's own
all-to-all  m              m less the rank's own piece: (p − 1)/p · m if pieces are equal
broadcast   m, every rank  as an all-reduce: it is sent as a sum with zeros
=========== ============== ===============================================
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import dataclass, field, fields
from typing import Any

from hvdcompress.engine.telemetry import compiling
from hvdcompress.engine.telemetry.observer import Compared, Observer, Sent


@dataclass
class Entry:
    """Totals of one rank, or of one tensor on one rank."""

    sent: int = 0
    on_wire: float = 0.0
    dense: int = 0
    collectives: int = 0
    seconds: float = field(default=0.0, compare=False)  #: codec work; two runs never take the same time

    def __add__(self, other: Entry) -> Entry:
        return Entry(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass
class Ledger(Observer):
    """Totals since it was made (or :meth:`reset`). ``rank=None`` means the rank that the ledger was made for."""

    world: int
    rank: int = 0
    steps: int = 0
    _ranks: dict[int, Entry] = field(default_factory=lambda: defaultdict(Entry))
    _tensors: dict[tuple[int, str], Entry] = field(default_factory=lambda: defaultdict(Entry))
    _seconds: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    _counters: dict[tuple[int, str], Any] = field(default_factory=lambda: defaultdict(int))
    _compared: dict[int, Compared] = field(default_factory=dict)

    # -- events -----------------------------------------------------------------------------------------

    def begun(self, rank: int, name: str, num_bytes: int) -> None:
        """A gradient of ``num_bytes`` went through."""
        self._ranks[rank].dense += num_bytes
        self._tensors[rank, name].dense += num_bytes

    def sent(self, rank: int, name: str, what: Sent) -> None:
        """One collective."""
        p = self.world
        if what.collective in ("AllReduce", "Broadcast"):
            wire = 2 * (p - 1) / p * what.num_bytes
        elif what.collective == "AllToAll":
            wire = what.num_bytes - what.splits[rank] if what.splits else (p - 1) / p * what.num_bytes
        elif what.collective == "AllGather":
            lengths = what.lengths
            wire = sum(lengths) - lengths[(rank + 1) % p] if lengths else (p - 1) * what.num_bytes
        else:
            raise KeyError(what.collective)
        for entry in (self._ranks[rank], self._tensors[rank, name]):
            entry.sent += what.num_bytes
            entry.on_wire += wire
            entry.collectives += 1

    def encoded(self, rank: int, name: str, seconds: float) -> None:
        """Codec work; counted as "codec", without what numba compiled meanwhile."""
        seconds = max(0.0, seconds - compiling.taken())
        self._seconds[rank, "codec"] += seconds
        self._tensors[rank, name].seconds += seconds

    def decoded(self, rank: int, name: str, seconds: float) -> None:
        """Codec work; counted as "codec"."""
        self.encoded(rank, name, seconds)

    def waited(self, rank: int, seconds: float) -> None:
        """Waiting for collectives; counted as "wait"."""
        self._seconds[rank, "wait"] += seconds

    def committed(self, rank: int, name: str, counters: dict[str, Any]) -> None:
        """A method's counters, such as "saturated" and "kept", are added up."""
        for counter, amount in counters.items():
            self._counters[rank, counter] += amount

    def compared(self, rank: int, what: Compared) -> None:
        """The last comparison is kept."""
        self._compared[rank] = what

    # -- figures ----------------------------------------------------------------------------------------

    def _rank(self, rank: int | None) -> int:
        return self.rank if rank is None else rank

    def bytes_sent(self, rank: int | None = None) -> int:
        """Payload bytes that the rank handed to its collectives."""
        return self._ranks[self._rank(rank)].sent

    def bytes_on_wire(self, rank: int | None = None) -> int:
        """Bytes that the rank transmits when the collectives run as rings."""
        return round(self._ranks[self._rank(rank)].on_wire)

    def dense_bytes(self, rank: int | None = None) -> int:
        """Bytes of the gradients themselves, in their own dtype."""
        return self._ranks[self._rank(rank)].dense

    def compression_ratio(self, rank: int | None = None) -> float:
        """Dense bytes / bytes sent. NaN before anything was sent; one rank alone never sends, and is told so."""
        sent = self.bytes_sent(rank)
        if self.world == 1 and not sent:
            warnings.warn(
                "one rank alone sends nothing, so there is no ratio: start several, such as `horovodrun -np 2 python "
                "train.py`, `torchrun --nproc-per-node 2 train.py` or `mpirun -np 2 python train.py`",
                stacklevel=2,
            )
        return self.dense_bytes(rank) / sent if sent else float("nan")

    def collectives(self, rank: int | None = None) -> int:
        """Number of collectives of our own that the rank took part in."""
        return self._ranks[self._rank(rank)].collectives

    def tensors(self, rank: int | None = None) -> dict[str, Entry]:
        """Totals per tensor."""
        return {name: entry for (r, name), entry in list(self._tensors.items()) if r == self._rank(rank)}

    def seconds(self, rank: int | None = None) -> dict[str, float]:
        """{"codec": codec work, "wait": waiting for collectives}."""
        return {what: self._seconds[self._rank(rank), what] for what in ("codec", "wait")}

    def counters(self, rank: int | None = None) -> dict[str, int]:
        """Sums of what methods counted, e.g. {"kept": …, "saturated": …}."""
        return {name: int(amount) for (r, name), amount in self._counters.items() if r == self._rank(rank)}

    def last_compared(self, rank: int | None = None) -> Compared | None:
        """Return the last comparison with the uncompressed average; None if there was none (``cosine_every``)."""
        return self._compared.get(self._rank(rank))

    def reset(self) -> None:
        """Forget everything."""
        self.steps = 0
        for table in (self._ranks, self._tensors, self._seconds, self._counters, self._compared):
            table.clear()
