"""ARC-Top-K: all ranks select the same rows of the gradient, from a sketch of the rows that an all-reduce sums.

Chen et al., "An All-Reduce Compatible Top-K Compressor for Communication-Efficient Distributed Learning", 2025
(arXiv 2510.26709).

A gradient is viewed as a matrix X_i of rows of m elements on rank i. V [m × r] is random, new in each step, and equal
on all ranks, because it comes from a shared seed. The sketch of the sum estimates the norm of each of its rows:

    P = Σ_i X_i·V                    all-reduce of r numbers per row;  E ‖P_j‖² ~ ‖Σ_i X_i[j]‖²
    J = the K rows with the largest ‖P_j‖
    all-reduce X_i[J]
    residual_i = X_i, with the rows J set to 0

All ranks have the same P and select the same rows, so no index is sent. The rows are those of the *sum*: unlike in
ScaleCom, no rank's own gradient has to resemble the others'.

What is sent: r values per row, then the K selected rows, each by one all-reduce. The n mod m elements after the last
whole row are always sent.

Bytes: 4·r·⌊n/m⌋ + 4·(K·m + n mod m), K = max(1, ⌊⌊n/m⌋·density⌋), for any number of ranks. Of the second term, half
for values fp16, by scatter-reduce for the others.

When it loses: it sends all elements of a row, large or small, so for the same bytes it captures less of the gradient
than topk, gtopk and oktopk, unless large elements share rows. Only very short rows capture more, and their sketch is
long. Two all-reduces in sequence. At a density of 1 %, 5 of 12 trainings of docs/papers/peers.md (P9) diverge.

Measured on 20 steps of a small convolutional net that learns digits, 16 ranks with batches of 8, density 1 %: the sum
of the results is off by 75 % of the dense sum, with 9.7 kB per step and rank; scalecom 70 % with 7.5 kB, oktopk 62 %
with 9.6 kB, gtopk 63 % with 13.9 kB, randomk 92 % with 6.1 kB. topk: 50 %, but a rank then receives 98 kB. With rows
of 8 instead of 128 it is 71 %, with 68 kB.

Departures from the paper: it uses momentum error feedback (EF21M), and its code (github.com/Aris-ma/ARC-TopK-release)
a density of 0.2 with r = 4; the code has plain error feedback, too, which is used here. There, a row has
all weights of one output, or 2·t² weights of a convolution with t × t windows; a small matrix has too few such rows to
select 1 % of them, so that here every tensor is cut into rows of ``row`` elements. V consists of random signs
instead of normal numbers: an element that dominates its row is then estimated without error. We know the paper by its
abstract and this code only, in a copy (github.com/yiran529/ARC-TopK); the equations are those of the code.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("arctopk", world_size=2, density=0.5, row=2, min_elements=1)
>>> net.allreduce([np.float32([4, 1, 0, -2]), np.float32([-4, -1, 0, -2])], name="w")[0]
array([ 0.,  0.,  0., -2.], dtype=float32)
>>> net.ledger.bytes_sent(rank=0)     # 2 numbers of the sketch, 2 values
16
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from hvdcompress.method import (
    AllReduce,
    Array,
    Communication,
    Context,
    Density,
    Number,
    Reduced,
    Sparse,
    TensorSpec,
    Values,
    Workspace,
    method,
)
from hvdcompress.parts import codecs, rotation, select
from hvdcompress.parts.select import SparseMethod


@method
class ARCTopK(SparseMethod):
    """Sums a random sketch of rows over ranks, then the rows that are largest by it."""

    paper = "Chen et al. 2025 (arXiv 2510.26709)"
    sends = "a sketch of n/row numbers, then k values, both summed; no index"
    exact = False
    examples = ({"row": 8, "sketch": 2},)

    density: Density = 0.01
    """Fraction of the rows that are sent, K·m / n."""
    row: Annotated[int, Number, Field(ge=1, le=2**20)] = 128
    """Elements of a row, m."""
    sketch: Annotated[int, Number, Field(ge=1, le=2**10)] = 1
    """Numbers of the sketch per row, r."""
    values: Values = "fp32"
    """Number format of the rows' values; the sketch is float32."""

    def num_values(self, n: int) -> int:
        """Return the number of values that are sent besides the sketch."""
        return self.row * select.num_kept(self.density, n // self.row) + n % self.row

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        count = self.num_values(spec.size)
        sketch = 4 * self.sketch * (spec.size // self.row)
        return sketch + codecs.reduced_num_bytes(count, self.values, world_size)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        ops = work.ops
        n, m, r = ctx.spec.size, self.row, self.sketch
        rows = n // m
        sketch = ops.zeros(0, "float32", like=x)
        if rows:
            # With elements of this size, no number of the summed sketch exceeds max|x|
            signs = rotation.signs(r * m, ctx, x, ops) * np.float32(-1.0 / (m * ctx.world_size))  # Vᵀ [r × m]
            sketch = ops.matmul_transposed(x[: rows * m], signs, rows, r)  # X·V [rows × r]
        sketch = yield AllReduce(sketch)

        chosen = ops.top_k(ops.bucket_norms(sketch, r, "l2"), select.num_kept(self.density, rows))  # J [K]
        index = select.elements_of_rows(chosen, m, n, x, ops)
        total, own = yield from codecs.all_reduce(ops.take(x, index), self.values, ctx, work)
        return Reduced(total=Sparse(index, total), own=Sparse(index, own) if ctx.needs_own else None)
