"""Time the array ops that go through a whole gradient, each backend in copies of the gradient.

    python -m experiments.bench.ops [--device cuda] [--elements N]

The reference (NumPy) against the compiled ops (Numba), or on a GPU torch's against Triton's, in turns. What whole steps
take is for ``python -m experiments bench codec``.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from experiments.bench.devices import device
from experiments.report import tables
from experiments.report.numbers import number
from hvdcompress.method import Array, Sparse
from hvdcompress.ops import numpy as reference
from hvdcompress.ops.scan import Scan
from hvdcompress.ops.vectors import Half

BACKENDS = {"cpu": ("numpy", "numba"), "cuda": ("torch", "triton")}
BUCKET, WIDTH = 512, 4  # of QSGD


def cases(n: int, place: Callable[[Array], Any]) -> dict[str, Callable[[Any], Any]]:
    """Return calls of an op's backend by the op's name, on n normally distributed elements at density 0.01.

    Args:
        n: the elements.
        place: puts an array where the ops expect it.
    """
    random = np.random.default_rng(0)
    x, residual, out = (random.normal(size=n).astype(np.float32) for _ in range(3))
    k, key = max(n // 100, 1), np.array([7], np.uint32)
    index = reference.top_k(x, k)
    threshold, half = float(np.abs(x[index]).min()), x.astype(np.float16)
    norms = reference.bucket_norms(x, BUCKET, "max")
    levels = reference.quantize(x, norms, BUCKET, WIDTH, key)
    zeros = np.zeros_like(x)
    sparse = Sparse(place(index), place(x[index]))
    x, residual, out, zeros, half, norms, levels = map(place, (x, residual, out, zeros, half, norms, levels))
    above = Scan(above=0.9 * threshold, capacity=6 * k)
    return {
        "accumulate": lambda o: o.accumulate(x, residual, 1.0, out),
        "accumulate, moments": lambda o: o.accumulate(x, residual, 1.0, out, Scan(moments=True)),
        "accumulate, chunks of 100": lambda o: o.accumulate(x, residual, 1.0, out, Scan(chunk=100)),
        "accumulate, above a threshold": lambda o: o.accumulate(x, zeros, 1.0, out, above),
        "all_finite": lambda o: o.all_finite(x),
        "top_k": lambda o: o.top_k(x, k),
        "kth_magnitude": lambda o: o.kth_magnitude(x, k),
        "first_above": lambda o: o.first_above(x, threshold, 2 * k),
        "zero_where, sparse": lambda o: o.zero_where(out, sparse),
        "write, sparse": lambda o: o.write(out, sparse, 0.5),
        "write, float16": lambda o: o.write(out, Half(half, 2.0), 0.5),
        "to_fp16": lambda o: o.to_fp16(x, 0.5),
        "quantize, 4 bits": lambda o: o.quantize(x, norms, BUCKET, WIDTH, key),
        "dequantize, 4 bits": lambda o: o.dequantize(levels, norms, BUCKET, WIDTH, n),
        "pack_signs": lambda o: o.pack_signs(x),
    }


def measure(n: int, runs: int, where: str) -> pd.DataFrame:
    """Return a record per op: the median of its runs in both backends, in copies of the elements."""
    at = device(where)
    backends = {name: importlib.import_module(f"hvdcompress.ops.{name}") for name in BACKENDS[where]}
    x, to = at.empty(n), at.empty(n)
    records = []
    for op, call in cases(n, at.array).items():
        for run in range(runs + 1):
            copy = at.timed(to.__setitem__, slice(None), x)[1]
            for name, backend in backends.items():
                seconds = at.timed(call, backend)[1]
                if run:  # the first one compiles
                    records.append({"op": op, "backend": name, "copies": seconds / copy})
    found = pd.DataFrame(records).pivot_table("copies", "op", "backend", "median", sort=False).reset_index()
    slow, quick = backends
    return found[["op", slow, quick]].assign(ratio=found[slow] / found[quick])


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=16_000_000)
    parser.add_argument("--device", choices=list(BACKENDS), default="cpu")
    given = parser.parse_args()
    frame = measure(given.elements, 7, given.device)
    tables.show(frame, f"copies of {given.elements:,} elements", **dict.fromkeys(frame.columns[1:], number))


if __name__ == "__main__":
    main()
