"""PowerSGD: low-rank gradients by one step of a power iteration, warm-started with the last step's factor.

Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019
(arXiv 1905.13727), Alg. 1 and 2.

A gradient is a matrix M, with one row for each output (filter), of rank r or nearly. P and Q are *sums*
over ranks, so the cost does not grow with the number of workers, and nothing is gathered:

    P = mean(M·Q),  P̂ = orthonormalise(P),  Q = mean(Mᵀ·P̂),  M̂ = P̂·Qᵀ                              (Alg. 1)
    residual = x − M̂                                                                               (Alg. 2)

Q is kept for the next step: over the steps this is the power iteration, which finds the best rank-r
approximation; a gradient of rank r comes through exactly. The first Q is random, equal on all ranks.

What travels: P [rows × r], then Q [columns × r], each summed by an all-reduce. Vectors, and matrices that r
columns do not make smaller, go dense.

Bytes: 4·r·(rows + columns); half of it for values fp16, by scatter-reduce for the others.

Departures from the paper: Q is orthonormalised before it is used, which changes neither span nor M̂, but its
numbers: P and Q are sent as multiples of 2^-k, so that no sum overflows where the gradients do not. A column
of Q that is lost, as all are when a gradient is zero, is drawn again, else it would stay zero for ever. The
orthonormal basis and M̂ are the same to the bit on all ranks, whatever their processors, as no matrix library
takes part. M̂ differs from M a good deal at first: with feedback "none" training would be biased.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("powersgd", world=2, matrix_rank=1)
>>> g = np.outer(np.arange(32), np.arange(64)).astype(np.float32)
>>> out = net.allreduce([g, 3 * g], name="w")[0]
>>> net.ledger.bytes_sent(rank=0), bool(np.allclose(out, 2 * g, rtol=1e-5))     # 4·(32 + 64) bytes for 8192
(384, True)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdcompress.method import (
    Array,
    Communication,
    Context,
    Count,
    FeedbackName,
    Method,
    Reduced,
    Slot,
    TensorSpec,
    Values,
    method,
)
from hvdcompress.parts import codecs, matrices, seed

FLOAT32_MAX = 3.4028235e38


@method
class PowerSGD(Method):
    paper = "Vogels et al., NeurIPS 2019 (arXiv 1905.13727)"
    sends = "r·(rows + columns) values, summed, in two rounds"
    needs_feedback = True
    exact = False
    fixed = ("matrix_rank",)

    matrix_rank: Count = 2
    """r, the rank of the approximation."""
    values: Values = "fp32"
    """How P and Q are written: fp32, fp16, bf16, qsgd2 … qsgd8, rangefloat4 … rangefloat16."""
    feedback: FeedbackName = "plain"

    def matrix(self, spec: TensorSpec) -> tuple[int, int]:
        """Rows and columns of M: outputs × inputs; as TensorFlow lays out convolutions, inputs × outputs."""
        if spec.layout == "hwio" and len(spec.shape) == 4:
            return spec.size // max(spec.shape[-1], 1), spec.shape[-1]
        return spec.shape[0], spec.size // max(spec.shape[0], 1)

    def suits(self, spec: TensorSpec) -> bool:
        """A matrix, or more dimensions, that becomes smaller."""
        return len(spec.shape) >= 2 and self.matrix_rank * sum(self.matrix(spec)) < spec.size

    def state(self, spec: TensorSpec) -> dict[str, Slot]:
        return {"q": Slot((self.matrix_rank, self.matrix(spec)[1]), scope="shared", merge="keep")}

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
        return sum(
            codecs.reduced_num_bytes(self.matrix_rank * extent, self.values, world) for extent in self.matrix(spec)
        )

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, ops: Any) -> Communication:
        r, (rows, columns) = self.matrix_rank, self.matrix(ctx.spec)
        drawn = seed.uniform(seed.shared_key(ctx), r * columns) - np.float32(0.5)
        q = ops.orthonormalise(state["q"], r, fill=ops.asarray(drawn, like=x))  # [r × columns], of the last step

        small = matrices.shrinkage(columns, ctx.world)
        p = ops.matmul_transposed(q * small, x, r, rows)  # Pᵀ = Qᵀ·Mᵀ [r × rows]
        p, _ = yield from matrices.all_reduce(p, small, self.values, ctx, ops)
        p = ops.orthonormalise(p, r)  # the scale of P is of no account

        small = matrices.shrinkage(rows, ctx.world)
        q = ops.matmul(p * small, x, r, columns)  # Qᵀ = P̂ᵀ·M [r × columns]
        q, _ = yield from matrices.all_reduce(q, small, self.values, ctx, ops, stream=1)

        # no sum of r products exceeds float32: |P̂| ≤ 1
        total = ops.outer_sum(p, ops.scaled(q, 1.0 / small, FLOAT32_MAX / (r + 1)), r)
        own = (
            total * (1.0 / ctx.world) if ctx.needs_own else None
        )  # M̂, as the authors have it: ranks' own shares are equal
        return Reduced(total=total, own=own, state={"q": q})
