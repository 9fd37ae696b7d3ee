"""The experiment: all-reduces of one vector per rank by MPI, by rings with codecs, and by methods of hvdcompress.

    launch/ring.sh -n 4 --method "topk density=0.01"

All ways exchange vectors of several lengths, in turns. The time of an exchange is that of the slowest rank, from a
barrier on; bytes are counted where they are sent. Rank 0 prints a table, and writes the measurements and a plot.
"""

from __future__ import annotations

import logging
import math
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from matplotlib.figure import Figure

from experiments.configfile import split
from experiments.report import numbers, plots, results, tables
from experiments.ring.algorithm import ring_allreduce
from experiments.ring.codecs import Array, Dense, Projection, Recoded, SegmentCodec
from hvdcompress import registry
from hvdcompress.method import Context, TensorSpec
from hvdcompress.mpi import Compressor  # before mpi4py, whose environment it sets
from hvdcompress.parts import codecs
from hvdcompress.parts.sums import Quantizer
from hvdcompress.plan import settings_of

from mpi4py import MPI  # isort: skip

Exchange = Callable[[Array], tuple[Array, float]]  #: a vector -> the sum over ranks, and the bytes that this rank sent
METHODS = ["qsgd bits=4", "topk density=0.01", "scalecom density=0.01", "powersgd"]
WARM = 2  #: exchanges before the first that is timed: they compile kernels and open connections
ADDED, CODED, OWN = "ring, payloads add", "ring, encoded again at every hop", "methods, their own collectives"


def ways_of(n: int, methods: Sequence[str], comm: Any) -> dict[tuple[str, str], Exchange]:
    """Return ways to add vectors of n elements over the ranks of ``comm``, by their kind and name."""
    ctx = Context(comm.rank, comm.size, 0, TensorSpec("ring", (n,)))
    rng = np.random.default_rng(0)  # equal on all ranks
    size = min(768, n)  # of a slice
    basis = np.linalg.qr(rng.standard_normal((size, max(1, size // 8))))[0].T
    projection = Projection(np.ascontiguousarray(basis, np.float32), comm.size)
    # number formats, and the codecs of methods that consist of one, such as TernGrad
    formats = {name: codecs.codec(name) for name in ("fp16", "bf16", "rangefloat12", "rangefloat8", "qsgd8", "qsgd4")}
    known = {id: registry.get_method(id) for id in registry.available() if id != "qsgd"}
    formats |= {id: each.codec for id, each in known.items() if isinstance(each, Quantizer)}
    added = {"fp32": Dense(), "GradiVeQ 8x": projection}
    coded = {name: Recoded(codec, ctx) for name, codec in formats.items()}
    coded["GradiVeQ 8x, qsgd8"] = Recoded(formats["qsgd8"], ctx, projection)

    def native(x: Array) -> tuple[Array, float]:
        total = np.empty_like(x)
        comm.Allreduce(x, total)
        return total, 2 * (comm.size - 1) / comm.size * x.nbytes  # as a ring; MPI does not tell

    def around(codec: SegmentCodec) -> Exchange:
        def exchange(x: Array) -> tuple[Array, float]:
            found = ring_allreduce(x, codec, comm)
            return found.total, found.sent

        return exchange

    def method(words: str) -> Exchange:
        id, *settings = words.split()
        compressor = Compressor(id, comm, min_elements=1, optimizer_momentum="keep", **settings_of(settings))
        height = next(side for side in range(math.isqrt(n), 0, -1) if n % side == 0)  # low rank needs a matrix

        def exchange(x: Array) -> tuple[Array, float]:
            before = compressor.ledger.bytes_on_wire()
            total = compressor.allreduce(x.reshape(height, -1), name="ring", op="sum").reshape(-1)
            return total, compressor.ledger.bytes_on_wire() - before

        return exchange

    return {
        (ADDED, "MPI"): native,
        **{(ADDED, name): around(codec) for name, codec in added.items()},
        **{(CODED, name): around(codec) for name, codec in coded.items()},
        **{(OWN, words): method(words) for words in methods},
    }


def measure(ways: Mapping[Any, Exchange], x: Array, runs: int, comm: Any) -> pd.DataFrame:
    """Time ``runs`` exchanges of this rank's vector in each way, in random turns; collective.

    Returns:
        A row per way and run, the same on all ranks: ``way``; ``elements``; ``run``; ``seconds`` of the slowest rank;
        ``sent``, bytes per rank (mean of the ranks); ``error`` of the way's first sum, ‖sum − exact‖/‖exact‖.
    """
    exact = np.empty(len(x), np.float64)
    comm.Allreduce(x.astype(np.float64), exact)
    errors: dict[Any, float] = {}
    rows = []
    for run in range(-WARM, runs):
        for way in random.Random(run).sample(list(ways), len(ways)):  # the same order on all ranks
            comm.Barrier()
            began = time.perf_counter()
            total, sent = ways[way](x)
            seconds = comm.allreduce(time.perf_counter() - began, MPI.MAX)
            sent = comm.allreduce(sent, MPI.SUM) / comm.size
            if way not in errors:  # the first sum has no residual
                errors[way] = float(np.linalg.norm(total - exact) / (np.linalg.norm(exact) or 1.0))
            rows.append((way, len(x), run, seconds, sent, errors[way]))
    frame = pd.DataFrame(rows, columns=["way", "elements", "run", "seconds", "sent", "error"])
    order = list(ways)
    return frame[frame["run"] >= 0].sort_values("way", key=lambda each: each.map(order.index), kind="stable")


def table(frame: pd.DataFrame) -> str:
    """Return a table of the longest vectors, the fastest way first."""
    made = (
        frame[frame["elements"] == frame["elements"].max()]
        .groupby(["way", "kind"], as_index=False)[["seconds", "sent", "error"]]
        .median()
    )
    made.insert(3, "× MPI's", made.loc[made["way"] == "MPI", "seconds"].iloc[0] / made["seconds"])
    formats = {"seconds": numbers.seconds_of, "× MPI's": numbers.rate_of, "sent": numbers.num_bytes}
    return tables.markdown(made.sort_values("seconds"), error="{:.2%}".format, **formats)


def plot(frame: pd.DataFrame) -> Figure:
    """Draw the time against the length of the vectors, a panel per kind of sum, the nine fastest ways of each."""
    medians = frame.groupby(["kind", "way", "elements"], as_index=False, sort=False)["seconds"].median()
    longest = medians[medians["elements"] == medians["elements"].max()]
    fastest = longest.sort_values("seconds").groupby("kind").head(9)["way"]
    drawn = medians[medians["way"].isin(fastest)].assign(ms=lambda rows: 1e3 * rows["seconds"])
    return plots.lines(
        drawn,
        "elements",
        "ms",
        "way",
        "kind",
        {"elements": "elements per rank", "ms": "ms per all-reduce"},
        lambda ax, _: ax.loglog(),
        share_y=True,
    )


def main(
    elements: Annotated[
        str, typer.Option(help="float32 values per rank: lengths, with commas.")
    ] = "10000,100000,1000000",
    runs: Annotated[int, typer.Option(min=1, help="Timed exchanges.")] = 9,
    method: Annotated[
        list[str], typer.Option("-m", "--method", help='Such as "topk density=0.001"; again for more; "all" for all.')
    ] = METHODS,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/ring"),
) -> None:
    """The ring all-reduce across MPI ranks: measure on all ranks; rank 0 reports."""
    comm = MPI.COMM_WORLD
    if comm.size == 1:
        sys.exit("one rank has nobody to send to: start several, mpirun -np 4")
    logging.getLogger("hvdcompress").addHandler(logging.NullHandler())  # the table says what is sent
    methods = registry.available() if method == ["all"] else method
    lengths = [int(word) for word in split(elements)]
    frames = []
    for n in lengths:
        x = np.random.default_rng(comm.rank).standard_normal(n, np.float32)
        try:
            ways = ways_of(n, methods, comm)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if not comm.rank:
            print(f"{n:,} values per rank: {len(ways)} ways, in {WARM + runs} turns …", flush=True)
        frames.append(measure(ways, x, runs, comm))
    hosts = len(set(comm.allgather(MPI.Get_processor_name())))
    if comm.rank:
        return
    frame = pd.concat(frames, ignore_index=True)
    frame[["kind", "way"]] = frame["way"].tolist()
    where = f"{comm.size} ranks on {f'{hosts} hosts' if hosts > 1 else f'{os.cpu_count()} cores'}"
    text = f"**{where}, {max(lengths):,} float32 values each**\n\n{table(frame)}\n"
    print(f"\n{text}")
    command = shlex.join(["launch/ring.sh", "-n", str(comm.size), *sys.argv[1:]])
    written = results.save("ring", frame, out, command=command, ranks=comm.size, hosts=hosts)
    written.with_name("table.md").write_text(text, encoding="utf-8")
    print("written:", written, plots.save(plot(frame), out / "ring.svg"))


if __name__ == "__main__":
    typer.run(main)
