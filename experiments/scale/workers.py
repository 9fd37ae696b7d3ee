"""Many workers in one process: the bytes of up to 256 of them, and a training on digits with 64.

    python -m experiments.scale.workers bytes [--workers 2,4,16,64,256] [--out FILE]
    python -m experiments.scale.workers train [--workers 4,64] [--seeds 3] [--rates 0.1,0.4] [--out FILE]

*bytes*: every worker exchanges a gradient of its own. The table has the ledger's bytes of the rank that sends most,
which must be those that ``python -m experiments scale`` predicts.

*train*: a two-layer net on scikit-learn's digits. Each worker draws its own batches of 8, so that 64 workers make
batches of 512; with 4 workers (batches of 32) for comparison. The learning rate warms up over 30 steps and then falls
linearly to 0; momentum 0.9.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.output.table import Column, Table
from experiments.report import numbers
from experiments.scale import cost
from experiments.training.numpy_digits import Weights, load, loss_and_gradient
from hvdcompress.loopback import Loopback
from hvdcompress.plan import plan_of

SHAPE = (64, 256)  # of the gradient whose bytes are counted
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "scalecom": {"density": 0.01},
    "randomk": {"density": 0.01},
    "powersgd": {"matrix_rank": 1},
    "gtopk": {"density": 0.01},
    "topk": {"density": 0.01},
    "gaussiank": {"density": 0.01},
    "qsgd": {},
    "qsgd scatter": {"method": "qsgd", "route": "scatter"},
    "signsgd": {},
}
BATCH, HIDDEN, STEPS, WARM_UP = 8, 64, 300, 30
TRAINED: dict[str, dict[str, Any]] = {
    "none": {},
    "scalecom β 0.1": {"method": "scalecom", "density": 0.02, "select": "chunk", "beta": 0.1},
    "scalecom β 1": {"method": "scalecom", "density": 0.02, "select": "chunk", "beta": 1.0},
    "topk": {"density": 0.02},
    "gaussiank": {"density": 0.02},
    "gtopk": {"density": 0.02},
}


# -- bytes -----------------------------------------------------------------------------------------


def counted(settings: dict[str, Any], world_size: int) -> tuple[int, int]:
    """Bytes that the busiest of ``world_size`` simulated workers hands to its collectives, and that it transmits."""
    net = Loopback(plan_of(settings), world_size, min_elements=1)
    rng = np.random.default_rng(world_size)
    net.allreduce([rng.normal(size=SHAPE).astype(np.float32) for _ in range(world_size)], name="w")
    return max(map(net.ledger.bytes_sent, range(world_size))), max(map(net.ledger.bytes_on_wire, range(world_size)))


def bytes_table(workers: Sequence[int]) -> Table[Any]:
    """Bytes on the wire by the number of workers.

    Raises:
        SystemExit: the model predicts another figure.
    """
    rows = []
    for label, settings in METHODS.items():
        settings = {"method": label, **settings}
        found = {}
        for p in workers:
            found[p] = counted(settings, p)
            said = cost.work(plan_of(settings, min_elements=1), {"w": SHAPE}, p, driver=None)
            if found[p] != (round(said.sent), round(said.on_wire)):
                sys.exit(f"{label}, {p} workers: counted {found[p]}, the model says {said.sent, said.on_wire}")
        rows.append((label, found))

    def span(row: Any) -> str:
        sent = [sent for sent, _ in row[1].values()]
        ends = [min(sent), max(sent)] if len(set(sent)) > 1 else [sent[0]]
        return " – ".join(map(numbers.num_bytes, ends))

    def wire(p: int) -> Column[Any]:
        def text(row: Any) -> str:
            return numbers.num_bytes(row[1][p][1])

        return Column(f"workers_{p}", f"{p} workers", text, lambda row: row[1][p][1], "B")

    names: Column[Any] = Column("method", "method", lambda row: row[0], align="left")
    return Table([names, Column("sent", "sent", span), *map(wire, workers)], rows)


# -- training --------------------------------------------------------------------------------------


def initial(seed: int) -> Weights:
    """A net's weights."""
    rng = np.random.default_rng(seed)
    return {
        "fc1.weight": (rng.normal(size=(64, HIDDEN)) / 8).astype(np.float32),
        "fc1.bias": np.zeros(HIDDEN, np.float32),
        "fc2.weight": (rng.normal(size=(HIDDEN, 10)) / 8).astype(np.float32),
        "fc2.bias": np.zeros(10, np.float32),
    }


def train(settings: dict[str, Any], world_size: int, rate: float, seed: int, steps: int = STEPS) -> dict[str, float]:
    """Training loss and held-out accuracy (percent) of the last weights; bytes per step on the busiest rank's wire."""
    x, y, held_x, held_y = load()
    net, w = Loopback(plan_of(settings), world_size, min_elements=100), initial(seed)
    rng = np.random.default_rng(1000 + seed)
    speed = {name: np.zeros_like(value) for name, value in w.items()}
    for step in range(steps):
        batches = rng.integers(0, len(x), size=(world_size, BATCH))
        mean = net.allreduce_many([loss_and_gradient(w, x[rows], y[rows])[1] for rows in batches])[0]
        now = rate * min(1.0, (step + 1) / WARM_UP) * (1 - step / steps)
        for name in w:
            speed[name] = np.float32(0.9) * speed[name] + mean[name]
            w[name] = w[name] - np.float32(now) * speed[name]
    hidden = np.maximum(held_x @ w["fc1.weight"] + w["fc1.bias"], 0)
    right = (hidden @ w["fc2.weight"] + w["fc2.bias"]).argmax(axis=1) == held_y
    wire = max(map(net.ledger.bytes_on_wire, range(world_size))) / steps
    return {"loss": loss_and_gradient(w, x, y)[0], "accuracy": 100 * float(right.mean()), "wire": wire}


def training_table(workers: Sequence[int], rates: Sequence[float], seeds: int, steps: int = STEPS) -> Table[Any]:
    """Loss, accuracy and bytes of each method; mean ± deviation over seeds."""
    rows = []
    for label, settings in TRAINED.items():
        settings = {"method": label, **settings}
        runs = {}
        for p in workers:
            for rate in rates:
                runs[p, rate] = [train(settings, p, rate, seed, steps) for seed in range(seeds)]
        rows.append((label, runs))
        print(f"{label}: done", file=sys.stderr, flush=True)

    def mean(row: Any, p: int, rate: float, what: str) -> float:
        return statistics.fmean(run[what] for run in row[1][p, rate])

    def figure(p: int, rate: float, what: str) -> Column[Any]:
        def text(row: Any) -> str:
            found = [run[what] for run in row[1][p, rate]]
            spread = f" ± {numbers.number(statistics.stdev(found), 2)}" if seeds > 1 else ""
            return f"{statistics.fmean(found):.{4 if what == 'loss' else 1}f}{spread}"

        return Column(
            f"{what}_{p}_{rate:g}",
            f"{p} workers, learning rate {rate:g}: {what}",
            text,
            lambda row: mean(row, p, rate, what),
            "%" if what == "accuracy" else "",
        )

    def wire(p: int) -> Column[Any]:
        def value(row: Any) -> float:
            return row[1][p, rates[-1]][0]["wire"]

        return Column(f"wire_{p}", f"on the wire, {p} workers", lambda row: numbers.num_bytes(value(row)), value, "B")

    names: Column[Any] = Column("method", "method", lambda row: row[0], align="left")
    figures = [figure(p, rate, what) for p in workers for rate in rates for what in ("loss", "accuracy")]
    return Table([names, *figures, *map(wire, workers)], rows)


def main() -> None:
    """Parse the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bytes", "train"))
    parser.add_argument("--workers")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", default="0.1,0.4")
    parser.add_argument("--out", type=Path, help="also write the table there, with the command that made it")
    given = parser.parse_args()
    workers = [int(p) for p in (given.workers or {"bytes": "2,4,16,64,256", "train": "4,64"}[given.what]).split(",")]
    if given.what == "bytes":
        table = bytes_table(workers)
    else:
        table = training_table(workers, [float(rate) for rate in given.rates.split(",")], given.seeds)
    print(table.markdown(), end="")
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        command = shlex.join(["python", "-m", "experiments.scale.workers", *sys.argv[1:]])
        given.out.write_text(f"```\n{command}\n```\n\n{table.markdown()}", encoding="utf-8")


if __name__ == "__main__":
    main()
