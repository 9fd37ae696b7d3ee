"""gTop-k: global top-k by a tree of pairwise merges, so that the result has only k entries.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks",
ICDCS 2019 (arXiv 1901.04359), Alg. 2 (gTopKAllReduce).

Each rank starts with its own k largest entries. In each round the remaining ranks form pairs: one sends its k entries
and is done, the other adds them to its own and keeps the k largest of the sum. After ⌈log2 p⌉ rounds rank 0 has k
entries and broadcasts them. The result has k entries for any number of ranks (no "gradient build-up"):

    mine = top-k of x;   at distance d = 1, 2, 4, … < p:
        rank ≡ d (mod 2d):                 send mine to rank − d
        rank ≡ 0 (mod 2d), rank + d < p:   mine = top-k of (mine + what rank + d sent)
    broadcast rank 0's mine

Nothing is lost: an entry that a merge drops stays in the residual of the rank that dropped it, and the rounding error
of short ``values`` stays with the rank that encoded them. Hence Σ own = total, over ranks.

What is sent: k (index, value) pairs, once from every rank but rank 0 to its partner (an all-to-all with zero bytes for
all other ranks), and once from rank 0 to all. Rank 0 receives the most: one payload per round, ⌈log2 p⌉ in all.

Bytes: twice that of topk (at rank 0 once): 2·(24 + indices + 4k), sections rounded up to 4. A broadcast is
charged to every rank, as it is sent as a sum.

Departures from the paper's code: it needs a power of two of ranks; here any number works. It returns a dropped entry
to the ranks that first sent it, and only if its index is not among the final k. An entry that one branch of the tree
drops while another branch delivers one at the same index is then lost: with normal data, 1 % of the result with 4
ranks, 3 % with 8. With feedback "momentum", a rank also resets its velocity where it keeps entries of other ranks.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("gtopk", world=2, density=0.25, min_elements=1)
>>> net.allreduce([np.float32([4, 1, 0, -2]), np.float32([1, -6, 0, 2])], name="w", op="sum")[0]
array([ 0., -6.,  0.,  0.], dtype=float32)
>>> net.residual("w", rank=0), net.residual("w", rank=1)
(array([ 4.,  1.,  0., -2.], dtype=float32), array([1., 0., 0., 2.], dtype=float32))
"""

from __future__ import annotations

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
    Workspace,
    method,
)
from hvdcompress.ops.scan import Scan
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import candidates, pack, select


@method
class GTopK(Method):
    """Keeps the k largest elements of the sum, found by pairwise merges."""

    paper = "Shi et al., ICDCS 2019 (arXiv 1901.04359)"
    sends = "k values + k indices, twice: to a partner in log2(p) rounds, and by a broadcast; constant in p"
    sparse = True
    needs_feedback = True
    variable_length = True

    density: Density = 0.01
    """Fraction of the elements that each rank selects, and that the result has, k / n."""
    values: Values = "fp32"
    """Number format of the k values: fp32, fp16, bf16, qsgd2 … qsgd8, rangefloat4 … rangefloat16."""
    feedback: FeedbackName = "plain"

    def packing(self, n: int) -> pack.Packing:
        """Return how payloads are written, for n elements."""
        return pack.Packing(self.id, self.values, n)

    def num_payload_bytes(self, n: int) -> int:
        """Return the bytes of one payload of k entries, for n elements; a multiple of 4."""
        return pack.num_bytes(select.num_kept(self.density, n), self.packing(n))

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
        return (2 if world > 1 else 1) * self.num_payload_bytes(spec.size)

    def scan(self, index: int, state: dict[str, Array], ctx: Context, work: Workspace, like: Array) -> Scan:
        return candidates.scan_whole(select.num_kept(self.density, ctx.spec.size), ctx, work)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        ops = work.ops
        n, world, width = ctx.spec.size, ctx.world, self.num_payload_bytes(ctx.spec.size)
        k = select.num_kept(self.density, n)
        own = mine = select.largest(x, [k], ctx, work)
        distance = 1
        while distance < world:
            place = ctx.rank % (2 * distance)
            gives, takes = place == distance, place == 0 and ctx.rank + distance < world
            payload = self.write(mine, ctx, work) if gives else ops.zeros(0, "uint8", like=x)
            pieces = yield AllToAll(
                payload,
                splits=tuple(width if gives and rank == ctx.rank - distance else 0 for rank in range(world)),
                receives=tuple(width if takes and rank == ctx.rank + distance else 0 for rank in range(world)),
            )
            if gives:
                own = self.less_rounding(own, mine, self.decode(payload, ctx, work), n, ops)
            if takes:
                both = ops.merge(mine, self.decode(pieces[ctx.rank + distance], ctx, work), n)  # k to 2k entries
                mine, dropped = strongest(both, k, ops)
                own = ops.merge(own, Sparse(dropped.index, -dropped.values), n)
            distance *= 2
        payload = self.write(mine, ctx, work) if ctx.rank == 0 else None
        total = self.decode((yield Broadcast(lambda: payload, 0, width)), ctx, work)
        if ctx.rank == 0:
            own = self.less_rounding(own, mine, total, n, ops)
        return Reduced(total=total, own=own)

    def write(self, chosen: Sparse, ctx: Context, work: Workspace) -> Array:
        """Encode k entries. A rank does so once per step, so it never uses its random numbers twice."""
        return pack.encode(chosen, self.packing(ctx.spec.size), ctx, work, keep=False)

    def decode(self, payload: Array, ctx: Context, work: Workspace) -> Sparse:
        n = ctx.spec.size
        return pack.decode(payload, select.num_kept(self.density, n), self.packing(n), work.ops)

    def less_rounding(self, own: Sparse, written: Sparse, read: Sparse, n: int, ops: Ops) -> Sparse:
        """Return ``own`` corrected by the rounding error of a payload: what was read minus what was written."""
        if self.values == "fp32":
            return own
        return ops.merge(own, Sparse(written.index, read.values - written.values), n)


def strongest(entries: Sparse, k: int, ops: Ops) -> tuple[Sparse, Sparse]:
    """Split entries into the k of largest magnitude and the others, both with ascending indices."""
    m = len(entries.index)
    kept = ops.top_k(entries.values, k)  # positions among the m
    others = ops.find_bits(~ops.set_bits(kept, m), m)
    return (
        Sparse(ops.take(entries.index, kept), ops.take(entries.values, kept)),
        Sparse(ops.take(entries.index, others), ops.take(entries.values, others)),
    )
