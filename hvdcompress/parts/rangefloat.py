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
from hvdcompress.parts.sums import Codec

HEAD = 8  #: bytes of the range: max and −min
SAMPLE = 1024  #: maximum number of values from which the mantissa is chosen


@dataclass(frozen=True)
class RangeFloatCodec(Codec):
    """Codec that stores float32 values as floats of a few bits that cover only the range of the data."""

    bits: int = 8  #: N, bits per value, 2 to 24
    mantissa: int | None = None  #: m, mantissa bits, 1 to 22; None: chosen from the data
    code = 4

    def head_bytes(self, count: int) -> int:
        return HEAD + (self.mantissa is None)

    def write(self, x: Array, head: Array, body: Array, ctx: Context, work: Workspace, stream: int) -> None:
        ops = work.ops
        bounds = ops.float_bounds(x)  # [2] float32
        mantissa: int | Array | None = self.mantissa
        head[:HEAD] = ops.to_bytes(bounds)
        if mantissa is None:
            # The stride is odd, so that the sample has both elements of interleaved pairs, such as FFT coefficients
            mantissa = ops.range_mantissa(x[:: -(-len(x) // SAMPLE) | 1], bounds, self.bits)  # [1] uint8
            head[HEAD:] = mantissa
        body[:] = ops.pack_bits(ops.range_codes(x, bounds, self.bits, mantissa), self.bits)

    def read(self, head: Array, body: Array, count: int, ops: Ops) -> Array:
        mantissa = head[HEAD:] if self.mantissa is None else self.mantissa
        codes = ops.unpack_bits(body, self.bits, count)
        return ops.range_values(codes, ops.from_bytes(head[:HEAD], "float32"), self.bits, mantissa)
