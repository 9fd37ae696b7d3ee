"""ACP-SGD: low-rank gradients of which each step sends one factor, P in even steps and Q in odd ones.

Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning", ICDCS 2023
(arXiv 2306.08881), Alg. 1.

As in PowerSGD, a gradient is viewed as a matrix M with one row per output (filter), and approximated by a matrix of
rank r. One factor comes from the previous step and is made orthonormal; the other factor is computed and summed:

    step 0, 2, …:  Q̂ = orthonormalise(Q),  P = mean(M·Q̂),   M̂ = P·Q̂ᵀ
    step 1, 3, …:  P̂ = orthonormalise(P),  Q = mean(Mᵀ·P̂),  M̂ = P̂·Qᵀ
    residual = x − this rank's share of M̂

Two steps together are one step of PowerSGD's power iteration. Each step sends half of PowerSGD's bytes, by one
all-reduce instead of two. The first Q is random, equal on all ranks.

What is sent: P [rows × r] or Q [columns × r], by one all-reduce. Vectors, and matrices that the factorization does not
make smaller, are sent uncompressed.

Bytes: 4·r·rows in one step, 4·r·columns in the next; half of it for values fp16, by scatter-reduce for the others.

State: P [rows × r] and Q [columns × r], equal on all ranks.

When it loses: the approximation follows a changing gradient half as fast as PowerSGD's of the same rank, since one step
updates one factor only.

Departures from the paper: none in the equations. P and Q are sent multiplied by a power of two, so that no sum
overflows unless the gradients do, and a zero column is replaced by a random one (see ``powersgd.py``).

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("acpsgd", world_size=2, matrix_rank=1)
>>> g = np.outer(np.arange(32), np.arange(64)).astype(np.float32)
>>> out = [net.allreduce([g, 3 * g], name="w")[0] for _ in range(2)]
>>> net.ledger.bytes_sent(rank=0)     # 4·32 bytes, then 4·64, for 8192 each
384
"""

from __future__ import annotations

from typing import Any

from hvdcompress.method import (
    Array,
    Communication,
    Context,
    Count,
    Reduced,
    Slot,
    Sparse,
    TensorSpec,
    Workspace,
    method,
)
from hvdcompress.methods.powersgd import PowerSGD
from hvdcompress.ops.scan import NOTHING, Found, Product, Scan
from hvdcompress.ops.vectors import FP32_MAX, Outer
from hvdcompress.parts import codecs, matrices, seed


@method
class ACPSGD(PowerSGD):
    """Approximates gradients by matrices of rank r, and sums one of their two factors per step."""

    paper = "Zhang et al., ICDCS 2023 (arXiv 2306.08881)"
    sends = "r·rows values in even steps, r·columns values in odd steps, summed"
    phases = ("rows", "columns")

    matrix_rank: Count = 4
    """Rank r of the approximation."""

    def phase_of(self, age: int) -> int:
        return age % 2

    def state(self, spec: TensorSpec) -> dict[str, Slot]:
        return {
            name: Slot((self.matrix_rank, extent), scope="shared", merge="keep")
            for name, extent in zip("pq", self.matrix(spec), strict=True)
        }

    def num_bytes(
        self, spec: TensorSpec, world_size: int, phase: int = 0, state: dict[str, Array] | None = None
    ) -> int:
        return codecs.reduced_num_bytes(self.matrix_rank * self.matrix(spec)[phase], self.values, world_size)

    def scan(self, index: int, state: dict[str, Array], ctx: Context, work: Workspace, like: Array) -> Scan:
        if ctx.phase == 1:
            return NOTHING
        # This rank's share of a row of M̂ is known as soon as the row has been read, so the same pass can subtract it
        # and leave the residual. Values that are rounded before they are sent (fp16, …) are not known that early.
        remove = self.shrinkage(ctx) ** -2 if ctx.needs_own and self.values == "fp32" else 0.0
        work.scratch["basis"] = basis = self.basis(state, ctx, work)
        return Scan(product=Product(basis, self.matrix_rank, remove))

    def shrinkage(self, ctx: Context) -> float:
        """Return the power of two that keeps the sum of this step's factor finite."""
        return matrices.shrinkage(self.matrix(ctx.spec)[1 - ctx.phase], ctx.world_size)

    def basis(self, state: dict[str, Array], ctx: Context, work: Workspace) -> Array:
        """Return the previous step's factor, Q̂ᵀ or P̂ᵀ, orthonormal, times :meth:`shrinkage`."""
        previous = state["pq"[1 - ctx.phase]]
        return work.ops.orthonormalise(previous, self.matrix_rank, seed.shared_key(ctx)) * self.shrinkage(ctx)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        ops = work.ops
        r = self.matrix_rank
        rows, columns = self.matrix(ctx.spec)
        shrinkage = self.shrinkage(ctx)
        found = work.scanned[0] if work.scanned else Found(True)
        basis = self.basis(state, ctx, work) if found.product is None else work.scratch["basis"]
        if found.product is not None:  # the pass that added gradient and residual computed Pᵀ = Q̂ᵀ·Mᵀ
            factor = found.product
        elif ctx.phase == 0:
            factor = ops.matmul_transposed(basis, x, r, rows)  # Pᵀ = Q̂ᵀ·Mᵀ
        else:
            factor = ops.matmul(basis, x, r, columns)  # Qᵀ = P̂ᵀ·M
        total, own = yield from matrices.all_reduce(factor, shrinkage, self.values, ctx, work)

        basis = basis * (1.0 / shrinkage)

        def approximation(factor: Array) -> Outer:
            # |basis| ≤ 1, so with the factor clipped to this limit no sum of r products exceeds float32
            factor = ops.scaled(factor, 1.0 / shrinkage, FP32_MAX / (r + 1))
            if ctx.phase == 1:
                return Outer(basis, factor, r, basis="left")
            return Outer(factor, basis, r, basis="right")

        if found.removed:
            # the pass also subtracted the share from x, so nothing is left to subtract
            share: Any = Sparse(ops.zeros(0, "int32", x), ops.zeros(0, "float32", x))
        else:
            share = None if own is None else approximation(own)
        return Reduced(total=approximation(total), own=share, state={"pq"[ctx.phase]: total})
