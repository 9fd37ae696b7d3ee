"""gTop-k: global top-k by a tree of pairwise merges, so that the result has only k entries.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks",
ICDCS 2019 (arXiv 1901.04359), Alg. 2 (gTopKAllReduce).

Each rank starts with its own k largest entries. In each round the remaining ranks form pairs: one rank sends its k
entries and is done; the other rank adds them to its own entries and keeps the k largest of the sum. After ⌈log2 p⌉
rounds rank 0 has k entries and broadcasts them. The result has k entries for any number of ranks (no "gradient
build-up"):

    kept = top-k of x;   at distance d = 1, 2, 4, … < p:
        rank ≡ d (mod 2d):                 send kept to rank − d
        rank ≡ 0 (mod 2d), rank + d < p:   kept = top-k of (kept + entries received from rank + d)
    broadcast rank 0's kept

Nothing is lost: an entry that a merge drops stays in the residual of the rank that dropped it, and the rounding error
of short ``values`` stays with the rank that encoded them. Hence the shares ``own`` of all ranks add up to the result.

What is sent: k (index, value) pairs, once from every rank except rank 0 to its partner (an all-to-all with zero bytes
for all other ranks), and once from rank 0 to all. Rank 0 receives the most: one payload per round, ⌈log2 p⌉ in all.

Bytes: twice that of topk (at rank 0 once): 2·(24 + indices + 4k), sections rounded up to 4. A broadcast is
charged to every rank, because it is sent as a sum.

When it loses: ⌈log2 p⌉ + 1 collectives in sequence. On links with high latency and for few ranks, ``topk`` is faster.
The result has k entries where topk's has up to p·k, so each step applies less of the gradients.

Departures from the authors' code: it needs a power of two of ranks; here any number works. The authors' code returns a
dropped entry to the ranks that first sent it, and only if its index is not among the final k. If one branch of the tree
drops an entry and another branch delivers an entry with the same index, the dropped entry is lost: with normal data 1 %
of the result with 4 ranks, 3 % with 8. With feedback "momentum", a rank also resets its velocity at indices where it
keeps entries of other ranks.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("gtopk", world_size=2, density=0.25, min_elements=1)
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
    Reduced,
    Sparse,
    TensorSpec,
    Workspace,
    method,
)
from hvdcompress.ops.scan import Scan
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import candidates, pack, select
from hvdcompress.parts.select import SparseMethod


@method
class GTopK(SparseMethod):
    """Sums the ranks' k largest elements by pairwise merges, each of which keeps the k largest."""

    paper = "Shi et al., ICDCS 2019 (arXiv 1901.04359)"
    sends = "k values + k indices, twice: to a partner in log2(p) rounds, and by a broadcast; constant in p"
    variable_length = True

    density: Density = 0.01
    """Fraction of the elements that each rank selects and that the result contains, k / n."""

    def packing(self, n: int) -> pack.Packing:
        """Return the payload format for n elements."""
        return pack.Packing(self.id, self.values, n)

    def num_payload_bytes(self, n: int) -> int:
        """Return the bytes of one payload of k entries for n elements, a multiple of 4."""
        return pack.num_bytes(select.num_kept(self.density, n), self.packing(n))

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        return (2 if world_size > 1 else 1) * self.num_payload_bytes(spec.size)

    def scan(self, index: int, state: dict[str, Array], ctx: Context, work: Workspace, like: Array) -> Scan:
        return candidates.scan_whole(select.num_kept(self.density, ctx.spec.size), ctx, work)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        ops = work.ops
        n = ctx.spec.size
        k = select.num_kept(self.density, n)
        width = self.num_payload_bytes(n)
        kept = select.largest(x, [k], ctx, work)
        own = kept
        distance = 1
        while distance < ctx.world_size:
            position = ctx.rank % (2 * distance)
            target = ctx.rank - distance if position == distance else None
            source = ctx.rank + distance if position == 0 and ctx.rank + distance < ctx.world_size else None
            payload = ops.zeros(0, "uint8", like=x) if target is None else self.encode_entries(kept, ctx, work)
            # every rank takes part in every round, also the ranks that neither send nor receive
            pieces = yield AllToAll(
                payload,
                splits=tuple(width if rank == target else 0 for rank in range(ctx.world_size)),
                receives=tuple(width if rank == source else 0 for rank in range(ctx.world_size)),
            )
            if target is not None:
                own = self.add_rounding_error(own, kept, self.decode(payload, ctx, work), n, ops)
            if source is not None:
                merged = ops.merge(kept, self.decode(pieces[source], ctx, work), n)  # k to 2k entries
                kept, dropped = split_largest(merged, k, ops)
                own = ops.merge(own, Sparse(dropped.index, -dropped.values), n)
            distance *= 2
        payload = self.encode_entries(kept, ctx, work) if ctx.rank == 0 else None
        total = self.decode((yield Broadcast(lambda: payload, 0, width)), ctx, work)
        if ctx.rank == 0:
            own = self.add_rounding_error(own, kept, total, n, ops)
        return Reduced(total=total, own=own)

    def encode_entries(self, entries: Sparse, ctx: Context, work: Workspace) -> Array:
        """Encode k entries. A rank calls this once per step, so it never uses its random numbers twice."""
        return pack.encode(entries, self.packing(ctx.spec.size), ctx, work, keep=False)

    def decode(self, payload: Array, ctx: Context, work: Workspace) -> Sparse:
        n = ctx.spec.size
        return pack.decode(payload, select.num_kept(self.density, n), self.packing(n), work.ops)

    def add_rounding_error(self, own: Sparse, encoded: Sparse, decoded: Sparse, n: int, ops: Ops) -> Sparse:
        """Return ``own`` plus the rounding error of a payload, so that the error goes to this rank's residual."""
        if self.values == "fp32":
            return own
        return ops.merge(own, Sparse(encoded.index, decoded.values - encoded.values), n)


def split_largest(entries: Sparse, k: int, ops: Ops) -> tuple[Sparse, Sparse]:
    """Split entries into the k of largest magnitude and the others, both with ascending indices."""
    m = len(entries.index)
    kept = ops.top_k(entries.values, k)  # k of 0 … m − 1
    others = ops.find_bits(~ops.set_bits(kept, m), m)
    return (
        Sparse(ops.take(entries.index, kept), ops.take(entries.values, kept)),
        Sparse(ops.take(entries.index, others), ops.take(entries.values, others)),
    )
