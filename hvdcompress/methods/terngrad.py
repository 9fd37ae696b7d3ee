"""TernGrad: each value is rounded at random to −s, 0 or +s, without bias.

Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", NeurIPS 2017
(arXiv 1705.07878), Alg. 1, with its layer-wise ternarizing, gradient clipping and scaler sharing.

    g clipped to ±2.5σ,    s = max|g|,    g ≈ s · sgn(g) · b,    P(b = 1) = |g|/s

If all ranks use the largest s of any rank, their ternaries can be *summed*: Σ b·sgn(g) lies in −p … p and fits into a
field of ⌈log2(2p + 1)⌉ bits. An int32 holds ⌊32/width⌋ such fields, and adding int32 words adds the fields without
carries between them. Each rank has its own random stream, so the errors of the p ranks average out.

What is sent: with ``route: reduce`` (default), the scaler by a max all-reduce, then the packed ternaries by a sum
all-reduce. With ``route: gather`` or ``scatter``, 2 bits per value and the rank's own scaler, as in qsgd.

Bytes: reduce: 4 + 4·⌈n/⌊32/⌈log2(2p + 1)⌉⌋⌉; gather: 24 (header) + m(n), m(c) = 4 + ⌈c/4⌉; scatter: (p + 1)·m(⌈n/p⌉).

When it loses: the rounding error of a value is about as large as the value itself, so the steps are noisy. With
``route: reduce`` a field needs one more bit each time the number of ranks doubles.

``clip_factor``: without clipping (0) the result is unbiased. Clipping adds some bias and makes s smaller, which reduces
the variance.

Departures from the paper: the clipping limit is never below |mean|. Otherwise (nearly) constant tensors and tensors of
one element, whose σ is (nearly) 0, would be clipped to zero. The paper's workers receive the sum from a parameter
server, and the sum takes many values. The routes reduce and gather return that sum; the route scatter quantizes it
again. Error feedback is available, but the residual grows from step to step, as the error is as large as the value.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("terngrad", world_size=2, clip_factor=0, min_elements=1)
>>> out = net.allreduce([np.float32([4, -1, 0, 3]), np.float32([-1, -4, 0, 1])], name="w")[0]
>>> out.tolist(), net.ledger.bytes_sent(rank=0)     # an estimate of 1.5, −2.5, 0 and 2
([2.0, -2.0, 0.0, 2.0], 8)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from hvdcompress.method import AllReduce, Array, Communication, Context, Number, Reduced, TensorSpec, Workspace, method
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import FP32_MAX, Fields
from hvdcompress.parts import seed
from hvdcompress.parts.quantize import StochasticCodec
from hvdcompress.parts.sums import Codec, Quantizer
from hvdcompress.parts.wire import WireError

WHOLE = 1 << 62  #: bucket size that puts any tensor into one bucket, so that all values share one scaler
BITS = 2  #: bits per ternary: its sign, and whether it is 0


def clipping_limit(x: Array, clip_factor: float, ops: Ops) -> float:
    """Return max(clip_factor·σ, |mean|), or the largest float32 if ``clip_factor`` is 0 (no clipping)."""
    if not clip_factor:
        return FP32_MAX
    mean, std = ops.moments(x)
    return max(clip_factor * std, abs(mean))


def scaler(x: Array, limit: float, ops: Ops) -> Array:
    """Return s [1], the largest |x| after clipping to ±``limit``; [0] if x is empty."""
    s = min(ops.max_abs(x), float(np.float32(limit)))
    return ops.asarray(np.float32([s] * min(len(x), 1)), like=x)  # type: ignore[arg-type]


def field_width(world_size: int) -> int:
    """Return ⌈log2(2p + 1)⌉, the bits that hold a sum of p ternaries."""
    return (2 * world_size).bit_length()


@dataclass(frozen=True)
class TernaryCodec(StochasticCodec):
    """Codec that writes the scaler s, then 2 bits per value: the ternary of the clipped value."""

    bits: int = BITS
    bucket: int = WHOLE
    clip_factor: float = 2.5
    code = 6

    def write(self, x: Array, head: Array, body: Array, ctx: Context, work: Workspace, stream: int) -> None:
        ops = work.ops
        if not ops.all_finite(x):  # gradients are finite, so x is a sum of shards that were received (route: scatter)
            raise WireError(
                f"tensor {ctx.spec.name!r}: the sum of the received shards contains NaN or Inf; a shard is damaged, "
                "or the sum exceeds float32"
            )
        s = scaler(x, clipping_limit(x, self.clip_factor, ops), ops)
        head[:] = ops.to_bytes(s)
        ops.quantize(x, s, WHOLE, BITS, seed.private_key(ctx, stream), body)  # quantize clips |x| to s


@method
class TernGrad(Quantizer):
    """Rounds each value stochastically to −s, 0 or +s."""

    paper = "Wen et al., NeurIPS 2017 (arXiv 1705.07878)"
    sends = "ternaries in fields of log2(2p + 1) bits, summed; or 2 bits per value, gathered or scattered"
    examples = ({"clip_factor": 0.0}, {"clip_factor": 0.0, "route": "gather"}, {"clip_factor": 0.0, "route": "scatter"})

    clip_factor: Annotated[float, Number, Field(ge=0.0)] = 2.5
    """Values are clipped to ± ``clip_factor`` standard deviations; 0: no clipping."""
    route: Literal["reduce", "gather", "scatter"] = "reduce"  # type: ignore[assignment]
    """How ternaries are summed. "reduce": all ranks share one scaler, and an all-reduce adds the ternaries. "gather":
    all ranks receive all ranks' codes. "scatter": shards are summed and quantized again, so that the bytes received
    do not grow with the number of ranks."""

    @property
    def unbiased(self) -> bool:
        """Whether the result of each step is unbiased. With feedback, only the average over steps is."""
        return self.clip_factor == 0 and self.feedback == "none"

    @property
    def codec(self) -> Codec:
        return TernaryCodec(clip_factor=self.clip_factor)

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        if self.route != "reduce":
            return super().num_bytes(spec, world_size)
        if not spec.size:
            return 0  # an empty tensor has no scaler
        return 4 + 4 * -(-spec.size // (32 // field_width(world_size)))

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        if self.route != "reduce":
            return (yield from super().exchange(x, state, ctx, work))
        ops = work.ops
        n = len(x)
        limit = clipping_limit(x, self.clip_factor, ops)
        s = yield AllReduce(scaler(x, limit, ops), op="max")  # [1]: scaler sharing
        width = field_width(ctx.world_size)
        words = work.buffer("words", -(-n // (32 // width)), "int32", x)
        ops.quantize_fields(x, limit, s, width, seed.private_key(ctx), words)
        own = Fields(words, width, 1, s, 0, n)  # s · (−1, 0 or 1)
        total = yield AllReduce(words)
        return Reduced(total=Fields(total, width, ctx.world_size, s, 0, n), own=own)  # s · (−p … p)
