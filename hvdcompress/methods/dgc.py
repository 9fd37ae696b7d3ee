"""Deep Gradient Compression (DGC): top-k of a residual that accumulates momentum, not gradients.

Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR 2018
(arXiv 1712.01887).

    u = m·u + g                 momentum correction (§3.2): momentum on each rank, before sparsification
    v = v + u                   what has not been sent
    send v where |v| > t        t: the k-th largest |v|; in the paper estimated from a sample (§5)
    v = 0, u = 0 there          momentum factor masking (§3.3): no stale momentum where v was sent

The optimizer's own momentum on top would apply momentum twice, so it is cancelled (``parts/momentum.py``): DGC works
with the optimizer that dense training has. u and v belong to the feedback "momentum" (``parts/feedback.py``), which
other sparse methods accept too. With feedback "plain" or "none", only DGC's selection remains. Tensors that are sent
uncompressed (fewer than two dimensions, fewer than ``min_elements`` elements, or any tensor during a plan's ``warmup``)
get no momentum here, and keep the optimizer's.

What is sent: k = ⌊n·density⌋ (index, value) pairs per rank, by an all-gather. The ledger counts the elements chosen as
"kept".

Bytes: 24 (header) + indices (Elias-Fano, or a bitmap if that is shorter) + 4·k, sections rounded up to 4. With
``select: sampled`` ⌊4k/3⌋ pairs instead of k, and no bitmap.

The density falls over the first epochs (warm-up, §3.3). That is a schedule of the plan::

    method: dgc
    steps_per_epoch: 391
    schedule:
      density: {epochs: {0: 0.25, 1: 0.0625, 2: 0.015625, 3: 0.004, 4: 0.001}}

``select: exact``, the default: the k largest. The paper samples because to select from all elements was slow. Here the
exact choice is the faster one, as the last step's threshold leaves few elements to choose from, and a quarter fewer
bytes are sent.

``select: sampled``, the paper's (§5; ``paper: true``): the threshold t is exceeded by the share k/n of a sample. If it
leaves fewer than 2k/3 or more than 4k/3 entries, t is bisected as in ``gaussiank``. If it leaves far too many, the
search continues among those entries only, which is the paper's hierarchical selection.

``local_clip_norm``: each rank's gradient is scaled down to the norm local_clip_norm/√p before it is added to u (local
gradient clipping, §3.2). It is the feedback's (``parts/feedback.py``), and other methods have it too.

Departures from the paper. ``paper: true`` undoes these: the selection is exact, the density is 0.01, not 0.001, and m
is 0.7, not that of the optimizer, 0.9, with which trainings of this project lose more (``docs/momentum.md``). The
others: clipping uses the norm of each tensor, as the authors' code does, not of the whole model. A threshold that
selects too few entries is corrected too. The sample is drawn without replacement. Tensors that are sent dense have no
momentum.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("dgc", world=1, density=0.25, momentum=0.5, min_elements=1)
>>> for _ in range(3):
...     print(net.allreduce([np.float32([[4, 3], [0, 1]])], name="w")[0].ravel())
[4. 0. 0. 0.]
[0.  7.5 0.  0. ]
[10.  0.  0.  0.]
>>> net.residual("w", rank=0)                       # 3 was sent and started again; 1 + 1.5 + 1.75
array([[0.  , 3.  ],
       [0.  , 4.25]], dtype=float32)
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import numpy as np

from hvdcompress.method import (
    Array,
    Context,
    Density,
    FeedbackName,
    Fraction,
    Granularity,
    Method,
    Sparse,
    TensorSpec,
    Values,
    Workspace,
    method,
)
from hvdcompress.ops.scan import Scan
from hvdcompress.parts import candidates, codecs, pack, seed, select

LEAST_SAMPLE = 1024  #: sampled elements, at least; smaller tensors are used as a whole
LEAST_ABOVE = 16  #: sampled elements above the threshold, at least: with fewer, k would often be wrong by a third


@method
class DGC(Method):
    """Top-k of the residual with momentum correction."""

    paper = "Lin et al., ICLR 2018 (arXiv 1712.01887)"
    sends = "k values + k indices of about 2 + log2(n/k) bits, gathered: received bytes grow with p"
    sparse = True
    needs_feedback = True
    published: ClassVar[dict[str, Any]] = {"select": "sampled", "density": 0.001, "momentum": 0.9}

    density: Density = 0.01
    """Target fraction of the elements that each rank sends, k / n."""
    select: Literal["exact", "sampled"] = "exact"
    """What is sent. "exact": the k largest. "sampled": the 2k/3 to 4k/3 elements above a threshold from a sample."""
    sample: Fraction = 0.01
    """Fraction of the elements in the sample. It is raised for small tensors and densities, so that the sample has at
    least 1024 elements, 16 of them above the threshold."""
    values: Values = "fp32"
    """Number format of the values: fp32, fp16, bf16, qsgd2 … qsgd8, rangefloat4 … rangefloat16."""
    feedback: FeedbackName = "momentum"

    @property
    def granularity(self) -> Granularity:  # type: ignore[override]
        return "part" if self.select == "exact" and self.values in codecs.ELEMENTWISE else "tensor"

    def suits(self, spec: TensorSpec) -> bool:
        """Return True for two or more dimensions (matrices, convolutions). Vectors are sent uncompressed."""
        return len(spec.shape) >= 2

    def counts(self, spec: TensorSpec) -> list[int]:
        """Return k of each tensor that the vector consists of."""
        return [select.num_kept(self.density, size) for size in spec.parts]

    def capacity(self, spec: TensorSpec) -> int:
        """Return the number of entries of a payload."""
        return sum(self.counts(spec)) if self.select == "exact" else select.capacity(self.density, spec.size)

    def packing(self, spec: TensorSpec) -> pack.Packing:
        """Return how payloads are written."""
        return pack.Packing(self.id, self.values, spec.size, distinct=self.select == "exact")

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
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
            search = select.Search(self.threshold(x, ctx, work), wanted, select.refine_bisect)
            chosen, _ = select.above_threshold(x, search, 0, ctx, work)
        work.counters["kept"] = len(chosen.index)
        chosen = select.pad(chosen, self.capacity(ctx.spec), work.ops)
        return pack.encode(chosen, self.packing(ctx.spec), ctx, work)

    def decode(self, payload: Array, ctx: Context, work: Workspace) -> Sparse:
        return pack.decode(payload, self.capacity(ctx.spec), self.packing(ctx.spec), work.ops)

    def sample_size(self, n: int) -> int:
        """Return the number of sampled elements, m ≤ n."""
        return min(n, max(LEAST_SAMPLE, math.ceil(n * self.sample), math.ceil(LEAST_ABOVE / self.density)))

    def threshold(self, x: Array, ctx: Context, work: Workspace) -> np.float32:
        """Return the largest float32 below the (m·density)-th largest |x| of a sample of m elements of x [n]."""
        ops = work.ops
        n, m = len(x), self.sample_size(len(x))
        if m < n:
            sampled = seed.distinct_indices(seed.shared_key(ctx), m, n)
            x = ops.take(x, ops.asarray(sampled, like=x))
        return select.just_below(ops.kth_magnitude(x, select.num_kept(self.density, m)))
