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
from hvdcompress.parts.sums import Codec


@dataclass(frozen=True)
class StochasticCodec(Codec):
    """Codec that stores float32 values as signs and levels, in buckets with one norm each."""

    bits: int = 4  #: bits per value, its sign included, 2 to 8
    bucket: int = 512  #: values per bucket
    norm: Literal["max", "l2"] = "max"
    code = 3

    @property
    def unit(self) -> int:
        return self.bucket

    def head_bytes(self, count: int) -> int:
        return 4 * -(-count // self.bucket)

    def write(self, x: Array, head: Array, body: Array, ctx: Context, work: Workspace, stream: int) -> None:
        ops = work.ops
        key = seed.private_key(ctx, stream)
        norms = ops.bucket_norms(x, self.bucket, self.norm)
        ops.quantize(x, norms, self.bucket, self.bits, key, body)
        head[:] = ops.to_bytes(norms)

    def read(self, head: Array, body: Array, count: int, ops: Ops) -> Codes:
        norms = ops.from_bytes(head, "float32")
        return Codes(body, norms, self.bucket, quantized_levels(self.bits), self.bits, 0, count)
