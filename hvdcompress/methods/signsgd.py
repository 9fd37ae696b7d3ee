"""EF-signSGD: one bit a value, the mean magnitude, and error feedback.

Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019
(arXiv 1901.09847), Alg. 1; one bit a value with error feedback is first in Seide et al., Interspeech 2014.

    p = gradient + residual,    Δ = ‖p‖₁/n · sign(p),    residual = p − Δ

Signs alone are biased, and signSGD need not converge; with the residual it does, at the rate of SGD.

What travels: for each tensor the mean magnitude ‖p‖₁/n (a float64 sum, rounded to float32), for each value
its sign. ``route: gather`` sends every rank's to all: bytes received grow with the p workers. ``route: scatter``
sums shards, each with a mean magnitude of its own, and sends the signs of the sums: bytes do not grow, for a
second rounding, which stays in the residual of the rank that summed the shard.

Bytes: m(c) = 4 + ⌈c/8⌉ for c values; gather: 24 (header) + m(n); scatter: (p + 1)·m(⌈n/p⌉).

Departures from the paper: a zero has no bit of its own and is sent as +; the residual takes that back. There is
one scale a tensor, not one for the whole model; with scatter one a shard.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("signsgd", world=2, min_elements=1)
>>> net.allreduce([np.float32([4, -1, 0, 3]), np.float32([-1, -6, 0, 1])], name="w")[0]
array([ 0., -2.,  2.,  2.], dtype=float32)
>>> net.residual("w", rank=0)
array([ 2.,  1., -2.,  1.], dtype=float32)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdcompress.method import Array, Context, FeedbackName, method
from hvdcompress.parts.sums import Codec, Quantizer
from hvdcompress.parts.wire import WireError


@dataclass(frozen=True)
class SignCodec:
    """Writes signs, and the mean magnitude."""

    code = 5

    def num_bytes(self, count: int) -> int:
        return (4 if count else 0) + -(-count // 8)

    def encode(self, x: Array, ctx: Context, ops: Any, stream: int = 0) -> Array:
        scale = ops.bucket_norms(x, len(x), "mean")  # [1], [0] where there is nothing
        return ops.concat([ops.to_bytes(scale), ops.pack_signs(x)])

    def decode(self, buffer: Array, count: int, ops: Any) -> Array:
        if len(buffer) != self.num_bytes(count):
            raise WireError(f"{len(buffer)} bytes of signs, {self.num_bytes(count)} were expected")
        if not count:
            return ops.zeros(0, "float32", like=buffer)
        return ops.unpack_signs(buffer[4:], ops.from_bytes(buffer[:4], "float32"), count)


@method
class SignSGD(Quantizer):
    paper = "Karimireddy et al., ICML 2019 (arXiv 1901.09847)"
    sends = "one bit a value + one magnitude; gathered, or scattered: constant in p"
    needs_feedback = True

    feedback: FeedbackName = "plain"

    @property
    def codec(self) -> Codec:
        return SignCodec()
