"""Code that backends share: constants, rules and formulas.

Functions with an argument ``xp`` take the library's module (numpy or torch), and use only functions that both modules
have under the same name. Functions without it use operators and methods that the arrays of both libraries have.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import numpy as np

from hvdcompress.ops.vectors import Array, NumpyArray, Outer, Scalar

FP32_MAX_BITS = 0x7F7FFFFF  #: bits of the largest finite float32. The bits of non-negative floats are in their order.
PIECE = 512  #: number of summands that are folded to one sum, before the sums of pieces are folded
MIX_FACTORS = (0x85EBCA6B, 0xC2B2AE35)  #: the two factors of MurmurHash3's finalizer
NEGLIGIBLE = 1e-6  #: if orthogonalising leaves less than this share of a row, the rest is float32 rounding error

# -- indices and statistics ---------------------------------------------------------------------------------------


def index_dtype(n: int) -> str:
    """Return the dtype of indices into n elements: "int32" for n < 2^31, otherwise "int64"."""
    return "int32" if n < 2**31 else "int64"


def f32(number: Scalar) -> float:
    """Round a number to float32."""
    return float(np.float32(number))


@lru_cache
def chunks_of(sizes: tuple[int, ...], chunk: int) -> tuple[NumpyArray, NumpyArray]:
    """Return the index of each chunk's first element, and of the last element of its part, for parts of a vector."""
    ends = list(itertools.accumulate(sizes))
    firsts = [np.arange(end - size, end, chunk) for end, size in zip(ends, sizes, strict=True)]
    lasts = [np.full(first.size, end - 1) for first, end in zip(firsts, ends, strict=True)]
    return np.concatenate(firsts), np.concatenate(lasts)


def moments_of(total: float, squares: float, n: int) -> tuple[float, float]:
    """Return the mean and the unbiased standard deviation of n numbers, given Σx and Σx²."""
    mean = float(total) / max(n, 1)
    variance = float(squares) - n * mean * mean
    if variance < 1e-12 * squares:  # all elements are equal: the difference is the rounding error of the sums
        variance = 0.0
    return mean, (variance / max(n - 1, 1)) ** 0.5


# -- random numbers and levels --------------------------------------------------------------------------------------


def mix(x: NumpyArray) -> NumpyArray:
    """Return MurmurHash3's finalizer (Appleby) of uint32: a bijection in which each bit depends on all bits."""
    x = (x ^ x >> np.uint32(16)) * np.uint32(MIX_FACTORS[0])
    x = (x ^ x >> np.uint32(13)) * np.uint32(MIX_FACTORS[1])
    return x ^ x >> np.uint32(16)


def between(levels: NumpyArray) -> NumpyArray:
    """Return the middle between each two neighbours of a table of levels [m − 1], rounded to float32."""
    return (levels[:-1].astype(np.float64) / 2 + levels[1:].astype(np.float64) / 2).astype(np.float32)


def level_edges(levels: NumpyArray, nearest: bool) -> NumpyArray:
    """Return the numbers [m − 1] float32 such that the index of a number's level is how many of them are below it.

    Args:
        levels: ascending [m] float32.
        nearest: the level that is nearest to the number; otherwise the largest level that is not above it.
    """
    return between(levels) if nearest else np.nextafter(levels[1:], np.float32(-np.inf))


def filled(table: NumpyArray, size: int, value: float = np.inf) -> NumpyArray:
    """Extend a table [m] float32 to ``size`` entries."""
    return np.concatenate([table, np.full(size - table.size, value, np.float32)])


_ROUNDS = 4  # four Feistel rounds give a pseudorandom permutation (Luby & Rackoff 1988)


def half_bits(n: int) -> int:
    """Return h such that 4^h is the smallest power of four ≥ n; at least 1."""
    return max((n - 1).bit_length() + 1, 2) // 2


def round_keys(key: NumpyArray) -> NumpyArray:
    """Return one key per round [rounds] uint32 of the Feistel network that permutes indices."""
    return mix(key + np.arange(_ROUNDS, dtype=np.uint32))


# -- range floats ---------------------------------------------------------------------------------------------------

OCTAVES = 19  #: octaves below the largest magnitude that range_errors counts: sums of 4096 errors then fit int64
RANGE_MANTISSAS = 8  #: number of mantissas tried: one bit less doubles the octaves, and float32 has 2^8 octaves
RangeSpace = tuple[Array, Array, Array]  #: first bin, number of positive codes, number of negative codes


def range_space(edges: Array, bits: int, shift: Any, xp: Any) -> RangeSpace:
    """Divide the codes of a range float between positive and negative bins.

    Args:
        edges: Bits of the bounds [2] int32, both finite and non-negative.
        bits: Bits per code.
        shift: 23 − mantissa bits: the low bits of a float32 that a bin ignores; a number, or [m, 1] or [1] int32.
        xp: The array library.

    Returns:
        The first bin, the number of positive codes and the number of negative codes, each [1] int32.
    """
    top = edges[:1] >> shift
    low = edges[1:] >> shift
    room = (1 << bits) - 1  # one code is zero
    # the smallest first bin such that all bins from it on have codes: both signs together, or one sign alone
    first = xp.maximum((top + low + 3 - room) >> 1, xp.maximum(top, low) + 1 - room).clip(min=1)
    return first, (top - first + 1).clip(min=0), (low - first + 1).clip(min=0)


def range_span(width: int) -> tuple[int, int]:
    """Return the range of mantissa bits to try for codes of ``width`` bits, as (start, stop)."""
    end = min(width, 23)
    return max(1, end - RANGE_MANTISSAS), end


def range_errors(bits: Array, edges: Array, width: int, shift: Array, xp: Any) -> Array:
    """Return the expected squared error [m] int64 of range floats for each of m shifts, in a common unit.

    The squared rounding error is width²/12 of a bin. A value below the smallest bin becomes zero, and its error is the
    value itself; if the value is less than 2^−19 of the largest magnitude, it is ignored.

    Args:
        bits: Bits of a sample of the data [n] int32, n ≤ 4096.
        edges: Bits of the bounds [2] int32, both finite and non-negative.
        width: Bits per code.
        shift: 23 − mantissa bits [m, 1] int32.
        xp: The array library.
    """
    first, _, _ = range_space(edges, width, shift, xp)  # [m, 1]
    magnitude = bits & 0x7FFFFFFF
    octave = (magnitude >> 23) - (edges.max() >> 23) + OCTAVES
    power = xp.where(octave < 0, 0, xp.ones_like(octave, dtype=xp.int64) << (2 * octave.clip(min=0)))  # 4^octave
    leading = ((magnitude >> 20) & 7) * 2 + 17  # 16·significand, by its first 3 bits: the middle of an eighth
    lost = magnitude < (first << shift)  # [m, n]: below the smallest bin
    dropped = xp.where(lost, leading * leading * power, 0).sum(1)  # 256·value²
    rounded = xp.where(lost, 0, power).sum(1)  # width²·4^mantissa
    return 3 * dropped + ((64 * rounded) >> (2 * (23 - shift[:, 0])))  # 3·256/12 = 64


def range_codes_of(bits: Array, space: RangeSpace, shift: Any, xp: Any) -> Array:
    """Return the range-float codes [n] int32 of float32 numbers, given their bits [n] int32."""
    first, positive, negative = space
    number = ((bits & 0x7FFFFFFF) >> shift) - (first - 1)  # 1 for the first bin
    below = xp.minimum(number, negative)
    codes = xp.where(bits < 0, xp.where(below > 0, positive + below, 0), xp.minimum(number, positive))
    return codes.clip(min=0)


def range_bits_of(codes: Array, edges: Array, space: RangeSpace, shift: Any, xp: Any) -> Array:
    """Return the bits [n] int32 of the float32 numbers that range-float codes [n] int32 represent."""
    first, positive, negative = space
    codes = xp.minimum(codes, positive + negative)
    minus = codes > positive
    number = xp.where(minus, codes - positive, codes)
    middle = ((number + (first - 1)) << shift) + (1 << (shift - 1))
    middle = xp.minimum(middle, xp.where(minus, edges[1:], edges[:1]))
    return xp.where(codes == 0, 0, xp.where(minus, middle | -0x80000000, middle))


# -- spectra --------------------------------------------------------------------------------------------------------


def bins(n: int, block: int) -> int:
    """Return the number of bins of the spectra of n elements in blocks of ``block``."""
    whole, rest = divmod(n, block)
    return whole * (block // 2 + 1) + (rest // 2 + 1 if rest else 0)


def forward_scale(length: int, block: int) -> float:
    """Return 1/√(length·block), rounded to float32: the factor of the spectrum of ``length`` elements."""
    return float(np.float32((length * block) ** -0.5))


def inverse_scale(length: int, block: int) -> float:
    """Return √(block/length), rounded to float32: the factor of an inverse transform with norm="forward"."""
    return float(np.float32((block / length) ** 0.5))


# -- matrices -------------------------------------------------------------------------------------------------------


def outer_sum(matrix: Outer) -> Array:
    """Return the matrix of an :class:`~hvdcompress.ops.vectors.Outer`, flat."""
    left, right = matrix.left.reshape(matrix.terms, -1, 1), matrix.right.reshape(matrix.terms, 1, -1)
    total = left[0] * right[0]
    for column, row in zip(left[1:], right[1:], strict=True):
        total += column * row  # two roundings: a fused multiply-add would round once
    if matrix.scale != 1.0:
        total *= float(np.float32(matrix.scale))
    return total.ravel()


def centred(wide: Array) -> Array:
    """Return a matrix (two-dimensional float64) minus its mean row; rows are added in their order."""
    total = 0.0 + wide[0]
    for row in wide[1:]:
        total += row
    # the divisor is an array, because a GPU would multiply by the reciprocal of a number
    return wide - total / (total.clip(0, 0) + len(wide))


def combined(weights: Array, rows: Array) -> Array:
    """Return weights [count, rows] · rows [rows, m], all float64, flat; products are added in the order of the rows."""
    total = 0.0 + weights[:, :1] * rows[0]
    for share, row in zip(weights.T[1:], rows[1:], strict=True):
        total += share[:, None] * row
    return total.ravel()
