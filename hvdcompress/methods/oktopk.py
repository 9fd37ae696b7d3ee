"""Ok-Topk: the global top-k, by a sparse reduce-scatter over balanced regions and an all-gather of the largest sums.

Li & Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022 (arXiv 2201.07598), Alg. 1.

The tensor is cut into p regions, and rank r owns region r. I_i are the indices of the k·(p − 1)/p largest |x_i| that
rank i has outside of its own region, and m_i is the smallest of these magnitudes:

    all-to-all:    rank i sends its entries (I_i, x_i[I_i]) to their owners, and m_i to all
                   S = x_r + Σ_i x_i[I_i] in the own region, R = Σ_i x_i[I_i],  t = ρ·Σ_i m_i
    all-gather:    each owner sends its entries T of S with |S| > t
    residual_i = x_i, with x_i[I_i] set to 0 and S − T in the own region

So an owner keeps what it does not send. It sends from k/2p to 2·⌈k/p⌉ entries, or all of a smaller region. ρ and the
regions follow from the last step. ρ·Σ_i m_i was the k-th largest magnitude gathered, or of fewer entries the lesser of
t and the largest one; times (4k + c)/5k with the number c of gathered entries. The edges of the regions move to where
each owner would have sent as many. So each rank receives about k entries in either collective, for any number of ranks.

What is sent: k − ⌊k/p⌋ (index, value) pairs per rank, each to its owner, then about k/p pairs from each rank to all.

Bytes: about 32·p + indices + 4k, then 24 + (indices + 4k)/p; ``num_bytes`` is the limit. Where receivers must know
lengths in advance (MPI, torch.distributed), 8 bytes per piece precede either collective. State: ρ and the edges.

When it loses: every rank sends a message with a header of 24 bytes to every other one. If it has few entries (small
tensors, many ranks) or latency is high, gtopk or scalecom are faster. The result has about k entries, topk's up to p·k.

Departures from the paper: it sends what exceeds a threshold of each rank; here the number is fixed. There, S − T stays
with the ranks that sent it; here an owner adds all of its region and keeps the difference, which is then sent earlier.
In its code (github.com/Shigangli/Ok-Topk) t is exact in every 32nd step, for which all sums are gathered, and is reused
in between; here t needs no such step. Boundaries that suit each rank are averaged in every 64th step, and entries move
to other ranks before the all-gather if one owner has too many; here the gathered entries tell, and payloads differ.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("oktopk", world_size=2, density=0.25, min_elements=1)
>>> net.allreduce([np.float32([4, 1, 0, -2]), np.float32([1, -6, 0, 2])], name="w")[0]
array([ 0. , -2.5,  0. ,  0. ], dtype=float32)
>>> net.residual("w", rank=0), net.residual("w", rank=1)
(array([4., 0., 0., 0.], dtype=float32), array([1., 0., 0., 0.], dtype=float32))
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from hvdcompress.method import (
    AllGather,
    AllToAll,
    Array,
    Communication,
    Context,
    Density,
    Reduced,
    Slot,
    Sparse,
    TensorSpec,
    Workspace,
    method,
)
from hvdcompress.ops.vectors import FP32_MAX, Shares
from hvdcompress.parts import pack, regions, select
from hvdcompress.parts.select import SparseMethod


@method
class OkTopk(SparseMethod):
    """Each rank adds the entries of one region, and gathers the largest sums of all."""

    paper = "Li & Hoefler, PPoPP 2022 (arXiv 2201.07598)"
    sends = "k values + k indices to the owners of their regions, then about k/p of each to all; hardly grows with p"
    variable_length = True

    density: Density = 0.01
    """Fraction of the elements that each rank selects and that the result contains, k / n."""

    def state(self, spec: TensorSpec) -> dict[str, Slot]:
        edges = Slot((regions.SHARES - 1,), scope="shared", merge="keep")
        return {"ratio": Slot((1,), merge="keep"), "edges": edges}

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        k = select.num_kept(self.density, spec.size)
        whole = self.packing(spec.size + world_size)
        # Codings are concave in entries and positions: besides what is rounded up, pieces are no longer than the whole
        pieces = world_size * (pack.num_bytes(1, whole) + 8)
        return pieces + pack.num_bytes(k + world_size, whole) + pack.num_bytes(self.most(k, world_size), whole)

    def packing(self, positions: int) -> pack.Packing:
        """Return the format of entries in a region."""
        return pack.Packing(self.id, self.values, positions)

    def most(self, k: int, world_size: int) -> int:
        """Return the limit for the entries that an owner sends."""
        return min(k, 2 * -(-k // world_size))

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        ops, n, p, rank = work.ops, ctx.spec.size, ctx.world_size, ctx.rank
        k = select.num_kept(self.density, n)
        edges = np.array(state["edges"].tolist(), np.float32)
        bounds = regions.bounds(edges, n, p)
        sizes = [stop - start for start, stop in pairwise(bounds)]
        first, size = bounds[rank], sizes[rank]

        others = ops.concat([x[:first], x[first + size :]])
        index = ops.top_k(others, k - k // p)
        values = ops.take(others, index)
        low = int((index < first).sum())
        index = ops.concat([index[:low], index[low:] + size])  # I, in the whole tensor
        cuts = pairwise(regions.cuts(index, bounds, ops))
        least = ops.asarray(np.array([ops.kth_magnitude(values, len(values))], np.float32), like=x)  # m
        pieces, sent = [], []
        for (a, b), start, its in zip(cuts, bounds[:-1], sizes, strict=True):  # m has the position after the region
            end = ops.asarray(np.array([its], np.int32), like=x)
            entries = Sparse(ops.concat([index[a:b] - start, end]), ops.concat([values[a:b], least]))
            pieces.append(pack.encode(entries, self.packing(its + 1), ctx, work, keep=False))
            sent.append(pack.decode(pieces[-1], None, self.packing(its + 1), ops).values[:-1])
        received = yield AllToAll(ops.concat(pieces), tuple(map(len, pieces)))
        shares = [pack.decode(each, None, self.packing(size + 1), ops) for each in received]
        rest = ops.zeros(size + 1, "float32", like=x)
        ops.write(rest, Shares(shares), 1.0)
        level, rest = min(ops.max_abs(rest[-1:]), FP32_MAX), rest[:-1]  # Σ m, R

        sums = x[first : first + size] + rest  # S
        t = np.float32(min(state["ratio"].tolist()[0] * level, FP32_MAX))
        count = min(max(ops.count_above(sums, t), -(-k // (2 * p))), self.most(k, p))
        top = ops.top_k(sums, count)
        payload = pack.encode(Sparse(top, ops.take(sums, top)), self.packing(size), ctx, work, keep=False)
        payloads = yield AllGather(payload)
        gathered = [pack.decode(each, None, self.packing(its), ops) for each, its in zip(payloads, sizes, strict=True)]
        everywhere = ops.concat([each.index + start for each, start in zip(gathered, bounds[:-1], strict=True)])
        total = Sparse(everywhere, ops.concat([each.values for each in gathered]))

        ops.subtract(rest, gathered[rank], 1.0)  # this rank's share of its region is T − R
        left = ops.first_above(rest, 0.0, size)
        own = ops.merge(Sparse(index, ops.concat(sent)), Sparse(left + first, -ops.take(rest, left)), n)

        count = len(everywhere)
        values = total.values
        kth = select.just_below(ops.kth_magnitude(values, k)) if count >= k else min(float(t), ops.max_abs(values))
        ratio = min(float(kth) / level * (4 * k + count) / (5 * k), FP32_MAX) if level else 0.0
        new = {"ratio": np.array([ratio]), "edges": regions.moved(edges, everywhere, n, ops)}
        return Reduced(total, own, {name: ops.asarray(each.astype(np.float32), like=x) for name, each in new.items()})
