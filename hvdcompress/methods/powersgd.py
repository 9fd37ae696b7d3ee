"""PowerSGD: low-rank gradients, by one step of power iteration that starts from the previous step's factor.

Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019
(arXiv 1905.13727), Alg. 1 and 2.

A gradient is viewed as a matrix M with one row per output (filter), and approximated by a matrix of rank r:

    P = mean(M·Q),  P̂ = orthonormalise(P),  Q = mean(Mᵀ·P̂),  M̂ = P̂·Qᵀ                              (Alg. 1)
    residual = x − M̂                                                                               (Alg. 2)

P and Q are *sums* over ranks, so nothing is gathered and the cost does not grow with the number of ranks. Q is kept
for the next step: over many steps this is the power iteration, which converges to the best rank-r approximation. A
gradient of rank r is transmitted exactly. The first Q is random, equal on all ranks.

What is sent: P [rows × r], then Q [columns × r], each by one all-reduce. Vectors, and matrices that the factorization
does not make smaller, are sent uncompressed.

Bytes: 4·r·(rows + columns); half of it for values fp16, by scatter-reduce for the others.

State: Q [columns × r], equal on all ranks.

When it loses: two all-reduces in sequence, where the second needs the result of the first. M̂ is the same on all ranks,
so a rank's residual also contains the difference between its gradients and the mean of all ranks. In the sum over ranks
these differences cancel. But if the gradients of the ranks differ permanently, every residual grows in each step.

Departures from the paper: Q is orthonormalised before use. This changes neither its span nor M̂, but it bounds P. P and
Q are sent multiplied by a power of two, 2^-k, so that no sum overflows unless the gradients do. A zero column of Q is
replaced by a random one, because it would stay zero otherwise; a zero gradient makes all columns zero. The
orthonormal basis and M̂ are equal to the bit on all ranks, even with different processors, because no matrix library
computes them.

Feedback "none" is possible, but M̂ differs much from M in the first steps, and training would be biased.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("powersgd", world_size=2, matrix_rank=1)
>>> g = np.outer(np.arange(32), np.arange(64)).astype(np.float32)
>>> out = net.allreduce([g, 3 * g], name="w")[0]
>>> net.ledger.bytes_sent(rank=0), bool(np.allclose(out, 2 * g, rtol=1e-5))     # 4·(32 + 64) bytes for 8192
(384, True)
"""

from __future__ import annotations

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
    Workspace,
    method,
)
from hvdcompress.ops.scan import Product, Scan
from hvdcompress.ops.vectors import FP32_MAX, Outer
from hvdcompress.parts import codecs, matrices, seed


@method
class PowerSGD(Method):
    """Approximates gradients by matrices of rank r and sums their factors over ranks."""

    paper = "Vogels et al., NeurIPS 2019 (arXiv 1905.13727)"
    sends = "r·(rows + columns) values, summed, in two rounds"
    needs_feedback = True
    exact = False
    delay = 10
    unschedulable = ("matrix_rank",)

    matrix_rank: Count = 2
    """Rank r of the approximation."""
    values: Values = "fp32"
    """Number format of P and Q."""
    feedback: FeedbackName = "plain"

    def matrix(self, spec: TensorSpec) -> tuple[int, int]:
        """Return (rows, columns) of M: outputs × inputs; inputs × outputs for convolutions in TensorFlow's layout."""
        if spec.layout == "hwio" and len(spec.shape) == 4:
            return spec.size // max(spec.shape[-1], 1), spec.shape[-1]
        return spec.shape[0], spec.size // max(spec.shape[0], 1)

    def suits(self, spec: TensorSpec) -> bool:
        """Return True for tensors of two or more dimensions that r·(rows + columns) values are smaller than."""
        return len(spec.shape) >= 2 and self.matrix_rank * sum(self.matrix(spec)) < spec.size

    def state(self, spec: TensorSpec) -> dict[str, Slot]:
        return {"q": Slot((self.matrix_rank, self.matrix(spec)[1]), scope="shared", merge="keep")}

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        return sum(
            codecs.reduced_num_bytes(self.matrix_rank * extent, self.values, world_size) for extent in self.matrix(spec)
        )

    def scan(self, index: int, state: dict[str, Array], ctx: Context, work: Workspace, like: Array) -> Scan:
        return Scan(product=Product(self.basis(state, ctx, work), self.matrix_rank))

    def basis(self, state: dict[str, Array], ctx: Context, work: Workspace) -> Array:
        """Return the previous step's Qᵀ [r × columns], orthonormal, times the power of two that keeps P finite."""
        q = work.ops.orthonormalise(state["q"], self.matrix_rank, seed.shared_key(ctx))
        return q * matrices.shrinkage(self.matrix(ctx.spec)[1], ctx.world_size)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        ops = work.ops
        r = self.matrix_rank
        rows, columns = self.matrix(ctx.spec)
        # Pᵀ = Qᵀ·Mᵀ [r × rows]; the pass that added gradient and residual may have computed it
        p = work.scanned[0].product if work.scanned else None
        if p is None:
            p = ops.matmul_transposed(self.basis(state, ctx, work), x, r, rows)
        p, _ = yield from matrices.all_reduce(p, matrices.shrinkage(columns, ctx.world_size), self.values, ctx, work)
        p = ops.orthonormalise(p, r)  # P̂ᵀ: the power of two in P does not matter

        shrinkage = matrices.shrinkage(rows, ctx.world_size)
        q = ops.matmul(p * shrinkage, x, r, columns)  # Qᵀ = P̂ᵀ·M [r × columns]
        q, _ = yield from matrices.all_reduce(q, shrinkage, self.values, ctx, work, stream=1)

        # |P̂| ≤ 1, so with Q clipped to this limit no sum of r products exceeds float32
        total = Outer(p, ops.scaled(q, 1.0 / shrinkage, FP32_MAX / (r + 1)), r)
        # Every rank subtracts the same M̂ from x, as in the authors' code, so all shares are equal
        return Reduced(total=total, own=total._replace(scale=1.0 / ctx.world_size), state={"q": q})
