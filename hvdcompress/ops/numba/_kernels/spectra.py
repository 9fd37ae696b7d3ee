"""The loops of ``numba/spectra.py``. Arguments: float32 vectors; pairs are real and imaginary parts in turns."""

# mypy: disable-error-code="assignment"
# (In a kernel a variable takes the widest of its types; Python's rule is the first.)

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
    """Which pairs have an energy of ``low`` or more, in units of 1/``unit``²; ``first``: the first pair's index."""
    found, flag, places = 0, np.zeros(BLOCK, np.int8), np.empty(BLOCK, np.int32)
    for start in range(0, pairs.size // 2, BLOCK):
        part = pairs[2 * start : 2 * (start + BLOCK)]
        if part.size < 2 * BLOCK:
            flag[:] = 0
        for i in range(part.size // 2):
            real, imaginary = part[2 * i] * unit, part[2 * i + 1] * unit
            flag[i] = np.int8(real * real + imaginary * imaginary >= low)
        count = flags.places(flag, places)
        for j in range(count):
            i = places[j]
            index[found + j] = first + start + i
            found_pairs[2 * (found + j)], found_pairs[2 * (found + j) + 1] = part[2 * i], part[2 * i + 1]
        found += count
    return found


@compiled
def add_pairs(spectrum, first, index, pairs, factor):
    """``first``: the number of the spectrum's first bin."""
    for j in range(index.size):
        i = 2 * (index[j] - first)
        if i < 0 or i >= spectrum.size:  # never write out of bounds, whatever came over the wire
            raise IndexError("a frequency is outside of the tensor, or they are not in ascending order")
        spectrum[i] += factor * pairs[2 * j]
        spectrum[i + 1] += factor * pairs[2 * j + 1]


@compiled
def clipped(wave, scale, limit, factor, out, subtract):
    """Write factor times the clipped, scaled wave to ``out``, or subtract it from what is there."""
    for i in range(wave.size):
        value = min(max(wave[i] * scale, -limit), limit) * factor
        out[i] = out[i] - value if subtract else value
