"""Stochastic quantization: each value becomes one of a few levels, at random, so that its mean is right.

Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017
(arXiv 1610.02132). The vector is cut into buckets, and each has a norm of its own::

    v ≈ ‖v‖ · sgn(v) · level/s,    level = ⌊|v|/‖v‖·s⌋ or one more,    s = 2^(bits − 1) − 1

the upper one with the probability that makes E[level] = |v|/‖v‖·s. With the l2-norm and d elements a bucket,
E‖Q(v) − v‖² ≤ min(d/s², √d/s)·‖v‖² (Lemma 3.1). The largest magnitude as the norm is less, so that levels lie
closer: the error is at most d/(4s²)·max²|v|. No |v| exceeds its norm, however that was rounded.

What is drawn comes from the rank's private stream, so that errors of different ranks average out.

Bytes: 4 a bucket (its norm, float32) + ⌈count·bits/8⌉: a sign and a level each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hvdcompress.method import Array, Context
from hvdcompress.parts import seed
from hvdcompress.parts.wire import WireError


@dataclass(frozen=True)
class StochasticCodec:
    """Writes float32 values as signs and levels of ``bits`` bits together (2 … 8), in buckets with one norm each."""

    bits: int = 4
    bucket: int = 512
    norm: Literal["max", "l2"] = "max"
    code = 3

    def num_bytes(self, count: int) -> int:
        """Bytes of ``count`` values."""
        return self._edge(count) + -(-count * self.bits // 8)

    def _edge(self, count: int) -> int:
        """Bytes of the norms."""
        return 4 * -(-count // self.bucket)

    def encode(self, x: Array, ctx: Context, ops: Any, stream: int = 0) -> Array:
        """[count] float32 -> [num_bytes] uint8; ``stream`` tells apart what one exchange draws."""
        norms = ops.bucket_norms(x, self.bucket, self.norm)
        codes = ops.quantize(x, norms, self.bucket, self.bits, seed.private_key(ctx, stream))
        return ops.concat([ops.to_bytes(norms), codes])

    def decode(self, buffer: Array, count: int, ops: Any) -> Array:
        """[num_bytes] uint8 -> [count] float32; damaged bytes of the right number give some finite values.

        Raises:
            WireError: the number of bytes is wrong.
        """
        if len(buffer) != self.num_bytes(count):
            raise WireError(f"{len(buffer)} bytes of quantized values, {self.num_bytes(count)} were expected")
        edge = self._edge(count)
        norms = ops.from_bytes(buffer[:edge], "float32")
        return ops.dequantize(buffer[edge:], norms, self.bucket, self.bits, count)
