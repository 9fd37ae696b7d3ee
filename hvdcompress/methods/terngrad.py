"""TernGrad: each value becomes −s, 0 or +s at random, so that its mean is right.

Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", NeurIPS 2017
(arXiv 1705.07878), Alg. 1, with its layer-wise ternarizing, gradient clipping and scaler sharing.

    g clipped to ±2.5σ,    s = max|g|,    g ≈ s · sgn(g) · b,    P(b = 1) = |g|/s

With the largest s of all workers their ternaries can be *summed*: Σ b·sgn(g) lies in −p … p, so a field of
⌈log2(2p + 1)⌉ bits holds it, and ⌊32/width⌋ fields in an int32 add without carrying. Each rank draws from a
stream of its own, so that the errors of p ranks average out.

What travels: ``route: reduce`` (default): the scalers, of which the network takes the largest, then the packed
ternaries, which it adds. ``route: gather | scatter``: 2 bits a value and a scaler of one's own, as in qsgd.

Bytes: reduce: 4 + 4·⌈n/⌊32/⌈log2(2p + 1)⌉⌋⌉; gather: 24 (header) + m(n), m(c) = 4 + ⌈c/4⌉; scatter: (p + 1)·m(⌈n/p⌉).

Unbiased without clipping (``clip_factor: 0``); clipping trades some bias for a smaller s, that is, less variance.

Departures from the paper: the limit is never below |mean|, so that a (nearly) constant tensor, whose σ is
(nearly) 0, or one of a single element is not clipped away. The paper's workers get a parameter server's
sum, which may take many values; here ``scatter`` quantizes the sum again, and the other routes do not. Feedback can
be had, but ternaries err by about as much as they tell, and the residual then grows with the steps.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("terngrad", world=2, clip_factor=0, min_elements=1)
>>> out = net.allreduce([np.float32([4, -1, 0, 3]), np.float32([-1, -4, 0, 1])], name="w")[0]
>>> out.tolist(), net.ledger.bytes_sent(rank=0)     # an estimate of 1.5, −2.5, 0 and 2
([2.0, -2.0, 0.0, 2.0], 8)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from hvdcompress.method import AllReduce, Array, Communication, Context, Number, Reduced, TensorSpec, method
from hvdcompress.parts import seed
from hvdcompress.parts.quantize import StochasticCodec
from hvdcompress.parts.sums import Codec, Quantizer

WHOLE = 1 << 62  # a bucket that holds any tensor
BITS = 2  # a sign, and whether it is 0


def clipped(x: Array, factor: float, ops: Any) -> Array:
    """x within ±``factor``·σ, and never narrower than ±|mean|; 0 is no clipping."""
    if not factor or not len(x):
        return x
    mean, std = ops.moments(x)
    return ops.scaled(x, 1.0, max(factor * std, abs(mean)))


def field_width(world: int) -> int:
    """⌈log2(2p + 1)⌉ bits hold a sum of p ternaries."""
    return (2 * world).bit_length()


@dataclass(frozen=True)
class TernaryCodec(StochasticCodec):
    """Writes clipped values in 2 bits each, with one scaler for all."""

    bits: int = BITS
    bucket: int = WHOLE
    clip_factor: float = 2.5
    code = 6

    def encode(self, x: Array, ctx: Context, ops: Any, stream: int = 0) -> Array:
        return super().encode(clipped(x, self.clip_factor, ops), ctx, ops, stream)


@method
class TernGrad(Quantizer):
    paper = "Wen et al., NeurIPS 2017 (arXiv 1705.07878)"
    sends = "ternaries in fields of log2(2p + 1) bits, summed; or 2 bits a value, gathered or scattered"
    examples = ({"clip_factor": 0.0}, {"clip_factor": 0.0, "route": "gather"}, {"clip_factor": 0.0, "route": "scatter"})

    clip_factor: Annotated[float, Number, Field(ge=0.0)] = 2.5
    """Values are held within ± so many standard deviations; 0: as they are."""
    route: Literal["reduce", "gather", "scatter"] = "reduce"  # type: ignore[assignment]
    """"reduce": one scaler for all ranks, and the network adds; "gather": everybody's codes to all; "scatter":
    shards are summed and encoded again, so that the bytes do not grow with the workers."""

    @property
    def unbiased(self) -> bool:
        """Whether the mean of results is the mean of gradients at each step; with feedback it is so over steps."""
        return self.clip_factor == 0 and self.feedback == "none"

    @property
    def codec(self) -> Codec:
        return TernaryCodec(clip_factor=self.clip_factor)

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
        if self.route != "reduce":
            return super().num_bytes(spec, world)
        return 4 + 4 * -(-spec.size // (32 // field_width(world)))

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, ops: Any) -> Communication:
        if self.route != "reduce":
            return (yield from super().exchange(x, state, ctx, ops))
        n, width = len(x), field_width(ctx.world)
        x = clipped(x, self.clip_factor, ops)
        scaler = yield AllReduce(ops.bucket_norms(x, n, "max"), op="max")  # [1]
        codes = ops.quantize(x, scaler, n, BITS, seed.private_key(ctx))
        one = ops.asarray(np.float32([1.0]), like=x)  # type: ignore[arg-type]
        ternary = ops.dequantize(codes, one, n, BITS, n)  # [n] −1, 0 or 1
        words = yield AllReduce(ops.pack_fields(ternary, width))  # int32
        total = ops.unpack_fields(words, width, n, ctx.world)  # [n] −p … p
        return Reduced(total=total * scaler, own=ternary * scaler if ctx.needs_own else None)
