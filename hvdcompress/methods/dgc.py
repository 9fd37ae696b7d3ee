"""Deep Gradient Compression (DGC): top-k of a residual that accumulates momentum instead of gradients.

Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR 2018
(arXiv 1712.01887).

    u = m·u + g                 momentum correction (§3.2): each rank applies momentum before sparsification
    v = v + u                   v accumulates everything that has not been sent
    send v where |v| > t        t: the k-th largest |v|; the paper estimates it from a sample (§5)
    v = 0, u = 0 there          momentum factor masking (§3.3): sent elements keep no stale momentum

The optimizer's own momentum would apply momentum twice, so the library cancels it (``parts/momentum.py``). DGC
therefore works with the optimizer of dense training. The feedback "momentum" (``parts/feedback.py``) owns u and v, and
other sparse methods accept this feedback too. With feedback "plain" or "none", only DGC's selection remains. Tensors
that are sent uncompressed (fewer than two dimensions, fewer than ``min_elements`` elements, or any tensor during a
plan's ``warmup``) get no momentum here and keep the optimizer's momentum.

What is sent: k = ⌊n·density⌋ (index, value) pairs per rank, by an all-gather. The ledger counts the selected elements
as "kept".

Bytes: 24 (header) + indices (Elias-Fano, or a bitmap if that is shorter) + 4·k, sections rounded up to 4. With
``select: sampled`` ⌊4k/3⌋ pairs instead of k, and no bitmap.

When it loses: as for ``topk``, the received bytes grow with p. Momentum needs a second array per tensor (u), and the
paper's m = 0.9 costs accuracy in the trainings of this project (``docs/momentum.md``).

The density falls over the first epochs (warm-up, §3.3). The plan's schedule does that::

    method: dgc
    steps_per_epoch: 391
    schedule:
      density: {epochs: {0: 0.25, 1: 0.0625, 2: 0.015625, 3: 0.004, 4: 0.001}}

``select: exact`` (default) sends the k largest elements. The paper samples because exact selection was slow. Here exact
selection is faster than sampling, because the threshold of the last step leaves few candidates, and it sends a quarter
fewer bytes.

``select: sampled`` is the paper's selection (§5; ``paper: true``). The fraction k/n of a sample exceeds the threshold
t. If t leaves fewer than 2k/3 or more than 4k/3 elements, it is bisected as in ``gaussiank``. If t leaves far too many,
the search continues among those elements only; this is the paper's hierarchical selection.

``local_clip_norm`` scales each rank's gradient down to the norm local_clip_norm/√p before it is added to u (local
gradient clipping, §3.2). The feedback implements it (``parts/feedback.py``), so other methods have the option too.

Departures from the paper. ``paper: true`` removes these three: the selection is exact; the density is 0.01 instead of
0.001; m is 0.7 instead of the optimizer's 0.9. The other departures always apply: clipping uses the norm of each
tensor, as the authors' code does, instead of the norm of the whole model. A threshold that selects too few elements is
corrected too. The sample is drawn without replacement. Tensors that are sent dense have no momentum correction.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("dgc", world_size=1, density=0.25, momentum=0.5, min_elements=1)
>>> for _ in range(3):
...     print(net.allreduce([np.float32([[4, 3], [0, 1]])], name="w")[0].ravel())
[4. 0. 0. 0.]
[0.  7.5 0.  0. ]
[10.  0.  0.  0.]
>>> net.residual("w", rank=0)                       # 3: sent in step 1, then restarted; 4.25 = 1 + 1.5 + 1.75
array([[0.  , 3.  ],
       [0.  , 4.25]], dtype=float32)
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from hvdcompress.method import (
    Array,
    Context,
    Density,
    FeedbackName,
    Fraction,
    Granularity,
    Sparse,
    TensorSpec,
    Workspace,
    method,
)
from hvdcompress.ops.scan import Scan
from hvdcompress.parts import candidates, pack, seed, select
from hvdcompress.parts.select import SparseMethod

MIN_SAMPLE = 1024  #: minimum sample size; smaller tensors are not sampled
MIN_SAMPLED_ABOVE = 16  #: minimum number of sampled elements above t: with fewer, k is often wrong by a third


@method
class DGC(SparseMethod):
    """Each rank sends the k largest elements of a residual that accumulates momentum."""

    paper = "Lin et al., ICLR 2018 (arXiv 1712.01887)"
    sends = "k values + k indices of about 2 + log2(n/k) bits, gathered: received bytes grow with p"
    published: ClassVar[dict[str, Any]] = {"select": "sampled", "density": 0.001, "momentum": 0.9}

    density: Density = 0.01
    """Target fraction of the elements that each rank sends, k / n."""
    select: Literal["exact", "sampled"] = "exact"
    """Which elements are sent. "exact": the k largest. "sampled": the 2k/3 to 4k/3 elements above a threshold that is
    estimated from a sample."""
    sample: Fraction = 0.01
    """Fraction of the elements that are sampled. Small tensors and densities use a larger fraction, so that the sample
    has at least 1024 elements, at least 16 of them above the threshold."""
    needs: ClassVar = {"sample": ("select", ("sampled",))}
    feedback: FeedbackName = "momentum"

    @property
    def granularity(self) -> Granularity:  # type: ignore[override]
        return "part" if self.select == "exact" else "tensor"

    def suits(self, spec: TensorSpec) -> bool:
        """Return True for tensors of two or more dimensions. Vectors are sent uncompressed."""
        return len(spec.shape) >= 2

    def counts(self, spec: TensorSpec) -> list[int]:
        """Return k for each tensor of the bucket."""
        return [select.num_kept(self.density, size) for size in spec.parts]

    def capacity(self, spec: TensorSpec) -> int:
        """Return the number of (index, value) pairs in a payload."""
        return sum(self.counts(spec)) if self.select == "exact" else select.capacity(self.density, spec.size)

    def packing(self, spec: TensorSpec) -> pack.Packing:
        """Return the payload format of the bucket."""
        if self.select == "sampled":
            return pack.Packing(self.id, self.values, spec.size, distinct=False)
        return pack.Packing(self.id, self.values, spec.size, counts=tuple(self.counts(spec)))

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        return pack.num_bytes(self.capacity(spec), self.packing(spec))

    def scan(self, index: int, state: dict[str, Array], ctx: Context, work: Workspace, like: Array) -> Scan:
        if self.select == "exact":
            return candidates.scan(select.num_kept(self.density, ctx.spec.parts[index]), index, work)
        return candidates.scan_whole(self.capacity(ctx.spec) + 1, ctx, work)

    def encode(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Array:
        if self.select == "exact":
            chosen = select.largest(x, self.counts(ctx.spec), ctx, work)
        else:
            wanted = select.gaussiank_limits(self.density, ctx.spec.size)
            refine = partial(select.refine_bisect, start=self.threshold(x, ctx, work), wanted=wanted)
            chosen, _ = select.above_threshold(x, wanted, refine, 0, ctx, work)
        work.counters["kept"] = len(chosen.index)
        chosen = select.pad(chosen, self.capacity(ctx.spec), work.ops)
        return pack.encode(chosen, self.packing(ctx.spec), ctx, work)

    def decode(self, payload: Array, ctx: Context, work: Workspace) -> Sparse:
        return pack.decode(payload, self.capacity(ctx.spec), self.packing(ctx.spec), work.ops)

    def sample_size(self, n: int) -> int:
        """Return m, the sample size for n elements; m ≤ n."""
        return min(n, max(MIN_SAMPLE, math.ceil(n * self.sample), math.ceil(MIN_SAMPLED_ABOVE / self.density)))

    def threshold(self, x: Array, ctx: Context, work: Workspace) -> np.float32:
        """Estimate t: the largest float32 below the (m·density)-th largest |x| of a sample of m elements of x [n]."""
        ops = work.ops
        n = len(x)
        m = self.sample_size(n)
        if m < n:
            index = seed.distinct_indices(seed.shared_key(ctx), m, n)
            x = ops.take(x, ops.asarray(index, like=x))
        return select.just_below(ops.kth_magnitude(x, select.num_kept(self.density, m)))
