"""Number formats: what rounding to each of them loses of a gradient, or of the frequencies that ``fft`` keeps of it.

An error is ‖decoded − x‖/‖x‖ over all tensors of a rank in a step, each coded by itself. A uniform code has 2^N − 1
levels from −max|x| to max|x|, rounded to nearest; fp8 is scaled so that max|x| is its largest number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from hvdcompress.method import TensorSpec, Workspace
from hvdcompress.methods.fft import FFT
from hvdcompress.ops import fast
from hvdcompress.parts.codecs import codec

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
        made += [(n, "uniform", partial(uniform, bits=n)), (n, f"rangefloat{n}", partial(coded, name=f"rangefloat{n}"))]
        made += [(n, f"e{e}m{n - 1 - e}", partial(small_float, exponent=e, mantissa=n - 1 - e)) for e in EXPONENTS]
    made += [
        (8, "fp8 e4m3", partial(fp8, dtype=torch.float8_e4m3fn)),
        (8, "fp8 e5m2", partial(fp8, dtype=torch.float8_e5m2)),
    ]
    return made + [(16, name, partial(coded, name=name)) for name in ("bf16", "fp16", "rangefloat16")]


def kept_frequencies(x: Vector, method: FFT) -> Vector:
    """Return real and imaginary parts of the frequencies of x [n] that the method sends, alternating [2·k]."""
    return fast.largest_frequencies(x, method.block_length(len(x)), method.num_kept(TensorSpec("x", (len(x),))))[1]


def error(xs: Iterable[Vector], change: Callable[[Vector], Vector]) -> float:
    """Return the error of vectors that are changed each by itself, relative to all of them together."""
    pairs = [(np.square(change(x) - x, dtype=np.float64).sum(), np.square(x, dtype=np.float64).sum()) for x in xs]
    lost, there = np.sum(pairs, axis=0)
    return float(np.sqrt(lost / there))


def statistics_of(x: Vector) -> dict[str, float]:
    """Return what decides whether elements or frequencies of x [n] are better left out.

    Returns:
        ``correlation`` of neighbours in memory (lag-1 autocorrelation), and ``kurtosis`` of the elements: 3 for a
        normal distribution, more with heavy tails.
    """
    centred = x - x.mean(dtype=np.float64)
    variance = np.square(centred).mean()
    lagged, fourth = (centred[1:] * centred[:-1]).mean(), (centred**4).mean()
    return {"correlation": float(lagged / variance), "kurtosis": float(fourth / variance**2)}
