"""Stochastic quantization: each value is rounded randomly to one of a few levels, without bias.

Alistarh et al., "QSGD", NeurIPS 2017 (arXiv 1610.02132). The vector is divided into buckets, each with its own norm::

    v ≈ ‖v‖ · sgn(v) · level/s,    level = ⌊|v|/‖v‖·s⌋ or one more,    s = 2^(bits − 1) − 1

The upper level is chosen with the probability that makes E[level] = |v|/‖v‖·s. With the l2-norm and d elements per
bucket, E‖Q(v) − v‖² ≤ min(d/s², √d/s)·‖v‖² (Lemma 3.1). With the maximum norm, which is smaller, levels are closer and
the error is at most d/(4s²)·max²|v|. If rounding makes |v| larger than the norm, it counts as the norm.

Each rank has its own random stream, so the errors of different ranks average out.

Bytes: 4 per bucket (its norm, float32) + ⌈count·bits/8⌉ (a sign and a level per value).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hvdcompress.method import Array, Context, Workspace
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Codes, quantized_levels
from hvdcompress.parts import seed
from hvdcompress.parts.wire import WireError


@dataclass(frozen=True)
class StochasticCodec:
    """Codec that stores float32 values as signs and levels, in buckets with one norm each."""

    bits: int = 4  #: bits per value, its sign included, 2 to 8
    bucket: int = 512  #: values per bucket
    norm: Literal["max", "l2"] = "max"
    code = 3

    def num_bytes(self, count: int) -> int:
        """Return the bytes of ``count`` encoded values."""
        return self._edge(count) + -(-count * self.bits // 8)

    def _edge(self, count: int) -> int:
        """Return the bytes of the norms for ``count`` values, which is the offset of the codes."""
        return 4 * -(-count // self.bucket)

    def encode(self, x: Array, ctx: Context, work: Workspace, stream: int = 0, out: Array | None = None) -> Array:
        """Quantize values.

        Args:
            x: float32 [count].
            ctx: rank, step, tensor and seed, which select the random stream.
            work: the array ops.
            stream: index of the call within the exchange, so that each call has its own random numbers.
            out: uint8 [num_bytes(count)] that receives the result; by default a new array.

        Returns:
            uint8 [num_bytes(count)].
        """
        ops = work.ops
        out = ops.zeros(self.num_bytes(len(x)), "uint8", like=x) if out is None else out
        edge = self._edge(len(x))
        key = seed.private_key(ctx, stream)
        norms = ops.bucket_norms(x, self.bucket, self.norm)
        ops.quantize(x, norms, self.bucket, self.bits, key, out[edge:])
        out[:edge] = ops.to_bytes(norms)
        return out

    def coded(self, buffer: Array, count: int, ops: Ops) -> Codes:
        """Check quantized values like :meth:`decode`, but leave decoding to the function that writes them."""
        if len(buffer) != self.num_bytes(count):
            raise WireError(f"received {len(buffer)} bytes of quantized values, expected {self.num_bytes(count)}")
        edge = self._edge(count)
        norms = ops.from_bytes(buffer[:edge], "float32")
        return Codes(buffer[edge:], norms, self.bucket, quantized_levels(self.bits), self.bits, 0, count)

    def decode(self, buffer: Array, count: int, ops: Ops) -> Array:
        """Decode quantized values. Damaged bytes of the right length decode to finite values.

        Args:
            buffer: uint8 [num_bytes(count)].
            count: number of values.
            ops: the array backend.

        Returns:
            float32 [count].

        Raises:
            WireError: the number of bytes is wrong.
        """
        return ops.dense(self.coded(buffer, count, ops))
