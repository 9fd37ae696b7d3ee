"""Kernels of ``numba/spectra.py``. Vectors are float32; ``pairs`` are alternating real and imaginary parts."""

# mypy: disable-error-code="assignment"
# (Numba gives a variable the widest of its types; mypy gives it the type of the first assignment.)

from __future__ import annotations

from hvdcompress.ops.numba._kernels.compiling import compiled


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
