"""Range float: an N-bit float that spends no codes outside the range of the data.

Wang et al., "FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks", HPDC 2020
(arXiv 1811.08596) have a range-based float; the definition below is our own.

The bits of a positive float32 ascend with its value. Cut to m mantissa bits, b(x) = bits(|x|) >> (23 − m), they number
the bins of a float with m mantissa bits. A range float numbers only the bins that occur: P bins for eps ≤ f ≤ max, Q
bins for −eps ≥ f ≥ min, and zero::

    f ≥ eps    b(f) − b(eps) + 1                     P = b(max) − b(eps) + 1,  Q = b(|min|) − b(eps) + 1
    f ≤ −eps   P + b(|f|) − b(eps) + 1               1 + P + Q ≤ 2^N
    else       0

max and min are those of the data; eps is the smallest for which the codes suffice. If all values have one sign, the
other sign gets no codes. A code decodes to the middle of its bin, limited to [min, max]. Decoding is monotone, encoding
a decoded value gives the same code, and the relative error is below 2^−(m+1) for |f| ≥ eps.

How many of the N bits are mantissa is given, or chosen from the data's range as in the paper, which tunes its float to
the range of the frequencies. Ours minimises the expected squared error Σ(decoded − f)² of a sample of up to 1024
values: width²/12 of its bin for each that has a code, f² for each that is below eps. A bit more of mantissa quarters
the first sum and halves the octaves that there are codes for, 2^(N − 1 − m) with both signs. The sample is every so
many-th value. All is computed in integers, so that every array backend chooses alike; the receiver reads m.

Bytes: 8 (max and −min as float32, from which eps follows) + 1 (m, if it is chosen) + ⌈count·N/8⌉.

For normal data m = N − 4 is best with 8 to 12 bits (16 octaves for both signs): the error ‖decoded − f‖/‖f‖ is 1.3 %
for N = 8 and 0.36 % for N = 10. From 13 bits on, values below eps would cost more than the rounding, so m = N − 5.
Gradients have heavier tails, and are mostly served better by one or two bits less.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdcompress.method import Array, Context, Workspace
from hvdcompress.ops.spec import Ops
from hvdcompress.parts.sums import put
from hvdcompress.parts.wire import WireError

HEAD = 8  #: bytes of the range: max and −min
SAMPLE = 1024  #: values that the mantissa is chosen by, at most


@dataclass(frozen=True)
class RangeFloatCodec:
    """Codec of float32 values as floats of a few bits that cover only the data's range."""

    bits: int = 8  #: N, bits per value, 2 to 24
    mantissa: int | None = None  #: m, mantissa bits, 1 to 22; None: chosen from the data
    code = 4

    @property
    def head(self) -> int:
        """Return the bytes before the codes."""
        return HEAD + (self.mantissa is None)

    def num_bytes(self, count: int) -> int:
        """Return the bytes of ``count`` values."""
        return self.head + -(-count * self.bits // 8)

    def encode(
        self, x: Array, ctx: Context | None, work: Workspace, stream: int = 0, out: Array | None = None
    ) -> Array:
        """Write values; uses no random numbers.

        Args:
            x: float32 [count].
            ctx: not used.
            work: the array ops.
            stream: not used.
            out: uint8 [num_bytes(count)] that receives them; by default a new array.

        Returns:
            uint8 [num_bytes(count)].
        """
        ops = work.ops
        bounds = ops.float_bounds(x)  # [2] float32
        mantissa: int | Array | None = self.mantissa
        head = [ops.to_bytes(bounds)]
        if mantissa is None:
            # an odd stride, so that of pairs of values both take part
            mantissa = ops.range_mantissa(x[:: -(-len(x) // SAMPLE) | 1], bounds, self.bits)  # [1] uint8
            head.append(mantissa)
        codes = ops.range_codes(x, bounds, self.bits, mantissa)  # [count] int32
        return put([*head, ops.pack_bits(codes, self.bits)], out, ops)

    def coded(self, buffer: Array, count: int, ops: Ops) -> Array:
        """Read values, as :meth:`decode` does."""
        return self.decode(buffer, count, ops)

    def decode(self, buffer: Array, count: int, ops: Ops) -> Array:
        """Read values. Damaged bytes of the right length give finite values.

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
