"""Number formats on saved gradients: the error of range floats, uniform codes and other floats at equal bits.

    python -m experiments.training.save_gradients runs/digits0.safetensors --seed 0
    python -m experiments.bench.formats runs/digits0.safetensors runs/digits1.safetensors

An error is ‖decoded − x‖/‖x‖ over all tensors of rank 0 in a step, each coded by itself; the tables have medians over
steps and files. x is a gradient, or the frequencies that ``fft`` keeps of it. A uniform code has 2^N − 1 levels from
−max|x| to max|x|, rounded to nearest; fp8 is scaled so that max|x| is its largest number.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from experiments.output import gradients
from experiments.output.table import Column, Table
from hvdcompress.loopback import Loopback
from hvdcompress.method import TensorSpec, Workspace
from hvdcompress.methods.fft import FFT
from hvdcompress.ops import fast
from hvdcompress.parts.codecs import codec
from hvdcompress.parts.select import num_kept

Vector = np.ndarray[Any, Any]
BITS = (6, 7, 8, 9, 10)  #: of the range floats, uniform codes and other floats
EXPONENTS = (3, 4, 5)  #: bits of the other floats' exponents


def uniform(x: Vector, bits: int) -> Vector:
    """Return x [n] float32 as rounded to 2^bits − 1 levels."""
    step = np.abs(x).max() / (2 ** (bits - 1) - 1)
    return np.rint(x / step).astype(np.float32) * step


def coded(x: Vector, name: str) -> Vector:
    """Return x [n] float32 as a codec of values writes and reads it."""
    made = codec(name)
    return np.asarray(made.decode(made.encode(x, None, Workspace(fast)), len(x), fast))  # type: ignore[arg-type]


def fp8(x: Vector, dtype: torch.dtype) -> Vector:
    """Return x [n] float32 as scaled to the range of an 8-bit float and rounded to it."""
    scale = torch.finfo(dtype).max / float(np.abs(x).max())
    return (torch.from_numpy(x * np.float32(scale)).to(dtype).to(torch.float32) / scale).numpy()


def small_float(x: Vector, exponent: int, mantissa: int) -> Vector:
    """Return x [n] float32 as scaled to the range of a float with so many bits of each, and rounded to nearest even."""
    largest = np.float32(2.0 - 2.0**-mantissa)  # with the exponent 0; the least normal number's is 2 − 2^exponent
    scale = largest / np.abs(x).max()
    _, above = np.frexp(x * scale)  # |x| < 2^above
    ulp = np.ldexp(np.float32(1.0), np.maximum(above - 1, 2 - 2**exponent) - mantissa)
    return np.asarray(np.rint(x * scale / ulp) * ulp / scale)


def formats() -> list[tuple[int, str, Callable[[Vector], Vector]]]:
    """Return bits, name, and what writes and reads, of each format."""
    made: list[tuple[int, str, Callable[[Vector], Vector]]] = []
    for n in BITS:
        names = [f"rangefloat{n}", *(f"rangefloat{n}m{m}" for m in range(max(1, n - 6), n - 3))]
        made += [(n, "uniform", partial(uniform, bits=n)), *((n, name, partial(coded, name=name)) for name in names)]
        made += [(n, f"e{e}m{n - 1 - e}", partial(small_float, exponent=e, mantissa=n - 1 - e)) for e in EXPONENTS]
        if n == 8:
            made += [(8, "fp8 e4m3", partial(fp8, dtype=torch.float8_e4m3fn))]
            made += [(8, "fp8 e5m2", partial(fp8, dtype=torch.float8_e5m2))]
    return [*made, (16, "bf16", partial(coded, name="bf16"))]


def kept_frequencies(x: Vector, method: FFT) -> Vector:
    """Return real and imaginary parts of the frequencies of x [n] that the method sends, alternating [2·k]."""
    return fast.largest_frequencies(x, method.block_length(len(x)), method.num_kept(TensorSpec("x", (len(x),))))[1]


def error(xs: Iterable[Vector], change: Callable[[Vector], Vector]) -> float:
    """Return the error of vectors that are changed each by itself, relative to all of them together."""
    pairs = [(np.square(change(x) - x, dtype=np.float64).sum(), np.square(x, dtype=np.float64).sum()) for x in xs]
    lost, there = np.sum(pairs, axis=0)
    return float(np.sqrt(lost / there))


class Statistics(NamedTuple):
    """What decides whether elements or frequencies are better left out."""

    correlation: float
    """Of neighbours in memory: lag-1 autocorrelation."""
    kurtosis: float
    """Of the elements: 3 for a normal distribution, more with heavy tails."""


def statistics_of(x: Vector) -> Statistics:
    """Return those of x [n]."""
    centred = x - x.mean(dtype=np.float64)
    variance = np.square(centred).mean()
    return Statistics(float((centred[1:] * centred[:-1]).mean() / variance), float((centred**4).mean() / variance**2))


@dataclass(frozen=True)
class Tensor:
    """One tensor's statistics, and its errors; medians."""

    name: str
    size: int
    correlation: float
    kurtosis: float
    topk: float
    """‖x − kept‖/‖x‖ with the largest elements kept."""
    fft: float
    """The same with the largest frequencies kept, of which there are half as many, each two numbers."""

    @classmethod
    def of(cls, name: str, xs: Sequence[Vector], density: float) -> Tensor:
        """Take the medians over vectors [n] of one tensor."""
        net, figures = Loopback("fft", world_size=1, density=density, values="fp32", min_elements=1), []
        for x in xs:
            square = np.square(x, dtype=np.float64)
            left_out = np.sort(square)[: len(x) - num_kept(density, len(x))].sum() / square.sum()
            fft = error([x], lambda x: net.allreduce([x], name)[0])
            figures.append((*statistics_of(x), left_out**0.5, fft))
        return cls(name, len(xs[0]), *np.median(figures, axis=0).tolist())


TENSORS: tuple[Column[Tensor], ...] = (
    Column("name", "tensor", lambda row: row.name, align="left"),
    Column("size", "elements", lambda row: f"{row.size:,}", lambda row: row.size),
    Column("correlation", "lag-1 autocorrelation", lambda row: f"{row.correlation:.2f}", lambda row: row.correlation),
    Column("kurtosis", "kurtosis", lambda row: f"{row.kurtosis:.1f}", lambda row: row.kurtosis),
    Column("topk", "error, elements kept", lambda row: f"{row.topk:.2f}", lambda row: row.topk),
    Column("fft", "error, frequencies kept", lambda row: f"{row.fft:.2f}", lambda row: row.fft),
)


@dataclass(frozen=True)
class Format:
    """One number format and its errors."""

    bits: int
    name: str
    raw: float
    kept: float


FORMATS: tuple[Column[Format], ...] = (
    Column("bits", "bits", lambda row: str(row.bits), lambda row: row.bits),
    Column("format", "format", lambda row: row.name, align="left"),
    Column("raw", "error on gradients", lambda row: f"{row.raw:.4f}", lambda row: row.raw),
    Column("kept", "error on kept frequencies", lambda row: f"{row.kept:.4f}", lambda row: row.kept),
)


def measure(files: Sequence[Path], density: float) -> tuple[list[Tensor], list[Format]]:
    """Return the rows of both tables, from the gradients that files hold; tensors below 1024 elements are left out."""
    steps = [ranks[0] for file in files for ranks in gradients.load(file)]
    raw = [[x.ravel() for x in step.values() if x.size >= 1024] for step in steps]
    names = [name for name, x in steps[0].items() if x.size >= 1024]
    method = FFT(density=density)
    kept = [[kept_frequencies(x, method) for x in step] for step in raw]
    tensors = [Tensor.of(name, [step[i] for step in raw], density) for i, name in enumerate(names)]
    medians = [
        Format(bits, name, *(float(np.median([error(step, change) for step in xs])) for xs in (raw, kept)))
        for bits, name, change in formats()
    ]
    return tensors, medians


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.formats", description="Number formats.")
    parser.add_argument("files", type=Path, nargs="+", help="gradients, as save_gradients writes them")
    parser.add_argument("--density", type=float, default=0.15, help="share of what is kept (default: %(default)s)")
    given = parser.parse_args(arguments)
    tensors, medians = measure(given.files, given.density)
    print(Table(TENSORS, tensors).markdown())
    print(Table(FORMATS, medians).markdown(), end="")


if __name__ == "__main__":
    main()
