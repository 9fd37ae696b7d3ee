"""1-bit SGD: one bit per value, two mean values per tensor, and error feedback.

Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
DNNs", Interspeech 2014, §3.2. The first method with error feedback.

    x = g + residual
    a = mean of x where x ≥ 0,    b = mean of x where x < 0
    send a, b and n signs:    x ≈ a where x ≥ 0, b where x < 0
    residual = x − that

For given signs, the two means have the smallest squared error. ``signsgd`` sends one magnitude, which is the same if
a = −b. They differ where signs are unequally frequent or their values unequally large.

What is sent: two float32 and one sign per value. With ``route: gather``, all ranks receive the signs of all ranks, by
an all-gather. With ``route: scatter``, as in the paper, each rank sums one shard, encodes the sum and sends it to all
ranks; it adds the error of this second encoding to its residual.

Bytes: m(c) = 8 + ⌈c/8⌉ for c values; gather: 24 (header) + m(n); scatter: (p + 1)·m(⌈n/p⌉).

When it loses: with symmetric data it is ``signsgd``: on Gaussian data both have the error ‖x̂ − x‖/‖x‖ = 0.602. In
trainings of 400 steps on Fashion-MNIST (docs/papers/peers.md, P5) it lost no accuracy with momentum adapted, which is
the default, and 3 to 69 points with momentum kept. With
``route: gather`` the received bytes grow with p, and from 64 ranks on they exceed those of a dense ring all-reduce.
Where all gradients are zero, as in the rows of an embedding's padding, elements are updated all the same; exclude such
a tensor by a rule (``{match: {name: …}, method: none}``).

Departures from the paper: two means per tensor (with ``route: scatter``, per shard), not per column of a weight matrix.
The means are sums in float64, divided in float32. The paper's AdaGrad step is not included.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("onebit", world_size=1, min_elements=1)
>>> net.allreduce([np.float32([4, -1, 0, 2])], name="w")[0]
array([ 2., -1.,  2.,  2.], dtype=float32)
>>> net.residual("w", rank=0)
array([ 2.,  0., -2.,  0.], dtype=float32)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdcompress.method import Array, Context, FeedbackName, Workspace, method
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import signs_of
from hvdcompress.parts.sums import Codec, Quantizer, concatenate_into
from hvdcompress.parts.wire import WireError

MEANS = 8  #: bytes of a and −b


@dataclass(frozen=True)
class TwoMeansCodec:
    """Codec that writes the mean a of the values ≥ 0, the mean −b of the others' magnitudes, then one bit per value."""

    code = 14

    def num_bytes(self, count: int) -> int:
        return (MEANS if count else 0) + -(-count // 8)

    def encode(self, x: Array, ctx: Context, work: Workspace, stream: int = 0, out: Array | None = None) -> Array:
        ops = work.ops
        n = len(x)
        signs = ops.pack_signs(x)
        if not n:
            return signs
        positive = 0.5 * ops.dense(signs_of(signs, _one(x, ops), n)) + 0.5  # 1 where x ≥ 0, else 0
        means = []
        for chosen in (positive, 1.0 - positive):
            share = ops.bucket_norms(chosen, n, "mean")  # [1]: of the values that are chosen
            mean = ops.bucket_norms(x * chosen, n, "mean")
            means.append(mean / (share + 1e-30))  # without such values 0, and share is 0 or at least 1/n
        return concatenate_into([*map(ops.to_bytes, means), signs], out, ops)

    def coded(self, buffer: Array, count: int, ops: Ops) -> Array:
        return self.decode(buffer, count, ops)

    def decode(self, buffer: Array, count: int, ops: Ops) -> Array:
        if len(buffer) != self.num_bytes(count):
            raise WireError(f"received {len(buffer)} bytes of signs, expected {self.num_bytes(count)}")
        if not count:
            return ops.zeros(0, "float32", like=buffer)
        plus = ops.zeros(1, "uint8", like=buffer)
        # damaged means are read as finite numbers ≥ 0
        a, b = (ops.dense(signs_of(plus, ops.from_bytes(buffer[at : at + 4], "float32"), 1)) for at in (0, 4))
        return ops.dense(signs_of(buffer[MEANS:], 0.5 * a + 0.5 * b, count)) + (0.5 * a - 0.5 * b)


def _one(like: Array, ops: Ops) -> Array:
    return ops.asarray(np.float32([1]), like)  # type: ignore[arg-type]


@method
class OneBit(Quantizer):
    """Sends the sign of each value and the means of both signs, with error feedback."""

    paper = "Seide et al., Interspeech 2014"
    sends = "one bit per value + two means; gathered, or scattered: constant in p"
    needs_feedback = True
    delay = 10

    feedback: FeedbackName = "plain"

    @property
    def codec(self) -> Codec:
        return TwoMeansCodec()
