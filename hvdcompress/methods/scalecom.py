"""ScaleCom: one rank selects the indices for all ranks (cyclic local top-k); the residual can be low-pass filtered.

Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed
Training", NeurIPS 2020 (arXiv 2104.11125), Alg. 1.

The ranks take turns as leader. The leader selects indices from its own x, and all ranks send their values at those
indices. Since the indices are the same on all ranks, the values can be *summed*, and the cost does not grow with the
number of ranks:

    x = g + residual
    leader L = t mod p:   I = select(x_L),  broadcast I
    all ranks:            v = x[I],  all-reduce v
    residual = (1−β)·residual + β·(x − scatter(I, v))                                       (eq. 5)

This works if the residuals of different ranks are similar. The paper observes that they are, and that β < 1 makes
them more similar at large batches and learning rates (β = 0.1 there; β = 1 is plain error feedback).

What is sent: the indices, by a broadcast from the leader, then k values per rank, by an all-reduce. The indices of the
leader's k largest elements are Elias-Fano coded. With ``select: chunk``, an index is the offset in a chunk of
C = 1/density elements, ⌈log2 C⌉ bits.

Bytes: exact: the indices as in topk, without a header, + 4k, k = ⌊n·density⌋; chunk: 4·⌈k·⌈log2 C⌉/32⌉ + 4k, k = ⌈n/C⌉.
fp16 values: 2k; bf16: 2k + 2k/p. A broadcast is charged to every rank, because it is sent as a sum.

When it loses: two collectives in sequence instead of one, which costs a round trip per bucket. Where ranks see
different data, the leader's indices fit the other ranks less well than their own.

Departures from the paper, all removed by ``paper: true``:
- The leader selects the k largest elements of the tensor (``select: exact``). The paper's "quasi-sort" takes the
  largest element of each chunk; it is implemented as one index per chunk, including the last, shorter chunk.
- The residual is not filtered (β = 1). The paper's 0.1 is for scaled-up batches and learning rates.

Measured with three seeds (docs/results.md, "ScaleCom's defaults"; claim S5 of ``experiments reproduce scalecom``): the
defaults lose up to 2 points more than top-k at the same density, and up to 3.3 points at compression ratios over 100.
At a ratio of 48, ``values: fp16`` with a density of 1/35 loses less than fp32 with 1/60: on text 0.01 bits instead of
0.05 with a transformer, 0.09 instead of 0.14 with an LSTM. On Fashion-MNIST, the paper's settings lose less than both
at the learning rate that is best for dense training. At a fifth of that rate, and on text, they lose more.

Warm-up, dense first layers and per-layer densities are set by a plan's ``warmup`` and ``rules``.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("scalecom", world_size=2, density=0.5, min_elements=1)
>>> grads = [np.float32([4, 1, 0, -2]), np.float32([1, -6, 3, 2])]
>>> net.allreduce(grads, name="w")[0]          # rank 0 is the leader: indices 0 and 3
array([2.5, 0. , 0. , 0. ], dtype=float32)
>>> net.allreduce(grads, name="w")[0]          # rank 1 selects from gradient + residual: indices 1 and 2
array([ 0., -5.,  3.,  0.], dtype=float32)
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar, Literal

from hvdcompress.method import (
    Array,
    Broadcast,
    Communication,
    Context,
    FeedbackName,
    Fraction,
    Granularity,
    Reduced,
    Sparse,
    TensorSpec,
    Workspace,
    method,
)
from hvdcompress.ops.scan import NOTHING, Scan
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import candidates, codecs, pack, select
from hvdcompress.parts.select import SparseMethod


@method
class ScaleCom(SparseMethod):
    """In each step one rank selects the indices, and all ranks send their values at these indices."""

    paper = "Chen et al., NeurIPS 2020 (arXiv 2104.11125)"
    sends = "k values, summed + k indices of about 2 + log2(n/k) bits from one leader: constant in p"
    published: ClassVar[dict[str, Any]] = {"select": "chunk", "feedback": "lowpass", "beta": 0.1}
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"paper": True},
        {"paper": True, "density": 1.0},
        {"paper": True, "density": 1e-9},
        *({"paper": True, "values": values} for values in ("fp16", "bf16", "qsgd4", "rangefloat8", "qsgd2")),
        {"paper": True, "values": "rangefloat11m5"},
        {"select": "exact", "beta": 0.1},
        {"select": "chunk", "beta": 1.0},
        {"select": "chunk", "beta": 0.3},
        *({"select": "chunk", "feedback": feedback} for feedback in ("none", "plain", "momentum")),
    )

    select: Literal["exact", "chunk"] = "exact"
    """Which elements the leader selects. "exact": the k largest |x| of the tensor. "chunk": the largest |x| of each
    chunk of C = 1/density elements, as in the paper."""
    feedback: FeedbackName = "lowpass"
    beta: Fraction = 1.0
    """Low-pass factor of the residual: 1 is plain feedback; 0.1 in the paper, for scaled-up learning rates."""

    @property
    def granularity(self) -> Granularity:  # type: ignore[override]
        return "part" if self.values in codecs.ELEMENTWISE else "tensor"

    def counts(self, spec: TensorSpec) -> list[int]:
        """Return k for each tensor of the bucket: the number of chunks, or ⌊n·density⌋ with exact selection."""
        if self.select == "exact":
            return [select.num_kept(self.density, size) for size in spec.parts]
        return [-(-size // select.chunk_size(self.density)) for size in spec.parts]

    def num_index_bytes(self, spec: TensorSpec) -> int:
        """Return the bytes of the leader's coded indices, a multiple of 4."""
        k = sum(self.counts(spec))
        n = spec.size
        if self.select == "exact":
            return pack.index_num_bytes(pack.best_coding(k, n), k, n)
        return 4 * -(-k * self.index_width() // 32)

    def index_width(self) -> int:
        """Return ⌈log2 C⌉, the bits per index with ``select: chunk``."""
        return (select.chunk_size(self.density) - 1).bit_length()

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        return self.num_index_bytes(spec) + codecs.reduced_num_bytes(sum(self.counts(spec)), self.values, world_size)

    def scan(self, index: int, state: dict[str, Array], ctx: Context, work: Workspace, like: Array) -> Scan:
        if ctx.rank != self.leader(ctx):
            return NOTHING
        if self.select == "exact":
            return candidates.scan(select.num_kept(self.density, ctx.spec.parts[index]), index, work)
        return Scan(chunk=select.chunk_size(self.density))

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        ops = work.ops
        packed = yield Broadcast(
            lambda: self.encode_index(x, ctx, work), self.leader(ctx), self.num_index_bytes(ctx.spec)
        )
        index = self.decode_index(packed, ctx.spec, ops)  # I [k] int32, ascending
        total, own = yield from codecs.all_reduce(ops.take(x, index), self.values, ctx, work)
        return Reduced(total=Sparse(index, total), own=Sparse(index, own) if ctx.needs_own else None)

    def leader(self, ctx: Context) -> int:
        """Return L = t mod p, the rank that selects in this step."""
        return ctx.step % ctx.world_size

    def encode_index(self, x: Array, ctx: Context, work: Workspace) -> Array:
        """Select elements of x [n] as the leader, and code their indices: uint8 [num_index_bytes(spec)]."""
        ops = work.ops
        if self.select == "exact":
            counts = self.counts(ctx.spec)
            n = ctx.spec.size
            index = select.largest(x, counts, ctx, work).index
            return pack.encode_index(index, pack.best_coding(sum(counts), n), n, ops)
        offsets = [part.offsets for part in work.scanned or ()]  # of the largest |x| in each chunk, for each tensor
        if not offsets or offsets[0] is None:
            stops = itertools.accumulate(ctx.spec.parts)
            parts = [x[stop - size : stop] for stop, size in zip(stops, ctx.spec.parts, strict=True)]
            offsets = [ops.chunk_argmax(part, select.chunk_size(self.density)) for part in parts]
        return pack.padded(ops.pack_bits(ops.concat(offsets), self.index_width()), ops)

    def decode_index(self, packed: Array, spec: TensorSpec, ops: Ops) -> Array:
        """Decode the leader's indices [k], ascending."""
        k = sum(self.counts(spec))
        n = spec.size
        if self.select == "exact":
            return pack.decode_index(packed, pack.best_coding(k, n), k, n, ops)
        offsets = ops.unpack_bits(packed, self.index_width(), k)
        return ops.chunk_positions(offsets, select.chunk_size(self.density), spec.parts)
