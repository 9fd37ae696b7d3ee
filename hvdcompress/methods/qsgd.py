"""QSGD: stochastic quantization. Each value is rounded at random to one of a few levels, with the right mean.

Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017
(arXiv 1610.02132). Buckets, and the maximum in place of the l2-norm, are variants from the paper itself.

    v ≈ ‖v‖ · sgn(v) · level/s,    s = 2^(bits − 1) − 1                         (for each bucket of values)
    level = ⌊a⌋ + 1 with probability a − ⌊a⌋, else ⌊a⌋,    a = |v|/‖v‖ · s

The result is unbiased, so no residual is needed. With the l2-norm and d values per bucket the variance is at most
min(d/s², √d/s)·‖v‖² (Lemma 3.1). The maximum (default) is smaller than the l2-norm, so its levels lie closer. Each
rank has its own random stream, so the errors of the p ranks average out.

What is sent: one norm per bucket; a sign and a level, ``bits`` bits together, per value. With ``route: gather`` all
ranks receive the codes of all ranks, by an all-gather: the bytes received grow with p. With ``route: scatter`` each
rank sums one shard, quantizes the sum and sends it to all: the bytes do not grow, at the price of a second rounding.

Bytes: m(c) = 4·⌈c/bucket⌉ + ⌈c·bits/8⌉ for c values; gather: 24 (header) + m(n); scatter: (p + 1)·m(⌈n/p⌉).

Departures from the paper: levels have a fixed width instead of Elias coding (with 4 bits and the maximum as the norm,
few levels are zero). Zeros carry a sign too. Error feedback is available; with the l2-norm it needs √bucket < s, or
the residual grows without bound.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("qsgd", world=2, bits=4, min_elements=1)
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
    sends = "a sign and a level per value, 2 to 8 bits, + a norm per bucket; gathered, or scattered: constant in p"
    examples = ({"bits": 2}, {"bits": 8, "bucket": 100}, {"bits": 3, "bucket": 16, "norm": "l2", "route": "scatter"})

    bits: Annotated[int, Number, Field(ge=2, le=8)] = 4
    """Bits per value: its sign, and one of 2^(bits − 1) levels (zero included)."""
    bucket: Count = 512
    """Number of values that share a norm."""
    norm: Literal["max", "l2"] = "max"
    """The norm that a bucket's levels are fractions of: its largest magnitude, or its l2-norm."""

    @property
    def unbiased(self) -> bool:
        """Whether the result of each step is unbiased. With feedback it is only so on average over steps."""
        return self.feedback == "none"

    @property
    def codec(self) -> StochasticCodec:
        return StochasticCodec(self.bits, self.bucket, self.norm)
