"""gTop-k: the k largest of the sum, found in a tree of pairwise merges, and no gradient build-up.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks",
ICDCS 2019 (arXiv 1901.04359), Alg. 2 (gTopKAllReduce).

Each rank begins with its own k largest entries. In round j the ranks that are left pair up at distance 2^j: the
right one sends its k entries and is done; the left one adds them to its own and keeps the k largest. After
⌈log2 p⌉ rounds rank 0 has k entries, which it broadcasts: the result has k entries for any number of workers.

    mine = top-k of x;   at distance d = 1, 2, 4, … < p:
        rank ≡ d (mod 2d):                 send mine to rank − d
        rank ≡ 0 (mod 2d), rank + d < p:   mine = top-k of (mine + what rank + d sent)
    broadcast rank 0's mine

Nothing is lost: what a merge drops stays in the residual of the rank that dropped it, and so does the rounding
error of narrow ``values`` with the rank that wrote them. Hence Σ own = total, over ranks.

What travels: k (index, value) pairs from every rank but one, to a partner (an all-to-all that gives zero bytes
to all others), and k pairs to all. The busiest rank, 0, receives ⌈log2 p⌉ payloads, one a round.

Bytes: twice that of topk (at rank 0 once): 2·(24 + indices + 4k), sections rounded up to 4. A broadcast is
charged to every rank, as it is sent as a sum.

Departures from the authors' code: any number of workers (theirs: powers of two). They return an entry to the ranks
that first gave it, and only if its place is not among the final k: what one branch of the tree dropped at a place
that another branch brought through is lost (of normal data 1 % of the result with 4 workers, 3 % with 8).
With feedback "momentum" a rank's velocity is cleared also where it keeps what others sent.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("gtopk", world=2, density=0.25, min_elements=1)
>>> net.allreduce([np.float32([4, 1, 0, -2]), np.float32([1, -6, 0, 2])], name="w", op="sum")[0]
array([ 0., -6.,  0.,  0.], dtype=float32)
>>> net.residual("w", rank=0), net.residual("w", rank=1)
(array([ 4.,  1.,  0., -2.], dtype=float32), array([1., 0., 0., 2.], dtype=float32))
"""

from __future__ import annotations

from typing import Any

from hvdcompress.method import (
    AllToAll,
    Array,
    Broadcast,
    Communication,
    Context,
    Density,
    FeedbackName,
    Method,
    Reduced,
    Sparse,
    TensorSpec,
    Values,
    method,
)
from hvdcompress.parts import pack, select


@method
class GTopK(Method):
    paper = "Shi et al., ICDCS 2019 (arXiv 1901.04359)"
    sends = "k values + k indices, twice: to a partner in log2(p) rounds, and by a broadcast; constant in p"
    sparse = True
    needs_feedback = True
    uneven = True

    density: Density = 0.01
    """Share of the elements that each rank selects, and that the result has: k / n."""
    values: Values = "fp32"
    """How the k values are written: fp32, fp16, bf16, qsgd2 … qsgd8, rangefloat4 … rangefloat16."""
    feedback: FeedbackName = "plain"

    def num_payload_bytes(self, n: int) -> int:
        """Bytes of k entries, a multiple of 4."""
        return pack.num_bytes(select.kept(self.density, n), n, self.values)

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
        return (2 if world > 1 else 1) * self.num_payload_bytes(spec.size)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, ops: Any) -> Communication:
        n, world, width = ctx.spec.size, ctx.world, self.num_payload_bytes(ctx.spec.size)
        index = ops.top_k(x, select.kept(self.density, n))  # [k] int32, ascending
        own = mine = Sparse(index, ops.take(x, index))
        distance = 1
        while distance < world:
            place = ctx.rank % (2 * distance)
            gives, takes = place == distance, place == 0 and ctx.rank + distance < world
            payload = self.write(mine, ctx, ops) if gives else ops.zeros(0, "uint8", like=x)
            pieces = yield AllToAll(
                payload,
                splits=tuple(width if gives and rank == ctx.rank - distance else 0 for rank in range(world)),
                receives=tuple(width if takes and rank == ctx.rank + distance else 0 for rank in range(world)),
            )
            if gives:
                own = self.less_rounding(own, mine, self.decode(payload, ctx, ops), n, ops)
            if takes:
                both = ops.merge(mine, self.decode(pieces[ctx.rank + distance], ctx, ops), n)  # k to 2k entries
                mine, dropped = strongest(both, len(index), ops)
                own = ops.merge(own, Sparse(dropped.index, -dropped.values), n)
            distance *= 2
        payload = self.write(mine, ctx, ops) if ctx.rank == 0 else None
        total = self.decode((yield Broadcast(lambda: payload, 0, width)), ctx, ops)
        if ctx.rank == 0:
            own = self.less_rounding(own, mine, total, n, ops)
        return Reduced(total=total, own=own)

    def write(self, chosen: Sparse, ctx: Context, ops: Any) -> Array:
        """k entries -> a payload; a rank writes but one a step, so that its random numbers serve once."""
        return pack.encode(chosen, ctx.spec.size, self.values, self.id, ctx, ops)

    def decode(self, payload: Array, ctx: Context, ops: Any) -> Sparse:
        n = ctx.spec.size
        return pack.decode(payload, select.kept(self.density, n), n, self.values, self.id, ops)

    def less_rounding(self, own: Sparse, written: Sparse, read: Sparse, n: int, ops: Any) -> Sparse:
        """``own`` less what ``written`` lost on its way to ``read``."""
        if self.values == "fp32":
            return own
        return ops.merge(own, Sparse(written.index, read.values - written.values), n)


def strongest(entries: Sparse, k: int, ops: Any) -> tuple[Sparse, Sparse]:
    """The k largest entries and the others, both with ascending indices."""
    m = len(entries.index)
    kept = ops.top_k(entries.values, k)  # positions among the m
    others = ops.find_bits(~ops.set_bits(kept, m), m)
    return (
        Sparse(ops.take(entries.index, kept), ops.take(entries.values, kept)),
        Sparse(ops.take(entries.index, others), ops.take(entries.values, others)),
    )
