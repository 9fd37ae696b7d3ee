"""Deep Gradient Compression (DGC): top-k of a residual that went through momentum.

Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR 2018
(arXiv 1712.01887).

    u = m·u + g                 momentum correction (§3.2): momentum on this rank, before anything is left out
    v = v + u                   what has not been sent
    send v where |v| > t        t: about the k-th largest |v|, found by a sample (§5)
    v = 0, u = 0 there          momentum factor masking (§3.3): no stale momentum where v was sent

**Use it with plain SGD: an optimizer with momentum of its own would apply momentum twice.** u and v are kept by
the feedback "momentum" (``parts/feedback.py``), which any other method takes as well; with feedback "plain" or
"none" what is left of DGC is its selection. Tensors that go dense (those of fewer than two dimensions, those below
``min_elements``, all during a plan's ``warmup``) get no momentum here: put their parameters into a parameter
group of the optimizer's that has it.

Density falls over the first epochs (§3.3, warm-up), which is a schedule of the plan::

    method: dgc
    steps_per_epoch: 391
    schedule:
      density: {epochs: {0: 0.25, 1: 0.0625, 2: 0.015625, 3: 0.004, 4: 0.001}}

``select: sampled``: t has the share k/n of a sample above it. Where that leaves other than 2k/3 to 4k/3 entries
beyond t, t is bisected as in ``gaussiank``; where they were far too many, among those that lie beyond it only, which is
the paper's hierarchical selection. ``select: exact`` sends the k largest; where kernels are compiled, on CPUs, it is
the faster one (5 million elements, density 0.001: 2 ms against 11).

``clip_norm``: a rank's gradient is scaled down to the norm clip_norm/√p before it meets u (local gradient
clipping, §3.2).

What travels: a fixed capacity of ⌊4k/3⌋ (exact: k) (index, value) pairs of each rank, gathered. The ledger counts
"kept", the entries really chosen.

Bytes: 24 (header) + Elias-Fano indices + 4·⌊4k/3⌋ (exact: 4k), sections rounded up to 4.

Departures from the paper: the norm that is clipped is each tensor's, as in the authors' code, not the whole model's;
a threshold that takes too few is corrected too; the sample has no place twice; what goes dense has no momentum.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("dgc", world=1, density=0.25, momentum=0.5, min_elements=1)
>>> for _ in range(3):
...     print(net.allreduce([np.float32([[4, 3], [0, 1]])], name="w")[0].ravel())
[4. 0. 0. 0.]
[0.  7.5 0.  0. ]
[10.  0.  0.  0.]
>>> net.residual("w", rank=0)                       # 3 was sent and began anew; 1 + 1.5 + 1.75
array([[0.  , 3.  ],
       [0.  , 4.25]], dtype=float32)
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from hvdcompress.method import (
    Array,
    Context,
    Density,
    FeedbackName,
    Method,
    Number,
    Share,
    Sparse,
    TensorSpec,
    Values,
    method,
)
from hvdcompress.parts import pack, seed, select

LEAST_SAMPLE = 1024  #: elements; smaller tensors are looked at as a whole
LEAST_ABOVE = 16  #: sampled elements above the threshold: fewer would seldom tell it to within a third


@method
class DGC(Method):
    paper = "Lin et al., ICLR 2018 (arXiv 1712.01887)"
    sends = "4k/3 values + indices of about 2 + log2(n/k) bits, gathered: received bytes grow with p"
    sparse = True
    needs_feedback = True

    density: Density = 0.001
    """Share of the elements aimed at: k / n."""
    select: Literal["sampled", "exact"] = "sampled"
    """"sampled": 2k/3 to 4k/3 entries, those beyond a threshold that a sample tells; "exact": the k largest."""
    sample: Share = 0.01
    """Share of the elements in the sample; more are taken where it needs more for 1024, or for 16 that lie above
    the threshold."""
    clip_norm: Annotated[float, Number, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Norm to which a tensor's gradient is clipped before it is added up: clip_norm/√p on each rank. null: off."""
    values: Values = "fp32"
    """How the values are written: fp32, fp16, bf16, qsgd2 … qsgd8, rangefloat4 … rangefloat16."""
    feedback: FeedbackName = "momentum"

    @model_validator(mode="after")
    def _clipped_in_known_units(self) -> Self:
        if self.clip_norm is not None and self.feedback == "none":
            raise ValueError('clip_norm needs a feedback: with "none" a gradient stays multiplied by the loss scale')
        return self

    def suits(self, spec: TensorSpec) -> bool:
        """Matrices and convolutions; biases and the like go dense."""
        return len(spec.shape) >= 2

    def capacity(self, n: int) -> int:
        """Entries of a payload."""
        return select.kept(self.density, n) if self.select == "exact" else select.capacity(self.density, n)

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
        return pack.num_bytes(self.capacity(spec.size), spec.size, self.values, distinct=self.select == "exact")

    def clip(self, gradient: Array, scale: float, ctx: Context, ops: Any) -> float:
        if self.clip_norm is None or not (norm := ops.l2_norm(gradient)):
            return scale
        # rounded to float32, in which all backends' float64 sums agree
        return float(np.float32(min(scale, self.clip_norm / math.sqrt(ctx.world) / norm)))

    def encode(self, x: Array, state: dict[str, Array], ctx: Context, ops: Any) -> Array:
        n, exact = ctx.spec.size, self.select == "exact"
        if exact:
            index = ops.top_k(x, self.capacity(n))  # [c] int32, ascending
        else:
            index = select.beyond(x, self.threshold(x, ctx, ops), self.density, select.refine_bisect, ops)
        ctx.counters["kept"] = len(index)
        chosen = select.pad(Sparse(index, ops.take(x, index)), self.capacity(n), ops)
        return pack.encode(chosen, n, self.values, self.id, ctx, ops, distinct=exact)

    def decode(self, payload: Array, ctx: Context, ops: Any) -> Sparse:
        n = ctx.spec.size
        return pack.decode(payload, self.capacity(n), n, self.values, self.id, ops, distinct=self.select == "exact")

    def sample_size(self, n: int) -> int:
        """m, the number of elements of n that are sampled."""
        return min(n, max(LEAST_SAMPLE, math.ceil(n * self.sample), math.ceil(LEAST_ABOVE / self.density)))

    def threshold(self, x: Array, ctx: Context, ops: Any) -> np.float32:
        """The largest float below the m·density-th largest |x| of the sample."""
        n, m = len(x), self.sample_size(len(x))
        if m < n:
            places = seed.distinct_indices(seed.shared_key(ctx), m, n)
            x = ops.take(x, ops.asarray(places, like=x))
        return select.just_below(ops.kth_magnitude(x, select.kept(self.density, m)))
