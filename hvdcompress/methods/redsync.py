"""RedSync: approximate top-k, by a threshold that is searched between the mean and the maximum of |x|, then reused.

Fang et al., "RedSync: Reducing Synchronization Bandwidth for Distributed Deep Learning Training System", Journal of
Parallel and Distributed Computing, 2019 (arXiv 1808.04357): trimmed top-k selection, and threshold binary search
selection.

Counting the elements above a threshold is cheaper than selecting the k largest. The threshold t lies between the mean
m and the maximum M of |x|, x = gradient + residual:

    k = min(n, max(1, ⌊n·density⌋)),   t(r) = m + r·(M − m),   c(r) = #{|x| > t(r)}

``select: search`` (default) bisects r in [0, 1] until k ≤ c ≤ 2k, and sends the c elements above t. Residuals of
consecutive steps are similar, so the next ``interval`` − 1 steps reuse t while it leaves k to 2k elements. The
bisection of r stops when r is known to ``tolerance``. If c is outside of the interval even then, for example because
one element is far larger than all others, the bit pattern of t is bisected, as in ``gaussiank``. If equal magnitudes
make k to 2k impossible, elements of that magnitude with the lowest indices fill the payload up to k. Fewer than k
elements are sent only if fewer are non-zero.

``select: paper`` is the published search. It stops when r is known to ``tolerance``, sends all elements above the last
threshold, and reuses the threshold without a check. It lowers t if c < k/2 and raises t if c ≥ k/2, so that from k/2 to
k elements it moves away from k. The authors of Gaussian-k compare their method with ``tolerance: 0.2``, three counts
(github.com/hclhkbu/GaussianK-SGD, compression.py).

``select: trimmed`` takes r = 0.8, 0.6, 0.4, 0.2, 0 until c ≥ k, and selects the k largest of these c elements. It sends
the same elements as ``topk``, whose candidates come from the last step's threshold.

What is sent: 2k (trimmed: k) (index, value) pairs per rank, by an all-gather. Unused slots repeat the last index with
the value 0: payloads of constant length keep Horovod's response cache valid. Elements beyond 2k, which only ``paper``
selects, stay in the residual. The ledger counts the selected elements as "kept".

Bytes: 24 (header) + Elias-Fano indices + 4·2k (trimmed: 4k), sections rounded up to 4.

State: the threshold, on each rank.

When it loses: the payload has 2k slots, used or not, so it is twice as large as that of ``topk``. The received bytes
grow with p. Measured on the residuals of a small net that learns digits (64×96 weights, k = 61, 200 steps): ``search``
sends 1.4·k elements on average. ``paper`` with a search in every step selects k to 2k elements in 55 % of the steps and
fewer than k/2 in 21 %; with the tolerance 0.2 in 32 % and 37 %.

Departures from the paper that ``select: paper`` does not remove: the paper quantizes the values to one mean, of the
largest elements in one step and of the smallest in the next; here ``values`` selects a number format. The paper sends
small layers dense, trims middle-sized layers and searches in large ones; here a plan's ``rules`` do that. The paper
sends all elements above the threshold; here payloads have 2k slots. A threshold is always below the maximum, so that
tensors whose elements have one magnitude, and tensors of one element, are sent. We know of no code by the paper's
authors that would confirm the interval of 5 and the tolerance of 0.001.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("redsync", world_size=2, density=0.01)
>>> rng = np.random.default_rng(0)
>>> _ = net.allreduce([rng.normal(size=100_000).astype(np.float32) for _ in range(2)], name="w")
>>> net.ledger.counters(rank=0), net.ledger.bytes_sent(rank=0)     # k = 1000, capacity 2000
({'kept': 1215}, 9920)
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from hvdcompress.method import (
    AllGather,
    Array,
    Communication,
    Context,
    Count,
    Density,
    Fraction,
    Reduced,
    Slot,
    Sparse,
    TensorSpec,
    Workspace,
    add_shares,
    method,
)
from hvdcompress.ops.scan import NOTHING, Scan
from hvdcompress.parts import candidates, pack, select
from hvdcompress.parts.candidates import Elements
from hvdcompress.parts.select import SparseMethod, Wanted

UNKNOWN = np.float32(0)  #: stands for a threshold that has to be searched


@method
class RedSync(SparseMethod):
    """Each rank sends k to 2k elements, those above a threshold between the mean and the maximum of |x|."""

    paper = "Fang et al., JPDC 2019 (arXiv 1808.04357)"
    sends = "2k values + indices of about 2 + log2(n/k) bits, gathered: received bytes grow with p"
    published: ClassVar[dict[str, Any]] = {"select": "paper"}
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"interval": 2}, {"paper": True, "interval": 2})

    needs = dict.fromkeys(("interval", "tolerance"), ("select", ("search", "paper")))
    density: Density = 0.01
    """Minimum fraction of the elements that each rank sends, k / n."""
    select: Literal["search", "paper", "trimmed"] = "search"
    """Which elements are sent. "search": k to 2k elements above a searched threshold. "paper": the elements above the
    threshold of the published search, at most 2k. "trimmed": the k largest of the elements above a low threshold."""
    interval: Count = 5
    """Number of steps after which the threshold is searched again; in between it is reused. 1: every step."""
    tolerance: Fraction = 0.001
    """Width of the interval of r at which the bisection stops."""

    def wanted(self, n: int) -> Wanted:
        """Return how many of n elements to select: k to 2k; trimmed: k."""
        k = select.num_kept(self.density, n)
        return Wanted(k, k, k if self.select == "trimmed" else min(n, 2 * k))

    def state(self, spec: TensorSpec) -> dict[str, Slot]:
        return {} if self.select == "trimmed" else {"threshold": Slot((1,), merge="keep")}

    def packing(self, spec: TensorSpec) -> pack.Packing:
        """Return the payload format of the tensor."""
        return pack.Packing(self.id, self.values, spec.size, distinct=self.select == "trimmed")

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        return pack.num_bytes(self.wanted(spec.size).most, self.packing(spec))

    def scan(self, index: int, state: dict[str, Array], ctx: Context, work: Workspace, like: Array) -> Scan:
        if self.select == "trimmed":
            return NOTHING
        return candidates.scan_whole(self.wanted(ctx.spec.size).most + 1, ctx, work)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        ops = work.ops
        chosen, threshold = self.choose(x, self.reused_threshold(state, ctx, work), ctx, work)
        work.counters["kept"] = len(chosen.index)
        padded = select.pad(chosen, self.wanted(ctx.spec.size).most, ops)
        pieces = yield AllGather(pack.encode(padded, self.packing(ctx.spec), ctx, work), fixed_length=True)
        shares = [self.decode(piece, ctx, work) for piece in pieces]
        new = dict.fromkeys(self.state(ctx.spec), ops.asarray(np.array([threshold], np.float32), like=x))
        return Reduced(total=add_shares(shares, ops), own=shares[ctx.rank], state=new)

    def decode(self, payload: Array, ctx: Context, work: Workspace) -> Sparse:
        return pack.decode(payload, self.wanted(ctx.spec.size).most, self.packing(ctx.spec), work.ops)

    def reused_threshold(self, state: dict[str, Array], ctx: Context, work: Workspace) -> np.float32:
        """Return the last threshold if this step reuses it, else UNKNOWN."""
        if self.select == "trimmed" or ctx.step % self.interval == 0:
            return UNKNOWN
        return np.float32(work.ops.max_abs(state["threshold"]))

    def choose(self, x: Array, reused: np.float32, ctx: Context, work: Workspace) -> tuple[Sparse, np.float32]:
        """Select the elements to send.

        Args:
            x: gradient + residual, float32 [n].
            reused: the threshold of an earlier step, or UNKNOWN.
            ctx: rank, world_size, step and tensor.
            work: ``work.scanned`` may contain candidates.

        Returns:
            The elements [c], their indices ascending, and the threshold. c ≤ 2k; trimmed: c = k.
        """
        wanted = self.wanted(len(x))
        if self.select == "trimmed":
            return trimmed_top_k(Elements(x, None, None, work.ops), wanted.k), UNKNOWN
        search = self.published_search if self.select == "paper" else self.search
        return select.above_threshold(x, wanted, partial(search, reused=reused, wanted=wanted), 0, ctx, work)

    def search(self, elements: Elements, reused: np.float32, wanted: Wanted) -> tuple[np.float32, np.float32 | None]:
        """Find a threshold with k to 2k elements above it."""
        if reused > 0 and wanted.least <= elements.count_above(reused, wanted.most) <= wanted.most:
            return reused, None
        mean = elements.mean()
        largest = elements.largest()
        t = np.float32(mean)
        low, high = 0.0, 1.0  # bounds of r
        while high - low > self.tolerance:
            r = (low + high) / 2
            t = threshold_at(r, mean, largest)
            count = elements.count_above(t, wanted.most)
            if count < wanted.least:
                high = r
            elif count > wanted.most:
                low = r
                elements.narrow(t, count)
            else:
                return t, None
        return select.refine_bisect(elements, t, wanted)

    def published_search(self, elements: Elements, reused: np.float32, wanted: Wanted) -> tuple[np.float32, None]:
        """Find a threshold as the paper does."""
        if reused > 0:
            return reused, None
        mean = elements.mean()
        largest = elements.largest()
        t = UNKNOWN
        low, high = 0.0, 1.0  # bounds of r
        while high - low > self.tolerance:
            r = (low + high) / 2
            t = threshold_at(r, mean, largest)
            count = elements.count_above(t, wanted.most)
            if wanted.k < count < 2 * wanted.k:
                break
            if 2 * count < wanted.k:
                high = r
            else:
                low = r
        return min(t, select.just_below(largest)), None


def threshold_at(r: float, mean: float, largest: float) -> np.float32:
    """Return t(r) = m + r·(M − m)."""
    return np.float32(mean + r * (largest - mean))


def trimmed_top_k(elements: Elements, k: int) -> Sparse:
    """Select the k largest |x| among the elements above the highest of five thresholds that leaves at least k.

    Args:
        elements: the elements of x.
        k: number of elements to select.

    Returns:
        The elements [k], their indices ascending; among equal magnitudes, the lowest indices.
    """
    ops = elements.ops
    x = elements.x
    mean = elements.mean()
    largest = elements.largest()
    for fifths in (4, 3, 2, 1, 0):
        threshold = threshold_at(fifths / 5, mean, largest)
        count = elements.count_above(threshold, len(x))
        if count >= k:
            near = elements.above(threshold, count)
            break
    else:  # fewer than k elements are above the mean: select from all
        near = Sparse(ops.top_k(x, len(x)), x)
    chosen, _ = ops.largest_of([near], [k], [0])
    return chosen
