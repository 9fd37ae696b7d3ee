"""Run every method for many steps, in two ranks of one process, and see whether anything grows:

python tools/soak.py --steps 10000 --out runs/soak.jsonl

Each method has a process of its own. Printed are the slope of its memory with its standard error (ordinary least
squares), what is still to come, which is the norm of the ranks' mean residual in gradients' norms, with the slope of
that, by how much rank 0's own residual grew in a step, whether the ranks' results were equal in every step, and how
much slower the last third was than the first. Slopes are those of the last two thirds: before, state and residuals
fill. Exit status 1 if something is not as it should be; a rank's own residual may grow, as PowerSGD's does by Alg. 2
where ranks' gradients differ for good. What is in --out is not run again; --steps 0 prints it alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console

import hvdcompress
from experiments.output import jsonl
from experiments.output.table import MISSING, Column, Table
from experiments.report.numbers import num_bytes, number, seconds_of
from hvdcompress.loopback import Loopback
from hvdcompress.testing import numbers

SHAPES = {"w": (48, 64), "conv": (16, 8, 3, 3), "b": (64,)}
POOL = 16  #: steps after which the gradients come again
SAMPLES = 200  #: of memory and residuals
GROWTH = 1 << 20  #: bytes in a run from which memory counts as growing, beyond twice its error
GROWN = 0.1  #: of its mean, by which a residual may grow in the last two thirds, beyond twice its slope's error
SLOWER = 1.5  #: the last third's quickest tenth against the first's: other processes share the machine


def soak(method: str, steps: int) -> dict[str, Any]:
    """One method's figures."""
    net = Loopback(method, 2, min_elements=0)
    drawn = [
        [{name: numbers(shape, rank, step) for name, shape in SHAPES.items()} for rank in range(2)]
        for step in range(POOL)
    ]
    norm = statistics.mean(float(np.linalg.norm(one["w"])) for ranks in drawn for one in ranks)
    process, every = psutil.Process(), max(1, steps // SAMPLES)
    samples, times, equal = np.zeros((-(-steps // every), 4)), np.zeros(steps), True
    for step in range(steps):
        began = time.perf_counter()
        outs = net.allreduce_many(drawn[step % POOL])
        times[step] = time.perf_counter() - began
        equal &= all(outs[0][name].tobytes() == outs[1][name].tobytes() for name in SHAPES)
        if step % every == 0:
            residuals = [net.residual("w", rank) for rank in range(2)]
            kept = [np.linalg.norm(one) / norm for one in (sum(residuals) / 2, residuals[0])]
            samples[step // every] = step, process.memory_info().rss, *kept
    late = samples[len(samples) // 3 :]
    slope, error = line(late[:, 0], late[:, 1])
    residual_slope, residual_error = line(late[:, 0], late[:, 2])
    first, last = np.quantile(times[steps // 10 : steps // 3], 0.1), np.quantile(times[-steps // 3 :], 0.1)
    return {
        "method": method, "steps": steps, "equal": equal, "slope": slope, "error": error,
        "residual": float(samples[:, 2].max()), "residual_late": float(late[:, 2].mean()),
        "residual_slope": residual_slope, "residual_error": residual_error,
        "own_slope": line(late[:, 0], late[:, 3])[0],
        "first": float(first), "last": float(last),
    }  # fmt: skip


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The slope of the least-squares line, and its standard error."""
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    left = y - y.mean() - slope * centred
    return slope, float(np.sqrt(left @ left / max(len(x) - 2, 1) / (centred @ centred)))


def wrong(row: dict[str, Any]) -> str:
    """What is not as it should be; empty if all is."""
    grown = row["slope"] - 2 * row["error"]
    more = (row["residual_slope"] - 2 * row["residual_error"]) * row["steps"] * 2 / 3
    found = {
        "ranks differ": not row["equal"],
        "memory grows": grown * row["steps"] > GROWTH,
        "the residual grows": not more <= GROWN * row["residual_late"],
        "steps become slower": row["last"] > SLOWER * row["first"],
    }
    return ", ".join(what for what, true in found.items() if true)


def table(rows: list[dict[str, Any]]) -> Table[dict[str, Any]]:
    """A line per method."""

    def slope(row: dict[str, Any]) -> str:
        return f"{row['slope']:.2f} ± {row['error']:.2f} B"

    def drift(row: dict[str, Any]) -> str:
        if not row["residual_late"]:
            return MISSING
        shares = (
            100 * row[f"residual_{key}"] * row["steps"] * 2 / 3 / row["residual_late"] for key in ("slope", "error")
        )
        return "{:+.2f} ± {:.2f} %".format(*shares)

    columns: list[Column[dict[str, Any]]] = [
        Column("method", "method", lambda row: row["method"], align="left"),
        Column("steps", "steps", lambda row: str(row["steps"])),
        Column("slope", "memory per step", slope, value=lambda row: row["slope"], unit="B"),
        Column("grown", "in the run", lambda row: num_bytes(row["slope"] * row["steps"])),
        Column("residual", "largest residual", lambda row: number(row["residual"])),
        Column("late", "residual, last two thirds", lambda row: number(row["residual_late"])),
        Column("drift", "and its growth in them", drift),
        Column("own", "rank 0's own, per step", lambda row: f"{row['own_slope']:+.5f}"),
        Column("first", "per step, first third", lambda row: seconds_of(row["first"])),
        Column("last", "last third", lambda row: seconds_of(row["last"])),
        Column("equal", "ranks", lambda row: "equal" if row["equal"] else "differ"),
        Column("wrong", "wrong", lambda row: wrong(row) or "nothing", align="left"),
    ]
    return Table(columns, rows, mark=lambda row: "failed" if wrong(row) else "")


def main() -> int:
    """Run what has not been run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--methods", default=",".join(hvdcompress.available()), help="ids, with commas")
    parser.add_argument("--out", type=Path, default=Path("runs/soak.jsonl"))
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    known = {row["method"] for row in jsonl.read(asked.out)}
    for method in asked.methods.split(",") if asked.steps else ():
        if method not in known:
            with multiprocessing.get_context("spawn").Pool(1) as pool:  # memory of its own
                found = pool.apply(soak, (method, asked.steps))
            jsonl.append(asked.out, {**found, "command": shlex.join(["python", "tools/soak.py", *sys.argv[1:]])})
            print(json.dumps(found), file=sys.stderr)
    rows = jsonl.read(asked.out)
    table(rows).print(Console(width=200), "markdown")
    return 1 if any(map(wrong, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
