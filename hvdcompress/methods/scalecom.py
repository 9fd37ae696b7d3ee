"""ScaleCom: cyclic local top-k (CLT-k) and a low-pass filter on the residual.

Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed
Training", NeurIPS 2020 (arXiv 2104.11125).

The ranks take turns: at step t the leader t mod p selects on its own x, and all ranks send the values at the
leader's places, which therefore can be *summed*: the cost does not grow with the number of workers (Alg. 1).

    leader L = t mod p:  I = select(x_L),  broadcast I
    all ranks:           v = x[I],  all-reduce v
    residual = (1−β)·residual + β·(x − scatter(I, v))                                       (eq. 5)

It works as far as residuals of different workers are alike, which the paper observes and the low-pass
filter furthers at large batches and learning rates (β = 0.1 there, the default here; β = 1 is plain feedback).

What travels: ⌈log2 C⌉ bits an index (its offset in a chunk of C = 1/density elements) from the leader, then
k values of each rank, summed; with ``select: exact``, Elias-Fano indices of the leader's k largest.

Bytes: chunk: 4·⌈k·⌈log2 C⌉/32⌉ + 4k, k = ⌈n/C⌉; exact: the indices as in topk, without a header, + 4k.
fp16 values: 2k; bf16: 2k + 2k/p. A broadcast is charged to every rank, as it is sent as a sum.

Departures from the paper: the paper's quasi-sort and its chunks are taken to be one index a chunk, the ragged
last chunk included. Warm-up, dense first layers and per-layer rates are a plan's ``warmup`` and ``rules``.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("scalecom", world=2, density=0.5, beta=1.0, min_elements=1)
>>> grads = [np.float32([4, 1, 0, -2]), np.float32([1, -6, 3, 2])]
>>> net.allreduce(grads, name="w")[0]          # rank 0 leads: places 0 and 3
array([2.5, 0. , 0. , 0. ], dtype=float32)
>>> net.allreduce(grads, name="w")[0]          # rank 1 leads, its residual counted: places 1 and 2
array([ 0., -5.,  3.,  0.], dtype=float32)
"""

from __future__ import annotations

from typing import Any, Literal

from hvdcompress.method import (
    Array,
    Broadcast,
    Communication,
    Context,
    Density,
    FeedbackName,
    Method,
    Reduced,
    Share,
    Sparse,
    TensorSpec,
    Values,
    method,
)
from hvdcompress.parts import codecs, pack, select


@method
class ScaleCom(Method):
    paper = "Chen et al., NeurIPS 2020 (arXiv 2104.11125)"
    sends = "k values, summed + k indices of log2(1/density) bits from one leader: constant in p"
    sparse = True
    needs_feedback = True

    density: Density = 0.01
    """Share of the elements that are sent: one in each chunk of C = 1/density elements."""
    select: Literal["chunk", "exact"] = "chunk"
    """"chunk": the largest |x| of each chunk; "exact": the k largest of the tensor."""
    values: Values = "fp32"
    """How the k values are written: fp32, fp16, bf16, qsgd2 … qsgd8, rangefloat4 … rangefloat16."""
    feedback: FeedbackName = "lowpass"
    beta: Share = 0.1
    """Low-pass factor: 0.1 is the paper's at scaled-up learning rates; 1 is plain feedback."""

    def num_kept(self, n: int) -> int:
        """k: one a chunk, or ⌊n·density⌋ with exact selection."""
        return -(-n // select.chunk_size(self.density)) if self.select == "chunk" else select.kept(self.density, n)

    def num_index_bytes(self, n: int) -> int:
        """Bytes of the leader's indices, a multiple of 4."""
        k = self.num_kept(n)
        if self.select == "exact":
            return pack.index_num_bytes(pack.best_coding(k, n), k, n)
        return 4 * -(-k * self.index_width() // 32)

    def index_width(self) -> int:
        """⌈log2 C⌉ bits."""
        return (select.chunk_size(self.density) - 1).bit_length()

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
        k = self.num_kept(spec.size)
        return self.num_index_bytes(spec.size) + codecs.reduced_num_bytes(k, self.values, world)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, ops: Any) -> Communication:
        n = ctx.spec.size
        leader = ctx.step % ctx.world  # cyclic: every rank's large entries get their turn
        packed = yield Broadcast(lambda: self.pick(x, n, ops), leader, self.num_index_bytes(n))
        index = self.unpack(packed, n, ops)  # [k] int32, ascending
        total, own = yield from codecs.all_reduce(ops.take(x, index), self.values, ctx, ops)
        return Reduced(total=Sparse(index, total), own=Sparse(index, own) if ctx.needs_own else None)

    def pick(self, x: Array, n: int, ops: Any) -> Array:
        """The leader's selection, packed [num_index_bytes] uint8."""
        if self.select == "exact":
            k = self.num_kept(n)
            return pack.encode_index(ops.top_k(x, k), pack.best_coding(k, n), n, ops)
        offsets = ops.chunk_argmax(x, select.chunk_size(self.density))  # [k] int32 < C
        return pack.padded(ops.pack_bits(offsets, self.index_width()), ops)

    def unpack(self, packed: Array, n: int, ops: Any) -> Array:
        """Packed selection -> positions [k], ascending."""
        k = self.num_kept(n)
        if self.select == "exact":
            return pack.decode_index(packed, pack.best_coding(k, n), k, n, ops)
        offsets = ops.unpack_bits(packed, self.index_width(), k)
        return ops.chunk_positions(offsets, select.chunk_size(self.density), n)
