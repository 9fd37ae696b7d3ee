"""Time the TensorFlow driver on ResNet-50's gradients: the first call (tracing, and a step) and the steps after it.

    horovodrun -np 2 --mpi python -m experiments.bench.tensorflow_steps [--steps N] [METHOD…]

The 161 gradients have ResNet-50's exact shapes, as TensorFlow lays them out; the loss is a sum of products, so that
what is timed is the exchange and little else. Each row is a ``tf.function`` of its own around the stock tape, after
one that is not counted. Figures are the slowest rank's; a step's is the median. Rank 0 prints a Markdown table.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import tensorflow as tf

from experiments import nets
from experiments.output.table import Column, Table
from hvdcompress.horovod.tensorflow import Compressor

# one core per rank: threads of several ranks would fight for the same ones
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)

ROWS: dict[str, dict[str, Any] | None] = {
    "uncompressed": None,  # stock Horovod, no compression object
    "none": {"method": "none"},
    "fp16": {"method": "fp16"},
    "topk": {"method": "topk", "density": 0.01},
    "gaussiank": {"method": "gaussiank", "density": 0.01},
    "scalecom": {"method": "scalecom", "density": 0.01},
    "powersgd": {"method": "powersgd"},
    "scalecom, warm-up": {"method": "scalecom", "density": 0.01, "warmup": {"steps": 2}},
    "gradiveq": {"method": "gradiveq", "dense_steps": 2, "compressed_steps": 6},
}


def measure(
    plan: dict[str, Any] | None, weights: list[tf.Variable], factors: list[tf.Variable], steps: int
) -> list[float]:
    """Seconds of each call of a training step that only exchanges; the slowest rank's."""
    options = {} if plan is None else {"compression": Compressor(plan)}

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(w * f) for w, f in zip(weights, factors, strict=True)])
        gradients = hvd.DistributedGradientTape(tape, **options).gradient(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.01 * gradient)
        return loss

    seconds = []
    for _ in range(1 + steps):
        hvd.allreduce(tf.zeros(1), name="ready")
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return [max(every) for every in zip(*hvd.allgather_object(seconds), strict=True)]


class Row(NamedTuple):
    """One row of the table: seconds of the first call and of a later one, and those of the uncompressed row."""

    name: str
    first: float
    later: float
    base_first: float
    base_later: float


COLUMNS: tuple[Column[Row], ...] = (
    Column("method", "method", lambda row: row.name, align="left"),
    Column("first", "first call", lambda row: f"{row.first:.2f} s", lambda row: row.first, "s"),
    Column("first_ratio", "of uncompressed", lambda row: f"{row.first / row.base_first:.2f}"),
    Column("step", "a step", lambda row: f"{1e3 * row.later:.0f} ms", lambda row: row.later, "s"),
    Column("step_ratio", "of uncompressed", lambda row: f"{row.later / row.base_later:.2f}"),
)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "rows", nargs="*", metavar="METHOD", help=f"rows of the table: {', '.join(ROWS)} (default: all)"
    )
    parser.add_argument("--steps", type=int, default=9, help="steps after the first (default: 9)")
    arguments = parser.parse_args()
    if unknown := set(arguments.rows) - set(ROWS):
        parser.error(f"unknown: {', '.join(unknown)}")
    hvd.init()
    shapes = nets.tensorflow_layout(nets.get("resnet50"))
    random = tf.random.Generator.from_seed(hvd.rank())
    weights = [tf.Variable(tf.zeros(shape)) for shape in shapes.values()]
    factors = [tf.Variable(random.normal(shape)) for shape in shapes.values()]
    measure(None, weights, factors, 1)  # the process's first graph, and Horovod's first collectives
    rows: list[Row] = []
    for name in ["uncompressed", *(name for name in arguments.rows or ROWS if name != "uncompressed")]:
        first, *rest = measure(ROWS[name], weights, factors, arguments.steps)
        later = statistics.median(rest)
        base = rows[0] if rows else Row(name, first, later, first, later)
        rows.append(Row(name, first, later, base.first, base.later))
        if hvd.rank() == 0:
            print(f"{name}: {first:.2f} s, then {1e3 * later:.0f} ms per step", file=sys.stderr, flush=True)
        gc.collect()
    if hvd.rank() == 0:
        print(f"{len(weights)} tensors, {nets.total(shapes):,} elements, {hvd.size()} ranks\n")
        print(Table(COLUMNS, rows).markdown(), end="")


if __name__ == "__main__":
    main()
