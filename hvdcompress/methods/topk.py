"""Top-k sparsification with error feedback: each rank sends its k elements of largest magnitude.

Aji & Heafield, "Sparse Communication for Distributed Gradient Descent", 2017 (arXiv 1704.05021). Error feedback:
Stich et al., "Sparsified SGD with Memory", 2018 (arXiv 1809.07599), Mem-SGD.

    x = g + residual
    I = indices of the k largest |x|,      k = min(n, max(1, ⌊n·density⌋))
    send (I, x[I])
    residual = x, with x[I] set to 0

Ranks choose different elements, so the result has between k and p·k non-zeros ("gradient build-up").

What is sent: k (index, value) pairs per rank, by an all-gather. Values with equal indices are added.

Bytes: 24 (header) + indices + k·(4 | 2 | 2 for values fp32 | fp16 | bf16), sections rounded up to 4; indices
by Elias-Fano at about 2 + log2(n/k) bits each, or as a bitmap of n bits where that is shorter.

When it loses: the received bytes grow with p. An all-gather moves fewer bytes than a dense ring all-reduce while p is
below twice the compression ratio: up to about 157 ranks at density 0.01.

Departures from the papers: indices are Elias-Fano coded. Among equal magnitudes, the lowest indices are sent, so that
all array backends send the same bytes. With ``values`` fp16 or bf16, the rounding error stays in the residual.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("topk", world_size=2, density=0.25, min_elements=1)
>>> net.allreduce([np.float32([4, 1, 0, -2]), np.float32([1, -6, 0, 2])], name="w")[0]
array([ 2., -3.,  0.,  0.], dtype=float32)
>>> net.residual("w", rank=0)
array([ 0.,  1.,  0., -2.], dtype=float32)
"""

from __future__ import annotations

from hvdcompress.method import Array, Context, Sparse, TensorSpec, Workspace, method
from hvdcompress.ops.scan import Scan
from hvdcompress.parts import candidates, pack, select
from hvdcompress.parts.select import SparseMethod


@method
class TopK(SparseMethod):
    """Each rank sends its k elements of largest magnitude."""

    paper = "Aji & Heafield 2017 (arXiv 1704.05021); feedback: Stich et al. 2018 (arXiv 1809.07599)"
    sends = "k values + k indices of about 2 + log2(n/k) bits, gathered: received bytes grow with p"
    granularity = "part"

    def counts(self, spec: TensorSpec) -> list[int]:
        """Return k for each tensor of the bucket."""
        return [select.num_kept(self.density, size) for size in spec.parts]

    def packing(self, spec: TensorSpec) -> pack.Packing:
        """Return the payload format of the bucket."""
        return pack.Packing(self.id, self.values, spec.size, counts=tuple(self.counts(spec)))

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        return pack.num_bytes(sum(self.counts(spec)), self.packing(spec))

    def scan(self, index: int, state: dict[str, Array], ctx: Context, work: Workspace, like: Array) -> Scan:
        return candidates.scan(select.num_kept(self.density, ctx.spec.parts[index]), index, work)

    def encode(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Array:
        chosen = select.largest(x, self.counts(ctx.spec), ctx, work)
        return pack.encode(chosen, self.packing(ctx.spec), ctx, work)

    def decode(self, payload: Array, ctx: Context, work: Workspace) -> Sparse:
        return pack.decode(payload, sum(self.counts(ctx.spec)), self.packing(ctx.spec), work.ops)
