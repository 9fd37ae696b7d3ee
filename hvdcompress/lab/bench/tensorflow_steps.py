"""What the TensorFlow driver costs: the first call (tracing, and a step) and the steps after it, ResNet-50's gradients.

    horovodrun -np 2 --mpi python launch/bench_tensorflow.py [--steps N] [METHOD…]

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
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdcompress.tensorflow import Compressor

# a rank a core: threads of several ranks would fight for the same ones
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


def resnet50() -> list[tuple[int, ...]]:
    """The shapes of ResNet-50's trainable variables: convolutions height × width × in × out, norms, the last layer."""

    def conv(size: int, channels_in: int, channels_out: int) -> list[tuple[int, ...]]:
        return [(size, size, channels_in, channels_out), (channels_out,), (channels_out,)]

    shapes, channels = conv(7, 3, 64), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += conv(1, channels, width) + conv(3, width, width) + conv(1, width, 4 * width)
            shapes += conv(1, channels, 4 * width) if block == 0 else []
            channels = 4 * width
    return [*shapes, (2048, 1000), (1000,)]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "rows", nargs="*", metavar="METHOD", help=f"rows of the table: {', '.join(ROWS)} (default: all)"
    )
    parser.add_argument("--steps", type=int, default=9, help="steps after the first (default: 9)")
    arguments = parser.parse_args()
    if unknown := set(arguments.rows) - set(ROWS):
        parser.error(f"unknown: {', '.join(unknown)}")
    hvd.init()
    random = tf.random.Generator.from_seed(hvd.rank())
    weights = [tf.Variable(tf.zeros(shape)) for shape in resnet50()]
    factors = [tf.Variable(random.normal(shape)) for shape in resnet50()]
    assert len(weights) == 161
    measure(None, weights, factors, 1)  # the process's first graph, and Horovod's first collectives
    base: list[float] = []
    if hvd.rank() == 0:
        print(
            f"{len(weights)} tensors, {sum(w.shape.num_elements() for w in weights):,} elements, {hvd.size()} ranks\n"
        )
        print("| method | first call | of uncompressed | a step | of uncompressed |\n|---|---:|---:|---:|---:|")
    for row in ["uncompressed", *(name for name in arguments.rows or ROWS if name != "uncompressed")]:
        first, *rest = measure(ROWS[row], weights, factors, arguments.steps)
        figures = [first, statistics.median(rest)]
        base = base or figures
        cells = [
            f"{figures[0]:.2f} s",
            f"{first / base[0]:.2f}",
            f"{1e3 * figures[1]:.0f} ms",
            f"{figures[1] / base[1]:.2f}",
        ]
        if hvd.rank() == 0:
            print(f"| {row} | {' | '.join(cells)} |")
            sys.stdout.flush()
        gc.collect()


if __name__ == "__main__":
    main()
