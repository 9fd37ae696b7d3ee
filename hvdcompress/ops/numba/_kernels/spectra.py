"""Kernels of ``numba/spectra.py``. Vectors are float32; ``pairs`` are alternating real and imaginary parts."""

# mypy: disable-error-code="assignment"
# (Numba gives a variable the widest of its types; mypy gives it the type of the first assignment.)

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels import flags
from hvdcompress.ops.numba._kernels.compiling import BLOCK, compiled


@compiled
def magnitudes(pairs, out):
    for i in range(out.size):
        real, imaginary = np.float64(pairs[2 * i]), np.float64(pairs[2 * i + 1])
        out[i] = np.sqrt(real * real + imaginary * imaginary)


@compiled
def strong(pairs, unit, low, first, index, found_pairs):
    """Collect the pairs with (unit·|pair|)² ≥ low, and return their number; ``first`` is the first pair's index."""
    found = 0
    flag = np.zeros(BLOCK, np.int8)
    offsets = np.empty(BLOCK, np.int32)
    for start in range(0, pairs.size // 2, BLOCK):
        part = pairs[2 * start : 2 * (start + BLOCK)]
        if part.size < 2 * BLOCK:
            flag[:] = 0
        for i in range(part.size // 2):
            real, imaginary = part[2 * i] * unit, part[2 * i + 1] * unit
            flag[i] = np.int8(real * real + imaginary * imaginary >= low)
        count = flags.indices(flag, offsets)
        for j in range(count):
            i = offsets[j]
            index[found + j] = first + start + i
            found_pairs[2 * (found + j)] = part[2 * i]
            found_pairs[2 * (found + j) + 1] = part[2 * i + 1]
        found += count
    return found


@compiled
def add_pairs(spectrum, first, index, pairs, factor):
    """Add factor·pairs to the bins ``index`` of a spectrum whose first bin has the index ``first``."""
    for j in range(index.size):
        i = 2 * (index[j] - first)
        if i < 0 or i >= spectrum.size:  # the indices came over the network: never write out of bounds
            raise IndexError("the index of a frequency is outside of the spectrum, or the indices do not ascend")
        spectrum[i] += factor * pairs[2 * j]
        spectrum[i + 1] += factor * pairs[2 * j + 1]


@compiled
def clipped(wave, scale, limit, factor, out, subtract):
    """Set out = factor·clip(scale·wave, ±limit), or subtract that from ``out``."""
    for i in range(wave.size):
        value = min(max(wave[i] * scale, -limit), limit) * factor
        out[i] = out[i] - value if subtract else value
