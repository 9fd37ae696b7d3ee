"""RedSync: top-k by a threshold that is searched between the mean and the maximum of |x|, and used again.

Fang et al., "RedSync: Reducing Synchronization Bandwidth for Distributed Deep Learning Training System", Journal of
Parallel and Distributed Computing, 2019 (arXiv 1808.04357): trimmed top-k selection, and threshold binary search
selection.

To count the elements above a threshold is cheaper than to select the k largest. The threshold lies between the mean
m and the maximum M of |x|, x = gradient + residual:

    k = min(n, max(1, ⌊n·density⌋)),   t(r) = m + r·(M − m),   c(r) = #{|x| > t(r)}

``select: search`` (default) bisects r in [0, 1] until k ≤ c ≤ 2k, and sends the c elements above t. Neighbouring steps
have similar residuals. So t is used again in the next ``interval`` − 1 steps, as long as it leaves k to 2k elements.
Where r is known to ``tolerance`` and c still is not in the interval, as where one element is far above all others, the
bit pattern of t is bisected, as in ``gaussiank``. If elements of equal magnitude make k to 2k impossible, those with
the lowest indices fill up. Fewer than k are sent only if fewer are non-zero.

``select: paper`` is the published search: it ends with whatever is above the last threshold if r is known to
``tolerance``, and the threshold is used again whatever it leaves. It goes down at c < k/2 and up at c ≥ k/2, so that
k/2 to k elements lead it away from k. ``tolerance: 0.2``, three counts, is what the authors of Gaussian-k compare
with (github.com/hclhkbu/GaussianK-SGD, compression.py).

Measured on the residuals of a small net that learns digits (64×96 weights, k = 61, 200 steps): ``search`` sends 1.4·k
on average, and the slots of 2k are paid for. ``paper`` with a search in every step leaves k to 2k elements in 55 % of
the steps and fewer than k/2 in 21 %; with the tolerance 0.2 in 32 % and 37 %.

``select: trimmed`` takes r = 0.8, 0.6, 0.4, 0.2, 0 until c ≥ k, and selects the k largest of these c. It sends what
``topk`` sends, which trims by the last step's threshold.

What is sent: 2k (trimmed: k) (index, value) pairs per rank, by an all-gather. Unused slots repeat the last index with
the value 0: payloads of constant length keep Horovod's response cache valid. Elements beyond 2k, which only ``paper``
meets, stay in the residual. The ledger counts the elements really chosen as "kept".

Bytes: 24 (header) + Elias-Fano indices + 4·2k (trimmed: 4k), sections rounded up to 4.

State: the threshold, on each rank.

Departures from the paper, besides those that ``select: paper`` takes back: the paper quantizes what it sends to one
mean, of the largest in one step and of the smallest in the next; here ``values`` has number formats. It sends small
layers dense, trims those of middle size and searches in the large ones: a plan's ``rules`` do that. It sends all that
exceed the threshold; here payloads have 2k slots. A threshold is always below the maximum, so that elements of one
magnitude, and tensors of one element, are sent. We know of no code by the paper's authors that would confirm the
interval of 5 and the tolerance of 0.001.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("redsync", world=2, density=0.01)
>>> rng = np.random.default_rng(0)
>>> _ = net.allreduce([rng.normal(size=100_000).astype(np.float32) for _ in range(2)], name="w")
>>> net.ledger.counters(rank=0), net.ledger.bytes_sent(rank=0)     # k = 1000, capacity 2000
({'kept': 1215}, 9920)
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np

from hvdcompress.method import (
    AllGather,
    Array,
    Communication,
    Context,
    Count,
    Density,
    FeedbackName,
    Fraction,
    Method,
    Reduced,
    Slot,
    Sparse,
    TensorSpec,
    Values,
    Workspace,
    add_shares,
    method,
)
from hvdcompress.ops.scan import NOTHING, Scan
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import candidates, pack, select
from hvdcompress.parts.candidates import Elements
from hvdcompress.parts.select import Wanted

NONE = np.float32(0)  #: no threshold is known


@method
class RedSync(Method):
    """Each rank sends k to 2k elements above a threshold that is searched between mean and maximum."""

    paper = "Fang et al., JPDC 2019 (arXiv 1808.04357)"
    sends = "2k values + indices of about 2 + log2(n/k) bits, gathered: received bytes grow with p"
    sparse = True
    needs_feedback = True
    published: ClassVar[dict[str, Any]] = {"select": "paper"}
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"interval": 2}, {"paper": True, "interval": 2})

    density: Density = 0.01
    """Fraction of the elements that each rank sends at least, k / n."""
    select: Literal["search", "paper", "trimmed"] = "search"
    """What is sent. "search": k to 2k elements above a searched threshold. "paper": what is above it when the
    published search ends, at most 2k. "trimmed": the k largest, of those above a low threshold."""
    interval: Count = 5
    """Steps from search to search, at most; between them the threshold is used again. 1: search in every step."""
    tolerance: Fraction = 0.001
    """Part of the way from mean to maximum at which the search gives up."""
    values: Values = "fp32"
    """Number format of the values: fp32, fp16, bf16, qsgd2 … qsgd8, rangefloat4 … rangefloat16."""
    feedback: FeedbackName = "plain"

    def wanted(self, n: int) -> Wanted:
        """Return k to 2k, of n elements; trimmed: k."""
        k = select.num_kept(self.density, n)
        return Wanted(k, k, k if self.select == "trimmed" else min(n, 2 * k))

    def state(self, spec: TensorSpec) -> dict[str, Slot]:
        return {} if self.select == "trimmed" else {"threshold": Slot((1,), merge="keep")}

    def packing(self, spec: TensorSpec) -> pack.Packing:
        """Return how payloads are written."""
        return pack.Packing(self.id, self.values, spec.size, distinct=self.select == "trimmed")

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
        return pack.num_bytes(self.wanted(spec.size).most, self.packing(spec))

    def scan(self, index: int, state: dict[str, Array], ctx: Context, work: Workspace, like: Array) -> Scan:
        if self.select == "trimmed":
            return NOTHING
        return candidates.scan_whole(self.wanted(ctx.spec.size).most + 1, ctx, work)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        ops = work.ops
        chosen, threshold = self.choose(x, self.known(state, ctx, work), ctx, work)
        work.counters["kept"] = len(chosen.index)
        padded = select.pad(chosen, self.wanted(ctx.spec.size).most, ops)
        pieces = yield AllGather(pack.encode(padded, self.packing(ctx.spec), ctx, work), fixed_length=True)
        shares = [self.decode(piece, ctx, work) for piece in pieces]
        new = self.remembered(threshold, x, ops)
        return Reduced(total=add_shares(shares, ops), own=shares[ctx.rank], state=new)

    def decode(self, payload: Array, ctx: Context, work: Workspace) -> Sparse:
        return pack.decode(payload, self.wanted(ctx.spec.size).most, self.packing(ctx.spec), work.ops)

    def known(self, state: dict[str, Array], ctx: Context, work: Workspace) -> np.float32:
        """Return the threshold that is to be used again, or 0 in a step that searches."""
        if self.select == "trimmed" or ctx.step % self.interval == 0:
            return NONE
        return np.float32(work.ops.max_abs(state["threshold"]))

    def remembered(self, threshold: np.float32, like: Array, ops: Ops) -> dict[str, Array]:
        """Return the new state, on the device of ``like``."""
        if self.select == "trimmed":
            return {}
        slot = ops.zeros(1, "float32", like)
        ops.fill(slot, float(threshold))
        return {"threshold": slot}

    def choose(self, x: Array, known: np.float32, ctx: Context, work: Workspace) -> tuple[Sparse, np.float32]:
        """Select the elements to send.

        Args:
            x: gradient + residual, float32 [n].
            known: the threshold of an earlier step, or 0.
            ctx: the tensor, or the bucket.
            work: ``work.scanned`` may have candidates.

        Returns:
            The elements [c], their indices ascending, and their threshold; c ≤ 2k, trimmed: c = k.
        """
        wanted = self.wanted(len(x))
        if self.select == "trimmed":
            return trimmed(Elements(x, None, None, work.ops), wanted.k), NONE
        refine = self.published_search if self.select == "paper" else self.search
        return select.above_threshold(x, select.Search(known, wanted, refine), 0, ctx, work)

    def search(self, elements: Elements, known: np.float32, wanted: Wanted) -> tuple[np.float32, np.float32 | None]:
        """Find a threshold with k to 2k elements above it: a :data:`~hvdcompress.parts.select.Refine`."""
        if known > 0 and wanted.least <= elements.count_above(known, wanted.most) <= wanted.most:
            return known, None
        mean, largest = elements.mean(), elements.largest()
        low, high, threshold = 0.0, 1.0, np.float32(mean)
        while high - low > self.tolerance:
            middle = (low + high) / 2
            threshold = between(mean, largest, middle)
            count = elements.count_above(threshold, wanted.most)
            if count < wanted.least:
                high = middle
            elif count > wanted.most:
                low = middle
                elements.narrow(threshold, count)
            else:
                return threshold, None
        return select.refine_bisect(elements, threshold, wanted)

    def published_search(self, elements: Elements, known: np.float32, wanted: Wanted) -> tuple[np.float32, None]:
        """Find a threshold as the paper does: a :data:`~hvdcompress.parts.select.Refine`."""
        if known > 0:
            return known, None
        mean, largest = elements.mean(), elements.largest()
        low, high, threshold = 0.0, 1.0, NONE
        while high - low > self.tolerance:
            middle = (low + high) / 2
            threshold = between(mean, largest, middle)
            count = elements.count_above(threshold, wanted.most)
            if wanted.k < count < 2 * wanted.k:
                break
            low, high = (low, middle) if 2 * count < wanted.k else (middle, high)
        return min(threshold, select.just_below(largest)), None


def between(mean: float, largest: float, share: float) -> np.float32:
    """Return what is at a share of the way from the mean to the largest |x|."""
    return np.float32(mean + share * (largest - mean))


def trimmed(elements: Elements, k: int) -> Sparse:
    """Select the k largest |x| from those above the highest of five thresholds that leaves k or more.

    Args:
        elements: the elements of x.
        k: how many.

    Returns:
        The elements [k], their indices ascending; among equals, the lowest.
    """
    ops, x, mean, largest = elements.ops, elements.x, elements.mean(), elements.largest()
    for fifths in (4, 3, 2, 1, 0):
        threshold = between(mean, largest, fifths / 5)
        count = elements.count_above(threshold, len(x))
        if count >= k:
            near = elements.above(threshold, count)
            break
    else:  # more than half of them may be below the mean
        near = Sparse(ops.index_range(len(x), like=x), x)
    return ops.largest_of([near], [k], [0])[0]
