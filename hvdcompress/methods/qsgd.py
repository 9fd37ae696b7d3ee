"""QSGD: each value becomes one of a few levels at random, so that its mean is right.

Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017
(arXiv 1610.02132); buckets, and the largest magnitude in place of the l2-norm, are variants of the paper's own.

    v ≈ ‖v‖ · sgn(v) · level/s,    s = 2^(bits − 1) − 1                         (for each bucket of values)
    level = ⌊a⌋ + 1 with probability a − ⌊a⌋, else ⌊a⌋,    a = |v|/‖v‖ · s

The result is unbiased, so there is no residual. With the l2-norm and d values a bucket the variance is at most
min(d/s², √d/s)·‖v‖² (Lemma 3.1); with the largest magnitude (default), which is less, levels lie closer.
Each rank draws from a stream of its own, so that the errors of p ranks average out.

What travels: for each bucket its norm, for each value a sign and a level of ``bits`` bits together.
``route: gather`` sends every rank's codes to all: bytes received grow with the p workers. ``route: scatter`` sums
shards, quantizes the sums again, and hands those to all: bytes do not grow, for a second rounding.

Bytes: m(c) = 4·⌈c/bucket⌉ + ⌈c·bits/8⌉ for c values; gather: 24 (header) + m(n); scatter: (p + 1)·m(⌈n/p⌉).

Departures from the paper: levels have a fixed width, there is no Elias coding of them (at 4 bits and with the
largest magnitude as the norm few levels are zero). A sign is sent for zeros too. Feedback can be had; with the
l2-norm it works only where √bucket < s, or the residual grows for ever.

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
from hvdcompress.parts.sums import Codec, Quantizer


@method
class QSGD(Quantizer):
    paper = "Alistarh et al., NeurIPS 2017 (arXiv 1610.02132)"
    sends = "a sign and a level a value, 2 to 8 bits, + a norm a bucket; gathered, or scattered: constant in p"
    examples = ({"bits": 2}, {"bits": 8, "bucket": 100}, {"bits": 3, "bucket": 16, "norm": "l2", "route": "scatter"})

    bits: Annotated[int, Number, Field(ge=2, le=8)] = 4
    """Bits of a value: its sign, and the number of one of 2^(bits − 1) levels."""
    bucket: Count = 512
    """Values that share a norm."""
    norm: Literal["max", "l2"] = "max"
    """What a bucket's levels are shares of: its largest magnitude, or its l2-norm."""

    @property
    def unbiased(self) -> bool:
        """Whether the mean of results is the mean of gradients at each step; with feedback it is so over steps."""
        return self.feedback == "none"

    @property
    def codec(self) -> Codec:
        return StochasticCodec(self.bits, self.bucket, self.norm)
