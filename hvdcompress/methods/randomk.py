"""Random-k sparsification: all ranks send the values at the same k random indices.

Stich et al., "Sparsified SGD with Memory", 2018 (arXiv 1809.07599), rand_k; Konečný et al., "Federated Learning:
Strategies for Improving Communication Efficiency", 2016 (arXiv 1610.05492), random mask.

    x = g + residual
    I = k distinct indices from hash(seed, step, parameter),      k = min(n, max(1, ⌊n·density⌋))
    all-reduce x[I]
    residual = x, with x[I] set to 0

Every rank draws the same I, so no indices are sent and the cost does not depend on the number of ranks.

What is sent: k values, by one all-reduce.

Bytes: 4k (fp32), 2k (fp16), 2k + 2k/p by scatter-reduce (bf16).

When it loses: an element is sent about once in n/k steps, whether it is large or small. In the trainings of this
project, every method that selects by magnitude loses less accuracy at the same density.

Departures from the papers: error feedback is on by default, and values are then not scaled. With feedback "none",
``unbiased: true`` scales them by n/k: the result is an unbiased estimate of x with variance (n/k − 1)·‖x‖², and
magnitudes beyond 3.4e38·k/n become Inf.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("randomk", world_size=2, density=0.5, min_elements=1)
>>> out = net.allreduce([np.ones(8, np.float32), 3 * np.ones(8, np.float32)], name="w")[0]
>>> int((out == 2).sum()), int((out == 0).sum()), net.ledger.bytes_sent(rank=0)
(4, 4, 16)
"""

from __future__ import annotations

from typing import ClassVar

from hvdcompress.method import Array, Communication, Context, Reduced, Sparse, TensorSpec, Workspace, method
from hvdcompress.parts import codecs, seed, select
from hvdcompress.parts.select import SparseMethod


@method
class RandomK(SparseMethod):
    """All ranks send the values at the same k random indices."""

    paper = "Stich et al. 2018 (arXiv 1809.07599); Konečný et al. 2016 (arXiv 1610.05492)"
    sends = "k values, summed; no index"
    needs_feedback = False
    needs: ClassVar = {"unbiased": ("feedback", ("none",))}

    unbiased: bool = False
    """Whether values are scaled by n/k; only with feedback "none"."""

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        return codecs.reduced_num_bytes(select.num_kept(self.density, spec.size), self.values, world_size)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        ops = work.ops
        n = ctx.spec.size
        k = select.num_kept(self.density, n)
        index = ops.asarray(seed.distinct_indices(seed.shared_key(ctx), k, n), like=x)  # I [k] int32, ascending
        values = ops.take(x, index)  # x[I] [k] float32
        if self.unbiased and k:
            values = values * (n / k)
        total, own = yield from codecs.all_reduce(values, self.values, ctx, work)
        return Reduced(total=Sparse(index, total), own=Sparse(index, own) if ctx.needs_own else None)
