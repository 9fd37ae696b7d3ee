"""The ring all-reduce experiment across MPI ranks: MPI's own, the ring written out with each codec, and every method.

    mpirun -np 4 python -m mpi4py -m experiments.scale.ring_run --out runs/ring

``launch/ring.sh`` builds that line. All exchange one vector per rank, in turns; rank 0 prints the table and draws
a plot. A turn's time is that of the slowest rank, between two barriers.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from rich.console import Console

from experiments.bench.codec import asked_for
from experiments.output.folder import write_files
from experiments.output.table import Column, Format, Table, as_json
from experiments.report import numbers
from experiments.scale.ring import Dense, Recoded, ring_allreduce
from hvdcompress.method import Context, TensorSpec
from hvdcompress.mpi import Compressor
from hvdcompress.parts import codecs
from hvdcompress.parts.sums import Codec

Array = np.ndarray[Any, Any]
CODECS = ("fp16", "bf16", "rangefloat8", "qsgd4")
WARM = 2  #: exchanges before the first that is timed: they compile kernels and open connections


@dataclass
class Contender:
    """A way to sum: its name, whether it is a baseline, and what one exchange does."""

    name: str
    baseline: bool
    sum: Callable[[], tuple[Array, float]]  #: this rank's sum, and bytes that it put on the wire
    seconds: list[float] = field(default_factory=list)
    error: float = 0.0
    on_wire: float = 0.0

    @property
    def median(self) -> float:
        """Seconds of the median exchange."""
        return statistics.median(self.seconds)


def contenders(x: Array, plans: Mapping[str, Any], comm: Any) -> list[Contender]:
    """MPI's all-reduce; the ring with each codec; methods, by their plans, on the vector as a matrix."""
    n, world_size = len(x), comm.size
    found = [Contender("MPI all-reduce", True, lambda: _native(x, comm))]
    found.append(Contender("ring, fp32", True, lambda: _rung(ring_allreduce(x, Dense(), comm))))
    ctx = Context(comm.rank, world_size, 0, TensorSpec("ring", (n,)), 0)
    for name in CODECS:
        codec: Codec = codecs.codec(name)
        coded = Recoded(codec, ctx)
        found.append(Contender(f"ring, {name}", False, lambda coded=coded: _rung(ring_allreduce(x, coded, comm))))  # type: ignore[misc]
    matrix = x.reshape(next(side for side in range(math.isqrt(n), 0, -1) if n % side == 0), -1)
    for label, plan in plans.items():
        compressor = Compressor(plan, comm)

        def reduce(compressor: Compressor = compressor) -> tuple[Array, float]:
            before = compressor.ledger.bytes_on_wire()
            total = compressor.allreduce(matrix, name="ring", op="sum").reshape(-1)
            return total, compressor.ledger.bytes_on_wire() - before

        found.append(Contender(label, False, reduce))
    return found


def _native(x: Array, comm: Any) -> tuple[Array, float]:
    total = np.empty_like(x)
    comm.Allreduce(x, total)
    return total, 2 * (comm.size - 1) / comm.size * x.nbytes  # if it goes as a ring


def _rung(result: Any) -> tuple[Array, float]:
    return result.total, result.sent


def measure(found: Sequence[Contender], x: Array, runs: int, comm: Any) -> None:
    """Time the contenders in turns, and compare each one's first sum with the exact one; collective."""
    exact = np.empty(len(x), np.float64)
    comm.Allreduce(x.astype(np.float64), exact)
    norm = float(np.linalg.norm(exact))
    for run in range(-WARM, runs):
        for one in found:
            comm.Barrier()
            began = time.perf_counter()
            total, on_wire = one.sum()
            spent = comm.allreduce(time.perf_counter() - began, MPI.MAX)
            if run == -WARM:  # before any residual
                one.error = float(np.linalg.norm(total - exact)) / norm if norm else 0.0
            if run >= 0:
                one.seconds.append(spent)
            one.on_wire = comm.allreduce(on_wire, MPI.SUM) / comm.size


def _seconds(key: str, title: str, of: Callable[[Contender], float], yields: int = 0) -> Column[Contender]:
    return Column(key, title, lambda one: numbers.seconds_of(of(one)), of, "s", yields=yields)


def table(found: Sequence[Contender], title: str) -> Table[Contender]:
    """A line per contender, the fastest first."""
    dense = found[0].median
    columns: list[Column[Contender]] = [
        Column("name", "all-reduce", lambda one: one.name, align="left"),
        _seconds("seconds", "median", lambda one: one.median),
        _seconds("least", "least", lambda one: min(one.seconds), yields=1),
        _seconds("most", "most", lambda one: max(one.seconds), yields=1),
        Column("times", "× MPI's", lambda one: numbers.number(dense / one.median), lambda one: dense / one.median),
        Column("on_wire", "on the wire", lambda one: numbers.num_bytes(one.on_wire), lambda one: one.on_wire, "B"),
        Column("error", "error", lambda one: f"{one.error:.2%}", lambda one: one.error),
    ]
    return Table(columns, sorted(found, key=lambda one: one.median), title)


def plot(found: Sequence[Contender], title: str) -> str:
    """Bars of the medians, the fastest first: baselines grey, codecs and methods blue."""
    import matplotlib

    from experiments.output import plots

    rows = sorted(found, key=lambda one: one.median)
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(0.9 + 0.27 * len(rows))
        axes = figure.add_subplot()
        for place, one in enumerate(rows):
            axes.barh(place, 1e3 * one.median, color=plots.colour(0 if one.baseline else 1), height=0.66)
            words = f"{numbers.seconds_of(one.median)}, error {one.error:.1%}"
            axes.annotate(words, (1e3 * one.median, place), (5, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_yticks(range(len(rows)), [one.name for one in rows], color=plots.INK, fontsize=8.5)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, 1.5e3 * max(one.median for one in rows))
        axes.set_xlabel("milliseconds per exchange (median of the slowest rank)")
        axes.set_title(title, loc="left", fontsize=9)
        axes.grid(visible=False, axis="y")
        return plots.alone(plots.svg(figure, "ring", title))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on all ranks; rank 0 prints, and writes where asked."""
    parser = argparse.ArgumentParser(
        prog="launch/ring.sh", description="The ring all-reduce experiment across MPI ranks."
    )
    parser.add_argument(
        "--elements", type=int, default=1_000_000, help="float32 values per rank (default: %(default)s)"
    )
    parser.add_argument("--runs", type=int, default=9, help="exchanges that are timed (default: %(default)s)")
    parser.add_argument(
        "--method",
        "-m",
        action="append",
        metavar="METHOD",
        help='such as "topk density=0.001"; again for more. Default: all',
    )
    parser.add_argument("--seed", type=int, default=0, help="of the vectors (default: %(default)s)")
    parser.add_argument("--format", choices=list(Format), default=Format.text, help="of the table (default: text)")
    parser.add_argument("--out", type=Path, help="folder for ring.json, table.md and ring.svg")
    given = parser.parse_args(arguments)
    comm = MPI.COMM_WORLD
    if comm.size == 1:
        sys.exit("one rank alone sends nothing: start several, mpirun -np 4")
    if given.elements < comm.size or given.runs < 1:
        parser.error(f"--elements must be {comm.size} or more, a value per rank, and --runs 1 or more")
    try:
        plans = asked_for(given.method or ())
    except ValueError as error:
        parser.error(str(error))
    x = np.random.default_rng([given.seed, comm.rank]).standard_normal(given.elements, np.float32)
    found = contenders(x, plans, comm)
    measure(found, x, given.runs, comm)
    hosts = len(set(comm.allgather(MPI.Get_processor_name())))
    if comm.rank:
        return
    title = f"{comm.size} ranks on {hosts} host{'s' if hosts > 1 else ''}, {given.elements:,} values each".replace(
        ",", " "
    ).replace("  ", ", ")
    made = table(found, title)
    made.print(Console(color_system=None), given.format)  # mpirun's ranks always believe in a terminal
    if given.out:
        files = {"ring.json": as_json(made.data()), "table.md": f"**{title}**\n\n{made.markdown()}"}
        written = write_files(given.out, files, lambda: {"ring.svg": plot(found, title)})
        print(f"written: {', '.join(map(str, written))}", file=sys.stderr)


if __name__ == "__main__":
    main()
