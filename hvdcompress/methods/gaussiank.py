"""Gaussian-k: approximate top-k, by a threshold from a Gaussian fit to x.

Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning", 2019 (arXiv 1911.08772), Alg. 1.

The distribution of x = gradient + residual is bell-shaped. The k-th largest |x| can therefore be estimated from the
mean μ and the standard deviation σ, in a few passes over memory instead of a selection:

    k = min(n, max(1, ⌊n·density⌋)),   t = |μ| + z·σ,   z = Φ⁻¹(1 − density/2)
    c = #{|x| > t};   refine t until 2k/3 ≤ c ≤ 4k/3;   send the c elements with |x| > t

What is sent: ⌊4k/3⌋ (index, value) pairs per rank, by an all-gather. Unused slots repeat the last index with the
value 0: payloads of constant length keep Horovod's response cache valid. Elements beyond ⌊4k/3⌋ stay in the residual.
The ledger counts the selected elements as "kept".

Bytes: 24 (header) + Elias-Fano indices + 4·⌊4k/3⌋ (or 2·⌊4k/3⌋), sections rounded up to 4.

When it loses: the payload has ⌊4k/3⌋ slots, used or not, so it is a third larger than that of ``topk``. The received
bytes grow with p. If x is not bell-shaped, refining t takes more passes.

``refine: bisect`` (default) starts from t and bisects its bit pattern, in at most 31 steps, until c is in the
interval. If equal magnitudes make that impossible, elements of that magnitude with the lowest indices fill the payload
up to k. Fewer than 2k/3 elements are sent only if fewer are non-zero.

``refine: paper`` counts c at most 3 times, as the authors' code (github.com/hclhkbu/GaussianK-SGD) does: t is halved
if c < 2k/3 and multiplied by 1.5 if c > 4k/3. The authors' code sends the mask of the third count, which it makes
before it changes t a third time, so t changes at most twice. On data with heavy tails c can remain far from k (on
Laplace data of density 0.001 it is 9.5·k at the first count).

``scope: global`` selects from one buffer of all tensors, as the authors' code does.

Departures from the authors' code: its t is μ + z·σ, which it compares with |x| too, and which selects more elements for
μ < 0 than for μ > 0. Bisection. The fixed capacity of ⌊4k/3⌋, where the authors' code sends all elements above t. A
tensor of one element is sent; in the authors' code its standard deviation is undefined, and it is never sent.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("gaussiank", world_size=2, density=0.01)
>>> rng = np.random.default_rng(0)
>>> _ = net.allreduce([rng.normal(size=100_000).astype(np.float32) for _ in range(2)], name="w")
>>> net.ledger.counters(rank=0), net.ledger.bytes_sent(rank=0)     # k = 1000, capacity 1333
({'kept': 1019}, 6720)
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np

from hvdcompress.method import Array, Context, Density, Granularity, Sparse, TensorSpec, Workspace, method
from hvdcompress.ops.scan import Scan
from hvdcompress.parts import candidates, codecs, pack, select
from hvdcompress.parts.select import SparseMethod


@method
class GaussianK(SparseMethod):
    """Each rank sends about k elements, those above a threshold from a Gaussian fit."""

    paper = "Shi et al. 2019 (arXiv 1911.08772)"
    sends = "4k/3 values + indices of about 2 + log2(n/k) bits, gathered: received bytes grow with p"

    density: Density = 0.01
    """Target fraction of the elements that each rank sends, k / n."""
    refine: Literal["bisect", "paper"] = "bisect"
    """How the threshold is refined. "bisect": until 2k/3 to 4k/3 elements exceed it. "paper": at most twice, as in
    the authors' code."""
    scope: Literal["tensor", "global"] = "tensor"
    """Where k elements are selected. "tensor": in each tensor. "global": in one buffer of all this method's tensors."""

    @property
    def granularity(self) -> Granularity:  # type: ignore[override]
        return "part" if self.scope == "tensor" and self.values in codecs.ELEMENTWISE else "tensor"

    def parts(self, spec: TensorSpec) -> tuple[int, ...]:
        """Return the sizes of the parts that are selected from separately: each tensor, or the whole bucket."""
        return spec.parts if self.scope == "tensor" else (spec.size,)

    def capacity(self, spec: TensorSpec) -> int:
        """Return the number of (index, value) pairs in a payload: ⌊4k/3⌋ for each part."""
        return sum(select.capacity(self.density, size) for size in self.parts(spec))

    def packing(self, spec: TensorSpec) -> pack.Packing:
        """Return the payload format of the bucket."""
        return pack.Packing(self.id, self.values, spec.size, distinct=False)

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        return pack.num_bytes(self.capacity(spec), self.packing(spec))

    def scan(self, index: int, state: dict[str, Array], ctx: Context, work: Workspace, like: Array) -> Scan:
        if self.scope == "global":
            return candidates.scan_whole(self.capacity(ctx.spec) + 1, ctx, work)
        return candidates.scan(select.capacity(self.density, ctx.spec.parts[index]) + 1, index, work)

    def encode(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Array:
        ops = work.ops
        found = []
        kept = start = 0
        for number, size in enumerate(self.parts(ctx.spec)):
            chosen = self.choose(x[start : start + size], number, ctx, work)
            index, values = select.pad(chosen, select.capacity(self.density, size), ops)
            found.append(Sparse(index + start, values))
            kept += len(chosen.index)
            start += size
        work.counters["kept"] = kept
        whole = Sparse(ops.concat([part.index for part in found]), ops.concat([part.values for part in found]))
        return pack.encode(whole, self.packing(ctx.spec), ctx, work)

    def decode(self, payload: Array, ctx: Context, work: Workspace) -> Sparse:
        return pack.decode(payload, self.capacity(ctx.spec), self.packing(ctx.spec), work.ops)

    def choose(self, x: Array, index: int, ctx: Context, work: Workspace) -> Sparse:
        """Select the elements to send from one part of the vector.

        Args:
            x: gradient + residual, float32 [n].
            index: number of the part, from 0.
            ctx: rank, world_size, step and bucket.
            work: ``work.scanned`` may contain candidates.

        Returns:
            The elements [c], their indices ascending; c ≤ ⌊4k/3⌋.
        """
        mean, std = work.ops.moments(x)
        start = np.float32(select.gaussian_threshold(mean, std, self.density))  # t
        wanted = select.gaussiank_limits(self.density, len(x))
        rule = select.refine_paper if self.refine == "paper" else select.refine_bisect
        refine = partial(rule, start=start, wanted=wanted)
        return select.above_threshold(x, wanted, refine, index, ctx, work)[0]
