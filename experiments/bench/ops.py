"""Time the array ops, the numpy reference against the compiled ones.

    python -m experiments.bench.ops [--size N]... [--write docs/ops-benchmark.md]
    python -m experiments.bench.ops --device cuda [--size N]...

Both backends run in one process, in turns, so that a busy machine slows both; figures are medians of processor time,
which does not count what other processes take. "GB/s" is the
traffic that an op cannot do without (each input read once, each output written once) over the time it took. What whole
steps of methods take is for ``python -m experiments bench codec``.

With ``--device cuda`` the ops of torch and of Triton are compared on a GPU, by CUDA's events: from the moment that
the device begins with the first call to its end of the last one, waits for the host included.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from experiments.bench.devices import machine
from experiments.output.console import console_of
from experiments.output.table import Column, Table, folded
from hvdcompress.method import Sparse
from hvdcompress.ops import numba as compiled
from hvdcompress.ops import numpy as reference
from hvdcompress.ops.scan import Halves, Product, Scan, Velocity
from hvdcompress.ops.vectors import Codes, Fields, Half, Outer, Spectra, Sum

SIZES = [65_536, 1_000_000, 16_000_000]
DENSITY = 0.01
BUCKET = 512  # of what is quantized
EARNED = 1.15  # a kernel that is this much faster at neither 1M nor 16M elements is dropped

#: Written, measured as the others are, and dropped; ratios at 1M and 16M elements, from the run that decided it.
DROPPED = {
    "subtract of a dense share with factor 1": "0.95, 0.96: so is its subtract",
}


@dataclass
class Case:
    """A op on prepared arguments, and the bytes that it cannot but move."""

    op: str
    what: str
    num_bytes: int
    call: Callable[[Any], Any]


def cases(n: int, place: Callable[[Any], Any] = lambda array: array) -> list[Case]:
    """Every compiled op, on n normally distributed elements at density 0.01.

    Args:
        n: the elements.
        place: puts an array where the ops expect it.
    """
    rng = np.random.default_rng(0)
    x, residual, out = (rng.normal(size=n).astype(np.float32) for _ in range(3))
    k, chunk, width = max(n // 100, 1), 100, 7
    index = reference.top_k(x, k)
    values = x[index]
    threshold, zeros, speed = np.abs(values).min(), np.zeros_like(x), np.zeros_like(x)
    near = reference.first_above(x, 0.9 * threshold, n)
    found = x[near]
    half, bits = x.astype(np.float16), reference.to_bf16(x)
    offset = reference.chunk_argmax(x, chunk)
    packed = reference.pack_bits(offset, width)
    bitmap = reference.set_bits(index % (3 * k), 3 * k)  # as dense as Elias-Fano's high parts
    other = Sparse(reference.top_k(residual, k), values)
    num_bits = k + (n >> 6) + 1
    coded = reference.elias_fano(index, 6, num_bits)
    shares = Sparse(np.concatenate([index, index]), np.concatenate([values, values]))
    places = np.unique(index % (3 * k))
    key, packed_signs, codes = np.array([7], np.uint32), reference.pack_signs(x), np.zeros(n // 2 + 1, np.uint8)
    norms, levels = reference.quantize_max(x, BUCKET, 4, key)
    one, stamps = np.ones(1, np.float32), rng.integers(0, 100, n).astype(np.int8)
    words = reference.quantize_fields(x, 2.5, one, 3, key)
    side = max(int(n**0.5), 1)
    matrix, image = x[: side * side], out[: side * side]
    p, q = residual[: 4 * side], residual[-4 * side :]
    waves = reference.largest_frequencies(x, 4096, k)
    bounds = reference.float_bounds(x)
    ranged = reference.range_codes(x, bounds, 10, 6).astype(np.int64)
    x, residual, out, zeros, speed, index, values, near, found = map(
        place, (x, residual, out, zeros, speed, index, values, near, found)
    )
    half, bits, offset, packed, bitmap, places = map(place, (half, bits, offset, packed, bitmap, places))
    stamps, stamped, table = place(stamps), place(stamps.copy()), x[:10]
    packed_signs, codes, norms, levels, one, words = map(place, (packed_signs, codes, norms, levels, one, words))
    matrix, image, p, q, bounds, ranged = map(place, (matrix, image, p, q, bounds, ranged))
    shares, other, waves = (Sparse(*map(place, each)) for each in (shares, other, waves))
    sizes = [n * (part + 1) // 16 - n * part // 16 for part in range(16)]
    spans = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    parts, gradients = ([vector[start:stop] for start, stop in spans] for vector in (out, x))
    few = [Scan(above=0.9 * threshold, capacity=6 * k)] * len(parts)
    candidates, coded = Sparse(near, found), tuple(map(place, coded))
    by_bucket, signs = Codes(levels, norms, BUCKET, 4, 0, n), Codes(packed_signs, one, n, 1, 0, n)
    fields, short = Fields(words, 3, 2, one, 0, n), Half(bits, 1.0)
    squares, low, sparse = (matrix, matrix, 1.0, image), Outer(p, q, 4), Spectra([waves, waves], n, 4096)
    return [
        Case("accumulate", "scale 1/1024", 12 * n, lambda o: o.accumulate(x, residual, 2.0**-10, out)),
        Case("accumulate", "scale 1", 12 * n, lambda o: o.accumulate(x, residual, 1.0, out)),
        Case(
            "accumulate",
            "momentum",
            20 * n,
            lambda o: o.accumulate(x, residual, 1.0, out, velocity=Velocity(zeros, speed, 0.9)),
        ),
        Case("accumulate", "moments", 12 * n, lambda o: o.accumulate(x, residual, 1.0, out, Scan(moments=True))),
        Case("accumulate", "chunks of 100", 12 * n, lambda o: o.accumulate(x, residual, 1.0, out, Scan(chunk=chunk))),
        Case(
            "accumulate",
            "above, about 2 k",
            12 * n,
            lambda o: o.accumulate(x, zeros, 1.0, out, Scan(above=0.9 * threshold, capacity=6 * k)),
        ),
        Case(
            "accumulate",
            "signs",
            12 * n + n // 8,
            lambda o: o.accumulate(x, residual, 1.0, out, Scan(signs=True)),
        ),
        Case("accumulate", "product, 4 rows", 12 * n, lambda o: o.accumulate(*squares, Scan(product=Product(p, 4)))),
        Case(
            "accumulate_parts",
            "above, 16 parts",
            12 * n,
            lambda o: o.accumulate_parts(gradients, zeros, [1.0] * len(parts), out, spans, few),
        ),
        Case("moments", "", 4 * n, lambda o: o.moments(x)),
        Case("all_finite", "", 4 * n, lambda o: o.all_finite(x)),
        Case("blend", "", 12 * n, lambda o: o.blend(out, residual, 0.9)),
        Case("subtract", "dense, factor 0.1", 12 * n, lambda o: o.subtract(out, residual, 0.1)),
        Case("subtract", "sparse", 16 * k, lambda o: o.subtract(out, Sparse(index, values), 1.0)),
        Case("scaled", "", 8 * n, lambda o: o.scaled(x, 0.3)),
        Case("write", "sparse, 2 shares", 4 * n + 32 * k, lambda o: o.write(out, shares, 0.5)),
        Case(
            "write_parts",
            "sparse, 2 shares, 16 parts",
            4 * n + 32 * k,
            lambda o: o.write_parts(parts, shares, 0.5),
        ),
        Case("zero_where", "sparse", 16 * k, lambda o: o.zero_where(out, Sparse(index, values))),
        Case("merge", "k and k", 28 * k, lambda o: o.merge(Sparse(index, values), other, n)),
        Case("largest_of", "about 2 k", 12 * k, lambda o: o.largest_of([candidates], [k], [0])),
        Case("write", "float16", 6 * n, lambda o: o.write(out, Half(half, 2.0), 0.5)),
        Case("write", "2 of bfloat16", 8 * n, lambda o: o.write(out, Sum([short, short]), 0.5)),
        Case("write", "2 of signs", 17 * n // 4, lambda o: o.write(out, Sum([signs, signs]), 0.5)),
        Case("write", "2 of 4 bits", 5 * n, lambda o: o.write(out, Sum([by_bucket, by_bucket]), 0.5)),
        Case("write", "fields of 3 bits", 4 * n + 4 * len(words), lambda o: o.write(out, fields, 0.5)),
        Case("subtract", "signs", 65 * n // 8, lambda o: o.subtract(out, signs, 1.0)),
        Case("subtract", "4 bits", 17 * n // 2, lambda o: o.subtract(out, by_bucket, 1.0)),
        Case("dequantize", "4 bits", 9 * n // 2, lambda o: o.dequantize(levels, norms, BUCKET, 4, n)),
        Case("quantize", "4 bits", 9 * n // 2, lambda o: o.quantize(x, norms, BUCKET, 4, key, codes[: len(levels)])),
        Case("quantize_max", "4 bits", 9 * n // 2, lambda o: o.quantize_max(x, BUCKET, 4, key, codes[: len(levels)])),
        Case("quantize_fields", "3 bits", 4 * n + 4 * len(words), lambda o: o.quantize_fields(x, 2.5, one, 3, key)),
        Case("unpack_fields", "3 bits", 4 * n + 4 * len(words), lambda o: o.unpack_fields(words, 3, n, 2)),
        Case("pack_signs", "", 33 * n // 8, lambda o: o.pack_signs(x)),
        Case("unpack_signs", "", 33 * n // 8, lambda o: o.unpack_signs(packed_signs, one, n)),
        Case("distinct_indices", "", 4 * k, lambda o: o.distinct_indices(key, k, n)),
        Case("take", "", 12 * k, lambda o: o.take(x, index)),
        Case("stamp", "at k", 2 * n + 8 * k, lambda o: o.stamp(table, stamps, 100, index, stamped)),
        Case("write", "rank 4", 4 * n, lambda o: o.write(image, low, 0.5)),
        Case("subtract", "rank 4", 8 * n, lambda o: o.subtract(image, low, 1.0)),
        Case("write", "frequencies, 2 shares", 4 * n + 24 * k, lambda o: o.write(out, sparse, 0.5)),
        Case("matmul", "4 rows", 4 * n, lambda o: o.matmul(p, matrix, 4, side)),
        Case("matmul_transposed", "4 rows", 4 * n, lambda o: o.matmul_transposed(p, matrix, 4, side)),
        Case("orthonormalise", "4 rows of √n", 32 * side, lambda o: o.orthonormalise(p, 4)),
        Case("magnitudes", "", 6 * n, lambda o: o.magnitudes(x[: n // 2 * 2])),
        Case("largest_frequencies", "blocks of 4096", 4 * n + 12 * k, lambda o: o.largest_frequencies(x, 4096, k)),
        Case("range_codes", "10 bits", 8 * n, lambda o: o.range_codes(x, bounds, 10, 6)),
        Case("range_mantissa", "10 bits", 4 * 1024, lambda o: o.range_mantissa(x[:1024], bounds, 10)),
        Case("range_values", "10 bits", 12 * n, lambda o: o.range_values(ranged, bounds, 10, 6)),
        Case("top_k", "", 4 * n + 4 * k, lambda o: o.top_k(x, k)),
        Case("top_k_parts", "16 parts", 4 * n + 4 * k, lambda o: o.top_k_parts(x, [k // 16 + 1] * len(parts), sizes)),
        Case("chunk_argmax", "chunks of 100", 4 * n + 4 * k, lambda o: o.chunk_argmax(x, chunk)),
        Case("max_abs", "", 4 * n, lambda o: o.max_abs(x)),
        Case("kth_magnitude", "", 4 * n, lambda o: o.kth_magnitude(x, k)),
        Case("count_above", "", 4 * n, lambda o: o.count_above(x, threshold)),
        Case("first_above", "", 4 * n + 4 * k, lambda o: o.first_above(x, threshold, 2 * k)),
        Case("first_equal", "", 4 * n, lambda o: o.first_equal(x, threshold, k)),
        Case("chunk_positions", "", 8 * k, lambda o: o.chunk_positions(offset, chunk, (n,))),
        Case("inspect", "float16", 6 * n, lambda o: o.inspect(x, Scan(halves=Halves(0.5, 65504.0, half)))),
        Case("to_fp16", "", 6 * n, lambda o: o.to_fp16(x, 0.5)),
        Case("add_all", "float16", 6 * n, lambda o: o.add_all([half, half])),
        Case("from_fp16", "", 6 * n, lambda o: o.from_fp16(half, 0.5)),
        Case("to_bf16", "", 6 * n, lambda o: o.to_bf16(x)),
        Case("from_bf16", "", 6 * n, lambda o: o.from_bf16(bits)),
        Case("pack_bits", "7 bits", 5 * k, lambda o: o.pack_bits(offset, width)),
        Case("unpack_bits", "7 bits", 9 * k, lambda o: o.unpack_bits(packed, width, k)),
        Case("set_bits", "a third set", 5 * k, lambda o: o.set_bits(places, 3 * k)),
        Case("find_bits", "a third set", 9 * k, lambda o: o.find_bits(bitmap, 3 * k)),
        Case("elias_fano", "6 low bits", 5 * k, lambda o: o.elias_fano(index, 6, num_bits)),
        Case("from_elias_fano", "6 low bits", 9 * k, lambda o: o.from_elias_fano(*coded, 6, num_bits)),
    ]


def cases_on_device(n: int, place: Callable[[Any], Any]) -> list[Case]:
    """The cases of :func:`cases`, and those of ops that only Triton compiles."""
    x = np.random.default_rng(2).normal(size=n).astype(np.float32)
    key, bucket, width = np.array([5], np.uint32), 512, 4
    norms = reference.bucket_norms(x, bucket, "max")
    packed, signs = reference.quantize(x, norms, bucket, width, key), reference.pack_signs(x)
    k = max(n // 100, 1)
    chosen = Sparse(*map(place, (reference.top_k(x, k), np.ones(k, np.float32))))
    finite, scale, x, norms = map(place, (np.ones(1, np.int32), norms[:1], x, norms))
    packed, signs = map(place, (packed, signs))
    return [
        *cases(n, place),
        Case("quantize", "4 bits", 4 * n + n // 2, lambda o: o.quantize(x, norms, bucket, width, key)),
        Case("dequantize", "4 bits", 4 * n + n // 2, lambda o: o.dequantize(packed, norms, bucket, width, n)),
        Case("pack_signs", "", 4 * n + n // 8, lambda o: o.pack_signs(x)),
        Case("unpack_signs", "", 4 * n + n // 8, lambda o: o.unpack_signs(signs, scale, n)),
        Case("uniform", "", 4 * n, lambda o: o.uniform(key, n, x)),
        Case("keep_if", "finite", 4, lambda o: o.keep_if(finite, x, x)),
        Case("zero_where", "sparse", 12 * k, lambda o: o.zero_where(x, chosen)),
    ]


def medians(calls: Sequence[Callable[..., Any]], runs: int, repeat: int) -> list[float]:
    """Seconds of each call; the calls take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(runs + 1):
        for call, seconds in zip(calls, times, strict=True):
            began = time.thread_time()
            for _ in range(repeat):
                call()
            seconds.append((time.thread_time() - began) / repeat)
    return [statistics.median(seconds[1:]) for seconds in times]  # the first ones compile and warm up


def time_ops(n: int, runs: int) -> list[list[str]]:
    """Rows: op, elements, milliseconds of both, GB/s of both, ratio."""
    rows = []
    for case in track(cases(n), f"ops, {n:,} elements", transient=True, console=console_of()):
        calls = [lambda case=case, ops=ops: case.call(ops) for ops in (reference, compiled)]
        rows.append(row_of(case, n, *medians(calls, runs, max(1, 1_000_000 // n))))
    return rows


def time_on_device(n: int, runs: int) -> list[list[str]]:
    """Rows: op, elements, milliseconds of torch's and of Triton's ops on a GPU, GB/s of both, ratio.

    Raises:
        SystemExit: there is no GPU, or no Triton.
    """
    try:
        import torch

        from hvdcompress.ops import torch as general
        from hvdcompress.ops import triton as fused
    except ImportError as error:
        raise SystemExit(f"--device cuda needs PyTorch and Triton: {error}") from error
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda needs a GPU that PyTorch can use; it finds none")

    def on_device(array: Any) -> Any:
        return general.asarray(array.view(np.int16) if array.dtype == np.uint16 else array, like=somewhere)

    somewhere, repeat, rows = torch.zeros(1, device="cuda"), max(1, 10_000_000 // n), []
    for case in track(cases_on_device(n, on_device), f"ops, {n:,} elements", transient=True, console=console_of()):
        times: list[list[float]] = [[], []]
        for _ in range(runs + 1):
            for ops, seconds in zip((general, fused), times, strict=True):
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                for _ in range(repeat):
                    case.call(ops)
                ended.record()
                ended.synchronize()
                seconds.append(began.elapsed_time(ended) / 1e3 / repeat)
        rows.append(row_of(case, n, *(statistics.median(seconds[1:]) for seconds in times)))
    return rows


def row_of(case: Case, n: int, slow: float, fast: float) -> list[str]:
    """Op, elements, milliseconds of both backends, GB/s of both, ratio."""
    name = f"{case.op} ({case.what})" if case.what else case.op
    rate = [f"{case.num_bytes / seconds / 1e9:.2f}" for seconds in (slow, fast)]
    return [name, f"{n:,}", f"{slow * 1e3:.3f}", f"{fast * 1e3:.3f}", *rate, f"{slow / fast:.2f}"]


OP_HEAD = ["op", "elements", "numpy ms", "numba ms", "numpy GB/s", "numba GB/s", "ratio"]
DEVICE_HEAD = ["op", "elements", "torch ms", "triton ms", "torch GB/s", "triton GB/s", "ratio"]


def table_of(head: list[str], rows: list[list[str]]) -> Table[list[str]]:
    """A table of cells; the first column is text, the others are figures."""

    def column(at: int) -> Column[list[str]]:
        return Column(head[at], head[at], lambda row: row[at], align="right" if at else "left")

    return Table([column(at) for at in range(len(head))], rows)


def page(ops: list[list[str]], sizes: list[int]) -> str:
    """The Markdown page; says of itself that it is generated."""
    options = "" if sizes == SIZES else "".join(f"--size {n} " for n in sizes)
    weak = [f"{row[0]} at {row[1]}: {row[-1]}" for row in ops[-len(ops) // len(sizes) :] if float(row[-1]) < EARNED]
    dropped = "\n".join(f"- {op} ({why})" for op, why in DROPPED.items())
    return f"""# What the compiled ops are worth

Generated by `python -m experiments.bench.ops {options}--write docs/ops-benchmark.md`; do not edit.
Machine: {machine()}; one thread.

Both backends run in one process, in turns; figures are medians of processor time. *GB/s* is the traffic that an op
cannot do without (each input read once, each output written once) over the time it took; *ratio* is numpy's time over
numba's. Density {DENSITY}. A kernel that reaches a ratio of {EARNED} at neither 1M nor 16M elements is dropped, and the
numpy op serves. Dropped so far, with their ratios at 1M and 16M elements:

{dropped}

Below {EARNED} at {sizes[-1]:,} elements in this run: {", ".join(weak) or "none"}.

{folded(table_of(OP_HEAD, ops).markdown())}"""


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, action="append", help="elements; may be repeated (default: 64k, 1M, 16M)")
    parser.add_argument("--runs", type=int, default=7, help="runs of which the median is taken (default: 7)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the ops run (default: cpu)")
    parser.add_argument("--write", type=Path, help="also write the table to this Markdown file")
    arguments = parser.parse_args()
    sizes, console = arguments.size or SIZES, console_of()
    if arguments.device == "cuda":
        if arguments.write:
            parser.error("--write is for the page of the processor's ops")
        rows = [row for n in sizes for row in time_on_device(n, arguments.runs)]
        table_of(DEVICE_HEAD, rows).show(console)
        return
    ops = [row for n in sizes for row in time_ops(n, arguments.runs)]
    table_of(OP_HEAD, ops).show(console)
    if arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(page(ops, sizes), encoding="utf-8")
        console.print(f"written: {arguments.write}")


if __name__ == "__main__":
    main()
