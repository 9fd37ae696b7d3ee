"""QSGD: stochastic quantization. Each value is rounded at random to one of the two nearest levels, without bias.

Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017
(arXiv 1610.02132), §3.1. Buckets and the maximum norm are variants from the paper itself.

    v ≈ ‖v‖ · sgn(v) · level/s,    s = 2^(bits − 1) − 1                         (for each bucket of values)
    level = ⌊a⌋ + 1 with probability a − ⌊a⌋, else ⌊a⌋,    a = |v|/‖v‖ · s

The result is unbiased, so no residual is needed. With the l2-norm and d values per bucket, the variance is at most
min(d/s², √d/s)·‖v‖² (Lemma 3.1). The maximum norm (default) is smaller than the l2-norm, so its levels are closer
together. Each rank has its own random stream, so the errors of the p ranks average out.

What is sent: one norm per bucket, and ``bits`` bits per value for the sign and the level. With ``route: gather``, all
ranks receive the codes of all ranks, by an all-gather. With ``route: scatter``, each rank sums one shard, quantizes the
sum and sends it to all ranks; this adds a second rounding error.

Bytes: m(c) = 4·⌈c/bucket⌉ + ⌈c·bits/8⌉ for c values; gather: 24 (header) + m(n); scatter: (p + 1)·m(⌈n/p⌉).

When it loses: with ``route: gather`` the received bytes grow with p. Four bits beat a dense ring all-reduce up to 15
ranks. With ``route: scatter`` the bytes do not grow.

Departures from the paper: levels have a fixed width instead of Elias coding (with 4 bits and the maximum norm, few
levels are zero). Zeros carry a sign too. Error feedback is available; with the l2-norm it needs √bucket < s, or the
residual grows without bound.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("qsgd", world_size=2, bits=4, min_elements=1)
>>> out = net.allreduce([np.float32([7, -3, 0.5, 0]), np.float32([7, -3, 0.5, 0])], name="w")[0]
>>> out.tolist(), net.ledger.bytes_sent(rank=0)     # 7 levels of size 1; both ranks rounded 0.5 up
([7.0, -3.0, 1.0, 0.0], 30)
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hvdcompress.method import Count, Number, method
from hvdcompress.parts.quantize import StochasticCodec
from hvdcompress.parts.sums import Quantizer


@method
class QSGD(Quantizer):
    """Rounds values stochastically to 2^(bits − 1) − 1 levels per sign."""

    paper = "Alistarh et al., NeurIPS 2017 (arXiv 1610.02132)"
    sends = "2 to 8 bits per value (sign and level) + a norm per bucket; gathered, or scattered: constant in p"
    examples = ({"bits": 2}, {"bits": 8, "bucket": 100}, {"bits": 3, "bucket": 16, "norm": "l2", "route": "scatter"})

    bits: Annotated[int, Number, Field(ge=2, le=8)] = 4
    """Bits per value: one for the sign, the others for one of 2^(bits − 1) levels, zero included."""
    bucket: Count = 512
    """Number of values that share a norm."""
    norm: Literal["max", "l2"] = "max"
    """Norm of a bucket that its levels are multiples of. "max": its largest magnitude. "l2": its l2-norm."""

    @property
    def unbiased(self) -> bool:
        """Whether the result of each step is unbiased. With feedback, only the average over steps is."""
        return self.feedback == "none"

    @property
    def codec(self) -> StochasticCodec:
        return StochasticCodec(self.bits, self.bucket, self.norm)
