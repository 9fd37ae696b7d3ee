"""EF-signSGD: one bit per value, one mean magnitude per tensor, and error feedback.

Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019
(arXiv 1901.09847), Alg. 1. One bit per value with error feedback goes back to Seide et al., Interspeech 2014.

    x = g + residual
    Δ = ‖x‖₁/n · sign(x)
    send Δ: the mean magnitude and n signs
    residual = x − Δ

Signs alone are biased, and signSGD may fail to converge. With the residual it converges at the rate of SGD.

What is sent: the mean magnitude ‖x‖₁/n of the tensor (a float64 sum, rounded to float32) and one sign per value. With
``route: gather``, all ranks receive the signs of all ranks, by an all-gather. With ``route: scatter``, each rank sums
one shard and sends the signs and the mean magnitude of the sum to all ranks. The rank that summed the shard adds the
error of this second rounding to its residual.

Bytes: m(c) = 4 + ⌈c/8⌉ for c values; gather: 24 (header) + m(n); scatter: (p + 1)·m(⌈n/p⌉).

When it loses: with ``route: gather`` the received bytes grow with p, and from 64 ranks on they exceed those of a dense
ring all-reduce. Elements whose gradient is always zero, such as the rows of an embedding's padding, are updated all the
same, alternately up and down, because each element is sent as a sign. Exclude such a tensor by a rule
(``{match: {name: …}, method: none}``).

Its relatives: BytePS's onebit is this method with ``route: scatter``. signSGD (Bernstein et al. 2018, arXiv 1802.04434)
is ``feedback: none``, with the mean of the ranks' ±Δ in place of their majority vote. Signum sends the signs of each
rank's momentum; here the optimizer applies momentum after the sum. ``onebit`` has a magnitude for each sign.

Departures from the paper: zeros are sent as +, and the residual corrects it. There is one scale per tensor, not one for
the whole model; with ``route: scatter``, one per shard.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("signsgd", world_size=2, min_elements=1)
>>> net.allreduce([np.float32([4, -1, 0, 3]), np.float32([-1, -6, 0, 1])], name="w")[0]
array([ 0., -2.,  2.,  2.], dtype=float32)
>>> net.residual("w", rank=0)
array([ 2.,  1., -2.,  1.], dtype=float32)
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdcompress.method import Array, Context, FeedbackName, Workspace, method
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Codes, signs_of
from hvdcompress.parts.sums import Codec, Quantizer


@dataclass(frozen=True)
class SignCodec(Codec):
    """Codec that writes a mean magnitude (one float32), then one sign bit per value."""

    code = 5
    bits = 1

    def head_bytes(self, count: int) -> int:
        return 4 if count else 0

    def write(self, x: Array, head: Array, body: Array, ctx: Context, work: Workspace, stream: int) -> None:
        ops = work.ops
        head[:] = ops.to_bytes(ops.bucket_norms(x, len(x), "mean"))  # ‖x‖₁/n [1]; [0] if x is empty
        body[:] = ops.pack_signs(x)

    def read(self, head: Array, body: Array, count: int, ops: Ops) -> Codes:
        return signs_of(body, ops.from_bytes(head, "float32"), count)


@method
class SignSGD(Quantizer):
    """Sends the sign of each value and one mean magnitude, with error feedback."""

    paper = "Karimireddy et al., ICML 2019 (arXiv 1901.09847)"
    sends = "one bit per value + one magnitude; gathered, or scattered: constant in p"
    needs_feedback = True
    delay = 10

    feedback: FeedbackName = "plain"

    @property
    def codec(self) -> Codec:
        return SignCodec()
