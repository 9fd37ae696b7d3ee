"""Array ops in numpy: the reference that tests compare every other backend with.

:mod:`hvdcompress.ops.spec` documents each op, and has the code of those that are the same in numpy and torch.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from hvdcompress.ops.shared import NEGLIGIBLE, mix
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import NumpyArray as Array

ALIGNMENT = 64  #: bytes: a cache line; other libraries use arrays with this alignment without a copy


def aligned(memory: Array, num_bytes: int) -> Array:
    """Return a view [num_bytes] of ``memory`` (uint8) that starts at a multiple of ``ALIGNMENT``."""
    address: int = memory.__array_interface__["data"][0]  # ten times as fast as ctypes.data
    start = -address % ALIGNMENT
    return memory[start : start + num_bytes]


class NumpyOps(Ops):
    """The array ops on numpy arrays."""

    xp = np

    @property
    def fft(self) -> ModuleType:
        import scipy.fft  # here because only one method needs it, and the import takes longer than the package's

        return scipy.fft

    def zeros(self, size: int, dtype: str, like: Array) -> Array:
        num_bytes = size * np.dtype(dtype).itemsize
        return aligned(np.zeros(num_bytes + ALIGNMENT, np.uint8), num_bytes).view(dtype)

    def asarray(self, values: Array, like: Array) -> Array:
        return values

    def to_bytes(self, x: Array) -> Array:
        return np.ascontiguousarray(x).view(np.uint8)

    def from_bytes(self, buffer: Array, dtype: str) -> Array:
        found = buffer.view(dtype)
        return found if found.flags.aligned else buffer.copy().view(dtype)

    def sort(self, x: Array) -> Array:
        return np.sort(x)

    def all_finite(self, x: Array) -> bool:
        if x.dtype == np.float64:
            return bool(np.isfinite(x).all())
        with np.errstate(invalid="ignore"):  # Inf − Inf is NaN, which is not finite either
            return bool(np.isfinite(x.sum(dtype=np.float64)))  # a float64 sum of finite float32 numbers cannot overflow

    def uniform(self, key: Array, count: int, like: Array, start: int = 0) -> Array:
        bits = mix(mix(np.arange(start, start + count, dtype=np.uint32) + key) ^ key)
        return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)

    def orthonormalise(self, x: Array, rows: int, key: Array | None = None) -> Array:
        given = x.reshape(rows, -1).astype(np.float64)
        done = np.zeros_like(given)
        for number in range(rows):
            row = self._orthogonalised(given[number], done[:number])
            if key is not None and not row.any():
                row = self._orthogonalised(self._drawn(key, number, given.shape[1]), done[:number])
            done[number] = row
        return done.astype(np.float32).ravel()

    def _drawn(self, key: Array, number: int, size: int) -> Array:
        """Return row ``number`` [size] float64 of the random matrix whose rows replace zero rows."""
        return (self.uniform(key, size, key, number * size) - np.float32(0.5)).astype(np.float64)

    def _orthogonalised(self, row: Array, done: Array) -> Array:
        """Orthogonalise ``row`` against ``done`` and normalise it; return zeros if only rounding errors remain."""
        row = self._normalised(row, 0.0)
        # Twice is enough (Giraud et al. 2005). After one pass, the rounding error of a large projection remains.
        for _ in range(2):
            for other in done:
                row = row - self._dot(other, row) * other
        return self._normalised(row, NEGLIGIBLE)

    def _normalised(self, row: Array, least: float) -> Array:
        """Return a row divided by its length, or zeros if the length is not above ``least``."""
        length = np.sqrt(self._dot(row, row))
        return row / length if length > least else np.zeros_like(row)

    def _dot(self, x: Array, y: Array) -> Any:
        """Return the scalar product, added in the order of :meth:`_folded`."""
        return self._folded((x * y)[None])[0]

    def pack_signs(self, x: Array) -> Array:
        return np.packbits(x < 0, bitorder="little")

    def _add_in_order(self, out: Array, index: Array, values: Array) -> None:
        np.add.at(out, index, values)

    def _kth(self, magnitudes: Array, k: int) -> Any:
        return np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]


ops = NumpyOps()  #: the backend
