"""Run every method for many steps, two ranks in one process, and look for what grows.

Slopes are those of the last two thirds of the steps: before, state and residuals fill up. A rank's own residual may
grow, as PowerSGD's does by Alg. 2 if the ranks' gradients differ for good; the mean over ranks must not.
"""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import scipy.stats

import hvdcompress
from experiments.report import results, tables
from hvdcompress.loopback import Loopback
from hvdcompress.testing import numbers

SHAPES = {"w": (48, 64), "conv": (16, 8, 3, 3), "b": (64,)}
POOL, SAMPLES = 16, 200  #: gradients that are used in turn; samples of memory and residuals


def soak(method: str, steps: int) -> dict[str, Any]:
    """Return one method's slopes per step, with standard errors; residuals are in gradients' norms, memory in bytes."""
    net = Loopback(method, 2, min_elements=0)
    drawn = [[{n: numbers(s, rank, step) for n, s in SHAPES.items()} for rank in range(2)] for step in range(POOL)]
    norm = np.mean([np.linalg.norm(one["w"]) for ranks in drawn for one in ranks])
    times, samples, equal = np.zeros(steps), [], True
    for step in range(steps):
        began = time.perf_counter()
        one, other = net.allreduce(drawn[step % POOL])
        times[step] = time.perf_counter() - began
        equal &= all(one[name].tobytes() == other[name].tobytes() for name in SHAPES)
        if step % max(1, steps // SAMPLES) == 0:
            own, others = (net.residual("w", rank) / norm for rank in range(2))
            memory = psutil.Process().memory_info().rss
            samples.append((step, memory, np.linalg.norm(own + others) / 2, np.linalg.norm(own)))
    late = np.array(samples, float)[len(samples) // 3 :].T
    row: dict[str, Any] = {"method": method, "steps": steps, "equal": equal, "residual": late[2].mean()}
    for name, values in zip(("memory", "residual", "own_residual"), late[1:], strict=True):
        line = scipy.stats.linregress(late[0], values)
        row |= {f"{name}_per_step": line.slope, f"{name}_error": line.stderr}
    first, last = (np.quantile(each, 0.1) for each in (times[steps // 10 : steps // 3], times[-steps // 3 :]))
    row |= {"seconds_first": first, "seconds_last": last}
    return {**row, "wrong": wrong(row)}


def wrong(row: dict[str, Any]) -> str:
    """Return what is wrong with a method's figures, beyond two standard errors; empty if nothing is."""
    memory, residual = (row[f"{name}_per_step"] - 2 * row[f"{name}_error"] for name in ("memory", "residual"))
    found = {
        "ranks differ": not row["equal"],
        "memory grows": memory * row["steps"] > 1 << 20,
        "the residual grows": residual * row["steps"] * 2 / 3 > 0.1 * row["residual"] or np.isnan(row["residual"]),
        "steps become slower": row["seconds_last"] > 1.5 * row["seconds_first"],  # other processes share the machine
    }
    return ", ".join(what for what, true in found.items() if true)


def main(steps: int, folder: Path, command: str) -> int:
    """Soak all methods, each in a process of its own; write ``folder/soak.json``, and return 1 if something grows."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = pd.DataFrame(pool.starmap(soak, [(method, steps) for method in hvdcompress.available()], chunksize=1))
    results.save("soak", rows, folder, command=command)
    tables.show(rows.map(lambda value: f"{value:.3g}" if isinstance(value, float) else value))
    return int(rows["wrong"].any())
