"""Range float: floats of N bits that spend no code outside of the range that the data really have.

Wang et al., "FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks", HPDC 2020
(arXiv 1811.08596), have a range-based float; what follows is our own definition of one.

A float32's bits ascend with its magnitude. Cut to m bits of mantissa, b(x) = bits(|x|) >> (23 − m), they number
the bins of a float with m mantissa bits. The range float numbers only those that occur: P bins for eps ≤ f ≤ max,
Q for −eps ≥ f ≥ min, and zero::

    f ≥ eps    b(f) − b(eps) + 1                     P = b(max) − b(eps) + 1,  Q = b(|min|) − b(eps) + 1
    f ≤ −eps   P + b(|f|) − b(eps) + 1               1 + P + Q ≤ 2^N
    else       0

max and min are the data's own; eps is the least for which the codes suffice. Data of one sign give the other
no code. A code is read as the middle of its bin, but never as more than max or less than min. That is monotone,
writes what it read the same again, and errs by less than 2^−(m+1) of any |f| ≥ eps.

Bytes: 8 (max and −min, float32, from which eps follows) + ⌈count·N/8⌉.

With 8 to 12 bits, m = N − 4 is best for normal data (16 octaves for both signs): the error, relative in the
2-norm, ‖decoded − f‖/‖f‖, is 1.3 % for N = 8 and 0.36 % for N = 10. From 13 bits on, what lies below eps would
outweigh the rounding: m = N − 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdcompress.method import Array, Context
from hvdcompress.parts.wire import WireError

HEAD = 8  #: bytes of max and −min


@dataclass(frozen=True)
class RangeFloatCodec:
    """Writes float32 values in ``bits`` bits each (2 … 24), ``mantissa`` of them (1 … 22) in effect mantissa."""

    bits: int = 8
    mantissa: int | None = None
    code = 4

    @property
    def mantissa_bits(self) -> int:
        """m; where it was not given, the best for normal data."""
        return max(1, self.bits - (4 if self.bits <= 12 else 5)) if self.mantissa is None else self.mantissa

    def num_bytes(self, count: int) -> int:
        """Bytes of ``count`` values."""
        return HEAD + -(-count * self.bits // 8)

    def encode(self, x: Array, ctx: Context | None, ops: Any, stream: int = 0) -> Array:
        """[count] float32 -> [num_bytes] uint8; draws no random numbers."""
        bounds = ops.float_bounds(x)  # [2] float32
        codes = ops.range_codes(x, bounds, self.bits, self.mantissa_bits)  # [count] int32
        return ops.concat([ops.to_bytes(bounds), ops.pack_bits(codes, self.bits)])

    def decode(self, buffer: Array, count: int, ops: Any) -> Array:
        """[num_bytes] uint8 -> [count] float32; damaged bytes of the right number give some finite values.

        Raises:
            WireError: the number of bytes is wrong.
        """
        if len(buffer) != self.num_bytes(count):
            raise WireError(f"{len(buffer)} bytes of range floats, {self.num_bytes(count)} were expected")
        bounds = ops.from_bytes(buffer[:HEAD], "float32")
        codes = ops.unpack_bits(buffer[HEAD:], self.bits, count)
        return ops.range_values(codes, bounds, self.bits, self.mantissa_bits)
