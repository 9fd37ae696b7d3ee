"""Gaussian-k: approximate top-k by a threshold from the normal distribution fitted to x.

Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning", 2019 (arXiv 1911.08772), Alg. 1.

Gradients with their residuals are bell-shaped, so the k-th largest |x| can be estimated from mean and
standard deviation, at the cost of a few passes over memory instead of a selection:

    k = min(n, max(1, ⌊n·density⌋)),   t = |μ| + z·σ,   z = Φ⁻¹(1 − density/2)
    c = #{|x| > t};  refine t until 2k/3 ≤ c ≤ 4k/3;  send the c entries beyond t

``refine: paper``: up to 3 rounds, t halved where c < 2k/3, times 1.5 where c > 4k/3; where that leaves c
far from k (heavy tails: 9.5·k on Laplace data in the first round), so be it, up to the payload's capacity.
``refine: bisect`` (default) starts from the same t and bisects its bit pattern, at most 31 halvings, until
2k/3 ≤ c ≤ 4k/3; equal magnitudes that straddle the bound are filled up, lowest index first. Fewer are sent
only where fewer are non-zero.

What travels: a fixed capacity of ⌊4k/3⌋ (index, value) pairs of each rank, gathered; slots not needed repeat
the last index with the value 0, so that payloads keep one length and Horovod's response cache stays warm.
What overflows the capacity returns to the residual. The ledger counts "kept", the entries really chosen.

Bytes: 24 (header) + Elias-Fano indices + 4·⌊4k/3⌋ (or 2·⌊4k/3⌋), sections rounded up to 4.

Departures from the authors' code: both tails count (|x| > t); bisection; fixed capacity; a one-element tensor
is sent (its unbiased deviation is undefined there, and nothing ever sent). The authors' selection over one
fused buffer of all tensors is ``scope: global``.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("gaussiank", world=2, density=0.01)
>>> rng = np.random.default_rng(0)
>>> _ = net.allreduce([rng.normal(size=100_000).astype(np.float32) for _ in range(2)], name="w")
>>> net.ledger.counters(rank=0), net.ledger.bytes_sent(rank=0)     # k = 1000, capacity 1333
({'kept': 1019}, 6720)
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from hvdcompress.method import Array, Context, Density, FeedbackName, Method, Sparse, TensorSpec, Values, method
from hvdcompress.parts import pack, select


@method
class GaussianK(Method):
    paper = "Shi et al. 2019 (arXiv 1911.08772)"
    sends = "4k/3 values + indices of about 2 + log2(n/k) bits, gathered: received bytes grow with p"
    sparse = True
    needs_feedback = True

    density: Density = 0.01
    """Share of the elements aimed at: k / n."""
    refine: Literal["bisect", "paper"] = "bisect"
    """How the threshold is corrected: until the count is right, or as the paper does."""
    scope: Literal["tensor", "global"] = "tensor"
    """k for each tensor, or for all tensors with this method joined in one buffer."""
    values: Values = "fp32"
    """How the values are written: fp32, fp16, bf16, qsgd2 … qsgd8, rangefloat4 … rangefloat16."""
    feedback: FeedbackName = "plain"

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
        return pack.num_bytes(select.capacity(self.density, spec.size), spec.size, self.values, distinct=False)

    def scan(self, gradient: Array, residual: Array, scale: float, out: Array, ops: Any) -> Any:
        return ops.accumulate_moments(gradient, residual, scale, out)

    def encode(self, x: Array, state: dict[str, Array], ctx: Context, ops: Any) -> Array:
        n = ctx.spec.size
        index = self.choose(x, ctx.scanned or ops.moments(x), ops)  # [c] int32, ascending
        ctx.counters["kept"] = len(index)
        chosen = select.pad(Sparse(index, ops.take(x, index)), select.capacity(self.density, n), ops)
        return pack.encode(chosen, n, self.values, self.id, ctx, ops, distinct=False)

    def decode(self, payload: Array, ctx: Context, ops: Any) -> Sparse:
        n = ctx.spec.size
        return pack.decode(payload, select.capacity(self.density, n), n, self.values, self.id, ops, distinct=False)

    def choose(self, x: Array, moments: tuple[float, float], ops: Any) -> Array:
        """Indices of the entries to send [c], ascending; c ≤ capacity."""
        start = np.float32(select.gaussian_threshold(*moments, self.density))
        refine = select.refine_paper if self.refine == "paper" else select.refine_bisect
        return select.beyond(x, start, self.density, refine, ops)
