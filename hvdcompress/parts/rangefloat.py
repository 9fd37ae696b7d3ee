"""Range float: an N-bit float that uses no codes for values outside the range of the data.

Wang et al., "FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks", HPDC 2020
(arXiv 1811.08596) describe a range-based float; the definition below is our own.

The bit patterns of positive float32 numbers ascend with their values. Truncated to m mantissa bits,
b(x) = bits(|x|) >> (23 − m) numbers the bins of a float with m mantissa bits. A range float numbers only the bins in
the range of the data: P bins for eps ≤ f ≤ max, Q bins for −eps ≥ f ≥ min, and zero::

    f ≥ eps    b(f) − b(eps) + 1                     P = b(max) − b(eps) + 1,  Q = b(|min|) − b(eps) + 1
    f ≤ −eps   P + b(|f|) − b(eps) + 1               1 + P + Q ≤ 2^N
    else       0

max and min are those of the data; eps is the smallest number for which the codes suffice. If all values have one sign,
the other sign gets no codes. A code decodes to the middle of its bin, limited to [min, max]. Decoding is monotone,
encoding a decoded value gives the same code, and the relative error is below 2^−(m+1) for |f| ≥ eps.

The number m of mantissa bits is given, or chosen from the range of the data, as in the paper. We minimise the expected
squared error Σ(decoded − f)² of a sample of up to 1024 values at regular intervals. A value with a code contributes
width²/12 of its bin, and a value below eps contributes f². Another mantissa bit quarters the first sum and halves the
number of octaves that have codes, 2^(N − 1 − m) with both signs. The computation uses integers only, so that every
array backend makes the same choice; the receiver reads m from the payload.

Bytes: 8 (max and −min as float32, from which eps follows) + 1 (m, if it is chosen) + ⌈count·N/8⌉.

For normally distributed data, m = N − 4 is best for 8 to 12 bits (16 octaves for both signs). The error
‖decoded − f‖/‖f‖ is then 1.3 % for N = 8 and 0.36 % for N = 10. From 13 bits on, values below eps would cost more than
rounding, so m = N − 5. Gradients have heavier tails, and for most of them one or two mantissa bits fewer are better.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdcompress.method import Array, Context, Workspace
from hvdcompress.ops.spec import Ops
from hvdcompress.parts.sums import concatenate_into
from hvdcompress.parts.wire import WireError

HEAD = 8  #: bytes of the range: max and −min
SAMPLE = 1024  #: maximum number of values from which the mantissa is chosen


@dataclass(frozen=True)
class RangeFloatCodec:
    """Codec that stores float32 values as floats of a few bits that cover only the range of the data."""

    bits: int = 8  #: N, bits per value, 2 to 24
    mantissa: int | None = None  #: m, mantissa bits, 1 to 22; None: chosen from the data
    code = 4

    @property
    def head(self) -> int:
        """Number of bytes before the codes."""
        return HEAD + (self.mantissa is None)

    def num_bytes(self, count: int) -> int:
        """Return the bytes of ``count`` encoded values."""
        return self.head + -(-count * self.bits // 8)

    def encode(
        self, x: Array, ctx: Context | None, work: Workspace, stream: int = 0, out: Array | None = None
    ) -> Array:
        """Encode values. The result is deterministic.

        Args:
            x: float32 [count].
            ctx: not used.
            work: the array ops.
            stream: not used.
            out: uint8 [num_bytes(count)] that receives the result; by default a new array.

        Returns:
            uint8 [num_bytes(count)].
        """
        ops = work.ops
        bounds = ops.float_bounds(x)  # [2] float32
        mantissa: int | Array | None = self.mantissa
        head = [ops.to_bytes(bounds)]
        if mantissa is None:
            # The stride is odd, so that the sample has both elements of interleaved pairs, such as FFT coefficients
            mantissa = ops.range_mantissa(x[:: -(-len(x) // SAMPLE) | 1], bounds, self.bits)  # [1] uint8
            head.append(mantissa)
        codes = ops.range_codes(x, bounds, self.bits, mantissa)  # [count] int32
        return concatenate_into([*head, ops.pack_bits(codes, self.bits)], out, ops)

    def coded(self, buffer: Array, count: int, ops: Ops) -> Array:
        """Decode values, like :meth:`decode`: the array ops cannot decode this format while writing."""
        return self.decode(buffer, count, ops)

    def decode(self, buffer: Array, count: int, ops: Ops) -> Array:
        """Decode values. Damaged bytes of the right length decode to finite values.

        Args:
            buffer: uint8 [num_bytes(count)].
            count: number of values.
            ops: the array backend.

        Returns:
            float32 [count].

        Raises:
            WireError: the number of bytes is wrong.
        """
        if len(buffer) != self.num_bytes(count):
            raise WireError(f"received {len(buffer)} bytes of range floats, expected {self.num_bytes(count)}")
        bounds = ops.from_bytes(buffer[:HEAD], "float32")
        mantissa = buffer[HEAD : self.head] if self.mantissa is None else self.mantissa
        codes = ops.unpack_bits(buffer[self.head :], self.bits, count)
        return ops.range_values(codes, bounds, self.bits, mantissa)
