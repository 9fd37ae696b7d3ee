"""Codecs in the numpy core against TensorFlow's own operations, run eagerly: which the TensorFlow driver should call.

    python launch/bench_tensorflow_ops.py

Prints a Markdown table of milliseconds, the best of many runs in one process. "core, copied" is the numpy core from an
eager tensor and back, as a segment of the driver has it: handed the tensor's memory, its result copied once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import hvdcompress
from hvdcompress.method import TensorSpec, Turn
from hvdcompress.ops import fast
from hvdcompress.ops import tensorflow as own
from hvdcompress.testing import numbers

SECONDS = 1.0  # for each cell


def best(run: Callable[[], Any]) -> float:
    """The least time of a run, in milliseconds."""
    run()
    times: list[float] = []
    ends = time.perf_counter() + SECONDS
    while time.perf_counter() < ends:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def encoder(id: str, n: int, ops: Any) -> Callable[[Any], Any]:
    """The codec work of one exchange on one rank: what is selected, and written."""
    method = hvdcompress.get(id)
    me = Turn(0, 2, 0, TensorSpec("w", (n,)))
    if id == "scalecom":
        return lambda x: ops.take(x, method.unpack(method.pick(x, n, ops), n, ops))  # type: ignore[attr-defined]
    if id == "fp16":
        return lambda x: ops.to_fp16(x, 0.5)[0]
    return lambda x: method.encode(x, {}, me, ops)


def row(n: int, id: str) -> str:
    """One line of the table."""
    array = numbers((n,), 1)
    tensor = tf.constant(array)
    core, native = encoder(id, n, fast), encoder(id, n, own)
    times = [
        best(lambda: core(array)),
        best(lambda: tf.constant(np.asarray(core(np.asarray(tensor))))),
        best(lambda: native(tensor)),
    ]
    cells = " | ".join(f"{t:.3g} ms" for t in times)
    return f"| {n:,} | {id} | {cells} | {times[2] / times[1]:.1f} |".replace(",", " ")


def main() -> None:
    """Measure and print."""
    print("| elements | codec | numpy core | core, copied | TensorFlow's own | own / copied |")
    print("|---:|---|---:|---:|---:|---:|")
    for n in (10_000, 1_000_000):
        for id in ("topk", "gaussiank", "scalecom", "qsgd", "fp16"):
            print(row(n, id), flush=True)


if __name__ == "__main__":
    main()
