"""Many workers in one process: the bytes of up to 256 of them, and a training on digits with 64.

    python -m hvdcompress.lab.scale.workers bytes [--workers 2,4,16,64,256] [--out FILE]
    python -m hvdcompress.lab.scale.workers train [--workers 4,64] [--seeds 3] [--rates 0.1,0.4] [--out FILE]

*bytes*: every worker is there and exchanges a gradient of its own; the ledger's bytes of the rank that sends most,
beside what ``hvdcompress scale`` says of as many workers.

*train*: a two-layer net on scikit-learn's digits. Each worker draws its own batches of 8, so that 64 workers make
batches of 512; with 4 workers (batches of 32) for comparison. The learning rate warms up over 30 steps and then falls
linearly to 0; momentum 0.9.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hvdcompress.lab.output import numbers
from hvdcompress.lab.scale import cost
from hvdcompress.lab.training.numpy_digits import Weights, load, loss_and_gradient
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
    "scalecom β 0.1": {"method": "scalecom", "density": 0.02, "beta": 0.1},
    "scalecom β 1": {"method": "scalecom", "density": 0.02, "beta": 1.0},
    "topk": {"density": 0.02},
    "gaussiank": {"density": 0.02},
    "gtopk": {"density": 0.02},
}


# -- bytes -----------------------------------------------------------------------------------------


def counted(settings: dict[str, Any], world: int) -> tuple[int, int]:
    """Bytes that the busiest of ``world`` real workers hands to its collectives, and that it transmits."""
    net = Loopback(plan_of(settings), world, min_elements=1)
    rng = np.random.default_rng(world)
    net.allreduce([rng.normal(size=SHAPE).astype(np.float32) for _ in range(world)], name="w")
    return max(map(net.ledger.bytes_sent, range(world))), max(map(net.ledger.bytes_on_wire, range(world)))


def bytes_table(workers: list[int]) -> list[str]:
    """Bytes on the wire by the number of workers, as Markdown; a figure that the model has otherwise is an error."""
    lines = ["| method | sent | " + " | ".join(f"{p} workers" for p in workers) + " |"]
    lines.append("|---|---:|" + "---:|" * len(workers))
    for label, settings in METHODS.items():
        settings = {"method": label, **settings}
        cells, sent = [], []
        for p in workers:
            real = counted(settings, p)
            said = cost.work(plan_of(settings, min_elements=1), {"w": SHAPE}, p, driver=False)
            if real != (round(said.sent), round(said.on_wire)):
                sys.exit(f"{label}, {p} workers: counted {real}, the model says {said.sent, said.on_wire}")
            sent.append(real[0])
            cells.append(numbers.num_bytes(real[1]))
        span = numbers.num_bytes(min(sent)) + (f" – {numbers.num_bytes(max(sent))}" if len(set(sent)) > 1 else "")
        lines.append(f"| {label} | {span} | " + " | ".join(cells) + " |")
    return lines


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


def train(settings: dict[str, Any], world: int, rate: float, seed: int, steps: int = STEPS) -> dict[str, float]:
    """Training loss and held-out accuracy (percent) of the last weights; bytes a step on the busiest rank's wire."""
    x, y, held_x, held_y = load()
    net, w = Loopback(plan_of(settings), world, min_elements=100), initial(seed)
    rng = np.random.default_rng(1000 + seed)
    speed = {name: np.zeros_like(value) for name, value in w.items()}
    for step in range(steps):
        batches = rng.integers(0, len(x), size=(world, BATCH))
        mean = net.allreduce_many([loss_and_gradient(w, x[rows], y[rows])[1] for rows in batches])[0]
        now = rate * min(1.0, (step + 1) / WARM_UP) * (1 - step / steps)
        for name in w:
            speed[name] = np.float32(0.9) * speed[name] + mean[name]
            w[name] = w[name] - np.float32(now) * speed[name]
    hidden = np.maximum(held_x @ w["fc1.weight"] + w["fc1.bias"], 0)
    right = (hidden @ w["fc2.weight"] + w["fc2.bias"]).argmax(axis=1) == held_y
    wire = max(map(net.ledger.bytes_on_wire, range(world))) / steps
    return {"loss": loss_and_gradient(w, x, y)[0], "accuracy": 100 * float(right.mean()), "wire": wire}


def training_table(workers: list[int], rates: list[float], seeds: int, steps: int = STEPS) -> list[str]:
    """A line a method, as Markdown; mean ± deviation over seeds."""
    heads = [f"{p} workers, rate {rate:g}: {what}" for p in workers for rate in rates for what in ("loss", "accuracy")]
    lines = ["| method | " + " | ".join([*heads, *(f"on the wire, {p} workers" for p in workers)]) + " |"]
    lines.append("|---|" + "---:|" * (len(heads) + len(workers)))
    for label, settings in TRAINED.items():
        settings = {"method": label, **settings}
        cells, wire = [], []
        for p in workers:
            for rate in rates:
                runs = [train(settings, p, rate, seed, steps) for seed in range(seeds)]
                for what in ("loss", "accuracy"):
                    found = [run[what] for run in runs]
                    spread = f" ± {numbers.number(statistics.stdev(found), 2)}" if seeds > 1 else ""
                    cells.append(f"{statistics.fmean(found):.{4 if what == 'loss' else 1}f}{spread}")
            wire.append(numbers.num_bytes(runs[0]["wire"]))
        lines.append(f"| {label} | " + " | ".join([*cells, *wire]) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


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
    print("\n".join(table))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        command = shlex.join(["python", "-m", "hvdcompress.lab.scale.workers", *sys.argv[1:]])
        given.out.write_text("\n".join(["```", command, "```", "", *table, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
