"""The report of ``python -m experiments bench codec``: its tables, on a terminal and as a page of the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.bench.codec import (
    DENSITY,
    SETTINGS,
    TENSORS_AT_MOST,
    WARM,
    Asked,
    Figures,
    Measured,
    ratio,
    specs_of,
)
from experiments.bench.side import PARTS
from experiments.output.table import MISSING, Column, Table, folded
from experiments.report.numbers import number

__all__ = ["markdown", "sections"]


LEAST = 5e-4  #: what is less is shown as nothing


@dataclass(frozen=True)
class Row:
    """One line: what was measured, of how many elements, and in which group."""

    group: Measured
    figures: Figures
    elements: int

    @property
    def copies(self) -> float:
        """The median, in copies of as many elements."""
        return self.figures.in_copies() / self._share

    @property
    def least(self) -> float:
        """The shortest run, in shortest copies."""
        return self.figures.least() / self._share

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.figures.seconds)

    @property
    def rate(self) -> float:
        """Of the copies: bytes read and written a second."""
        return 8 * self._size / statistics.median(self.figures.copies)

    @property
    def times(self) -> float | None:
        """How many times as long as this peer the method takes."""
        return ratio(self.group.one, self.figures)

    @property
    def times_one(self) -> float | None:
        """How many times as long as on one tensor the method takes on a net's, element for element."""
        found = ratio(self.figures, self.group.one)
        return found and found / self._share

    def part(self, name: str) -> float:
        """A part's median, in copies."""
        return self.figures.in_copies(name) / self._share

    def sizes(self, num_bytes: float | None) -> float | None:
        """Bytes in sizes of the gradient."""
        return None if num_bytes is None else num_bytes / (4 * self.elements)

    @property
    def _size(self) -> int:
        rows, columns = self.group.shape
        return rows * columns

    @property
    def _share(self) -> float:
        return self.elements / self._size


def _figure(value: float | None) -> str:
    return MISSING if value is None else number(value if value >= LEAST else 0.0)


COPIES: tuple[Column[Row], ...] = (
    Column("copies", "copies", lambda row: _figure(row.copies), lambda row: row.copies),
    Column("least", "least", lambda row: _figure(row.least), lambda row: row.least),
)
SECONDS: Column[Row] = Column(
    "seconds", "ms", lambda row: _figure(1e3 * row.seconds), lambda row: row.seconds, "s", yields=1
)
FAULTS: Column[Row] = Column(
    "faults",
    "page faults",
    lambda row: MISSING if row.figures.faults is None else f"{row.figures.faults:.0f}",
    lambda row: row.figures.faults,
)


def _part(name: str) -> Column[Row]:
    return Column(name, name, lambda row: _figure(row.part(name)), lambda row: row.part(name), yields=1)


METHODS: tuple[Column[Row], ...] = (
    Column("method", "method", lambda row: row.group.label, align="left"),
    *COPIES,
    *(_part(name) for name in PARTS),
    SECONDS,
    Column("copy", "a copy, GB/s", lambda row: _figure(row.rate / 1e9), lambda row: row.rate, "B/s"),
    FAULTS,
    Column("fresh", "fresh", lambda row: _figure(row.sizes(row.figures.fresh)), lambda row: row.figures.fresh, "B"),
    Column("kept", "kept", lambda row: _figure(row.sizes(row.figures.kept)), lambda row: row.figures.kept, "B"),
)
PEERS: tuple[Column[Row], ...] = (
    Column("method", "method", lambda row: row.group.label, align="left"),
    Column("peer", "compared with", lambda row: row.figures.name, align="left"),
    *COPIES,
    SECONDS,
    FAULTS,
    Column(
        "times",
        "method ÷ this",
        lambda row: _figure(row.times),
        lambda row: row.times,
        marked=lambda row: bool(row.times and row.figures.at_most and row.times > row.figures.at_most),
    ),
    Column("at_most", "at most", lambda row: _figure(row.figures.at_most), lambda row: row.figures.at_most),
)
TENSORS: tuple[Column[Row], ...] = (
    Column("method", "method", lambda row: row.group.label, align="left"),
    Column("exchanges", "exchanges", lambda row: str(row.figures.buckets), lambda row: row.figures.buckets),
    *COPIES,
    *(_part(name) for name in PARTS),
    SECONDS,
    FAULTS,
    Column(
        "times",
        "÷ one tensor",
        lambda row: _figure(row.times_one),
        lambda row: row.times_one,
        marked=lambda row: bool(row.times_one and row.times_one > TENSORS_AT_MOST),
    ),
    Column("at_most", "at most", lambda row: _figure(TENSORS_AT_MOST), lambda row: TENSORS_AT_MOST),
)


LEGEND = """\
Ranks run in lockstep in one process; what a rank computes is timed, from its gradients to the reduced ones and the new
state (`Exchange.add`, `start`, `resume`, `deliver`, and `commit_step`), on average over the ranks. The network is not:
collectives are carried out in between. Gradients come as PyTorch's driver takes them, reduced ones are written over
them, and what it leaves to Horovod as it is (`none`) costs nothing. Each method has a process of its own with one
thread, in which it takes turns with what it is compared with. The first steps ({warm} at least; of GradiVeQ all
dense ones) do not count.

- *copies*: time over that of a copy (`numpy.copyto` of as many float32) that was made just before, the median of
  {runs} runs; *least*: the shortest run over the shortest copy. On the CPU, time is the thread's processor time; on a
  GPU, that between two events. A busy machine slows copies down more than computing.
- *encode*: up to the last collective, with receiving the gradients; *decode*: after it; *apply*: writing the result
  over the gradients, and committing.
- *a copy, GB/s*: bytes read and written by these copies.
- *page faults*: pages touched for the first time, of a rank in a step, the mean. *fresh*: memory that a step asks for
  and gives back, call for call the most at once, as in a process that keeps none for that; *kept*: what stays from
  step to step: residuals, second buffers and scratch. Both in sizes of the gradient. A rank's peak is the gradient,
  what is kept and, at most, what is fresh. A page has 4 KiB, but large arrays of numpy's may get pages of 2 MiB,
  whose faults are few and expensive.
- Gradients are drawn again for each step, outside of the time: elements' scales differ log-normally, in blocks and
  within them, and stay (kurtosis about 50); a part of the gradient is the same in every step; half of the noise is
  common to the ranks (`experiments/bench/draws.py`).
- Density {density}, unless a row says otherwise. Tensors are matrices, since PowerSGD and DGC send vectors dense;
  GradiVeQ has `{gradiveq}`.
"""
BARE = """\
What other packages do is written after what they published, in a few lines (`experiments/bench/peers.py`): the
arithmetic of a rank's step, as above. *method ÷ this*: how many times as long the method takes, the median over rounds.
*at most*: how many times as long it may.
"""
MANY = """\
The net's gradients in the buckets that PyTorch's driver makes, and one tensor of their size; *÷ one tensor*: time per
element over that of the one tensor.
"""


def sections(asked: Asked, measured: Sequence[Measured]) -> list[tuple[Table[Row], str]]:
    """The tables, and what is to be said of them: methods, what they are compared with, a net's tensors."""
    spec, many = specs_of(asked)
    size, total = spec.size, sum(each.size for each in many)
    where = f"{asked.world_size} ranks, {asked.device}"
    shape = " × ".join(map(str, spec.shape))
    ones = [Row(group, group.one, size) for group in measured]
    peers = [Row(group, peer, size) for group in measured for peer in group.peers]
    net = [Row(group, group.many, total) for group in measured if group.many]
    found = [
        (Table(METHODS, ones, f"One tensor of {shape}: {size:,} elements; {where}"), ""),
        (Table(PEERS, peers, "Compared with other implementations, and the bare operations"), BARE),
        (Table(TENSORS, net, f"{asked.net}: {len(many)} tensors, {total:,} elements; {where}"), MANY),
    ]
    return [(table.filled(), words) for table, words in found if table.rows]


def markdown(asked: Asked, measured: Sequence[Measured], command: str, machine: str) -> str:
    """The page; says of itself that it is generated."""
    gradiveq = ", ".join(f"{key}: {str(value).lower()}" for key, value in SETTINGS["gradiveq"].items())
    legend = LEGEND.format(warm=WARM, runs=asked.runs, density=DENSITY, gradiveq=gradiveq)
    parts = ["# What a rank computes in a step", f"Generated by `{command}`; do not edit.\nMachine: {machine}.", legend]
    for table, words in sections(asked, measured):
        parts += [f"## {table.title}", words, folded(table.markdown())]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"
