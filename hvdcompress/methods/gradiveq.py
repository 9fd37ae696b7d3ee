"""GradiVeQ: PCA vector quantization of convolution gradients, which commutes with summation.

Yu et al., "GradiVeQ: Vector Quantization for Bandwidth-Efficient Gradient Aggregation in Distributed CNN
Training", NeurIPS 2018 (arXiv 1811.03617).

A convolution's gradient is laid out so that the same weight of its F filters is adjacent, then depth D, width and
height (§3.2), and cut into slices. Slices at different places of a layer are strongly correlated, and so are the
slices of different steps. One basis U therefore serves a whole layer: the principal components of its first slice,
collected over Lt steps. Training alternates between two kinds of steps:

    Lt steps dense:       collect Σ g_n;  μ = mean over steps;  in the last of them, U from the SVD of the centred
                          first slices, with d = the least number of components that drops at most the share λ
                          of the eigenvalues' sum
    Lc steps compressed:  q_n = Uᵀ(g_n − μ/p),   q = Σ q_n by all-reduce,   ĝ = U·q + μ

The compression Q is linear up to μ, so Σ Q(g_n) = Q(Σ g_n): compressed gradients can be *summed*, for example inside
a ring, at a cost that does not grow with the number of ranks.

What is sent: in dense steps, n values by one all-reduce (4-bit QSGD in the paper: ``dense_values: qsgd4``). In
compressed steps, d values per slice and the elements that fill no slice, by one all-reduce. In the last dense step
also the result of one rank's SVD, by a broadcast: not U, but how to combine the collected slices, which all ranks
have, into U. That is shorter.

Bytes: with S = ⌊n/slice⌋ and fp32, 4·n in a dense step; at the fit + 4 + 4·D·Lt, D = min(Lt − 1, slice) or
``matrix_rank``; 4·(d·S + n mod slice) in a compressed one. Fewer by the width of ``dense_values`` and ``values``.

Use a plan's ``warmup`` with it. μ of the first steps of training is added in each of the Lc steps that follow, and can
make training diverge (a small network on digits diverged without warm-up, and did not with 100 dense steps first).

Tensors of less than a slice, and convolutions with 1×1 windows, are sent dense. The dense steps start again when the
learning rate drops (``retrain_drop``) or the approximation error grows (``retrain_error``).

Departures from the paper:
- The slice is a multiple of F·D of at most 4096 elements, else a divisor of F·D: a basis for F·D = 512·512 would take
  100 MB per layer.
- d comes from one rank. U is computed on every rank, in a fixed order of additions, and is equal to the bit.
- Payloads are multiplied by a power of two, 2^-k, so that no sum overflows unless the gradients do.
- The paper overlaps compression with the steps of a ring. Here that is left to the driver.

As in the paper, there is no error feedback by default. U·q is a matrix product computed on each rank: ranks with
different processors may differ in its last bit.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("gradiveq", world=2, dense_steps=4, compressed_steps=6)
>>> rng = np.random.default_rng(0)
>>> base = rng.normal(size=(3, 1, 1, 16, 16))
>>> for step in range(5):
...     g = np.float32((rng.normal(size=(3, 3, 3, 1, 1)) * base).sum(0)).transpose(2, 3, 0, 1)     # [F, D, H, W]
...     before = net.ledger.bytes_sent(rank=0)
...     out = net.allreduce([g, 3 * g], name="w")[0]
>>> net.ledger.bytes_sent(rank=0) - before, 4 * g.size     # each slice of 768 elements: 3 values
(36, 9216)
"""

from __future__ import annotations

import zlib
from collections.abc import Generator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hvdcompress.method import (
    Array,
    Broadcast,
    Communication,
    Context,
    Count,
    FeedbackName,
    Method,
    Number,
    Reduced,
    Slot,
    TensorSpec,
    Values,
    method,
)
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import codecs, matrices, seed, wire


@method
class GradiVeQ(Method):
    """Sends coefficients of PCA basis vectors in place of gradient slices."""

    paper = "Yu et al., NeurIPS 2018 (arXiv 1811.03617)"
    sends = "Lt steps dense, then Lc steps d values of each slice, summed: constant in p"
    exact = False
    linear = False  # μ is added to the sum, once
    fixed = ("slice_elements", "matrix_rank", "dense_steps", "compressed_steps", "tensors")
    phases = ("train", "fit", "compress")
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"dense_steps": 2, "compressed_steps": 2},
        {"dense_steps": 2, "compressed_steps": 2, "slice_elements": 10, "feedback": "plain"},
        {"dense_steps": 2, "compressed_steps": 1, "feedback": "plain", "values": "qsgd8", "dense_values": "qsgd4"},
        {"dense_steps": 3, "compressed_steps": 2, "matrix_rank": 2, "tensors": "all", "retrain_error": 0.9},
    )

    slice_elements: Annotated[int, Number, Field(ge=0)] = 0
    """Elements per slice. 0: near the paper's 768, a multiple of F·D of at most 4096, or else a divisor of F·D."""
    lam: Annotated[float, Number, Field(ge=0.0, lt=1.0)] = 0.01
    """λ, the share of the eigenvalues' sum (of the variance) that may be dropped."""
    matrix_rank: Count | None = None
    """d, the number of components kept, at most ``dense_steps`` − 1. null: as many as ``lam`` requires."""
    dense_steps: Annotated[int, Number, Field(ge=2)] = 100
    """Lt, the number of dense steps in which the basis is trained."""
    compressed_steps: Count = 400
    """Lc, the number of compressed steps that follow."""
    tensors: Literal["conv", "all"] = "conv"
    """What is compressed. "conv": convolutions with windows larger than 1×1, as in the paper. "all": any tensor."""
    values: Values = "fp32"
    """Number format of compressed slices: fp32, fp16, bf16, qsgd2 … qsgd8, rangefloat4 … rangefloat16."""
    dense_values: Values = "fp32"
    """Number format of gradients in dense steps; the paper uses qsgd4."""
    retrain_drop: Annotated[float, Number, Field(ge=0.0, le=1.0)] = 0.5
    """Train the basis again when the learning rate falls below this fraction of its largest value since the last
    such restart; 0: never."""
    retrain_error: Annotated[float, Number, Field(gt=0.0)] | None = None
    """Train the basis again when the error ‖g − (U·q + μ/p)‖/‖g‖ exceeds this on any rank; null: never."""
    feedback: FeedbackName = "none"

    def slice_of(self, spec: TensorSpec) -> int:
        """Return the number of elements per slice."""
        return self.slice_elements or matrices.slice_for(*matrices.filters(spec))

    def max_components(self, size: int) -> int:
        """Return the largest possible d for a slice of ``size`` elements: Lt centred samples span Lt − 1 dimensions."""
        return min(self.matrix_rank or size, self.dense_steps - 1, size)

    def suits(self, spec: TensorSpec) -> bool:
        """Return True for convolutions larger than 1×1, or any tensor with ``tensors: all``, of at least one slice."""
        conv = len(spec.shape) == 4 and matrices.filters(spec)[1] > 1
        return spec.size > 0 and (conv or self.tensors == "all") and self.slice_of(spec) <= spec.size

    def phase_of(self, age: int) -> int:
        place = age % (self.dense_steps + self.compressed_steps)
        return (place >= self.dense_steps - 1) + (place >= self.dense_steps)

    def state(self, spec: TensorSpec) -> dict[str, Slot]:
        size = self.slice_of(spec)
        slots = {
            "history": Slot((self.dense_steps, size), scope="shared", merge="keep"),  # Σ g_n of the first slice
            "mean": Slot((spec.size // size * size,), scope="shared", merge="keep"),  # μ of all slices
            "basis": Slot((self.max_components(size), size), scope="shared", merge="keep"),  # Uᵀ, then zeros
            "count": Slot((1,), scope="shared", merge="keep"),  # number of steps in the mean
        }
        whole = Slot((1,), "int32", scope="shared", merge="keep")
        return {**slots, "rank": whole, "since": whole}  # d; the number of triggers when the mean was started

    def notices(self, metric: str, value: float, low: float, high: float) -> bool:
        return metric == "learning_rate" and value < self.retrain_drop * high

    def num_values(self, spec: TensorSpec, state: dict[str, Array] | None) -> int:
        """Return the number of values of a compressed step; without a state, the largest possible number."""
        size = self.slice_of(spec)
        rank = int(state["rank"][0]) if state else self.max_components(size)
        return rank * (spec.size // size) + spec.size % size

    def piggyback(self, spec: TensorSpec, phase: int, state: dict[str, Array]) -> int | None:
        if self.phases[phase] == "train" and self.dense_values == "fp32":
            return spec.size
        return self.num_values(spec, state) if self.phases[phase] == "compress" and self.values == "fp32" else None

    def num_bytes(self, spec: TensorSpec, world: int, phase: int = 0, state: dict[str, Array] | None = None) -> int:
        if self.phases[phase] == "compress":
            return codecs.reduced_num_bytes(self.num_values(spec, state), self.values, world)
        dense = codecs.reduced_num_bytes(spec.size, self.dense_values, world)
        return dense + self.num_fit_bytes(spec) * (self.phases[phase] == "fit")

    def num_fit_bytes(self, spec: TensorSpec) -> int:
        """Return the bytes of the fit: d, and the weights that combine the history into the components."""
        return 4 + 4 * self.max_components(self.slice_of(spec)) * self.dense_steps

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, ops: Ops) -> Communication:
        if self.phases[ctx.phase] == "compress":
            return (yield from self.exchange_compressed(x, state, ctx, ops))
        total, own = yield from codecs.all_reduce(x, self.dense_values, ctx, ops)
        new = self.collect(total, state, ctx, ops)
        if self.phases[ctx.phase] == "fit":
            new |= yield from self.fit_basis(new["history"], ctx, ops)
            new["count"] = ops.zeros(1, "float32", like=x)  # the next dense steps start a new mean
        return Reduced(total=total, own=own, state=new)

    def collect(self, total: Array, state: dict[str, Array], ctx: Context, ops: Ops) -> dict[str, Array]:
        """Add a sum to the state: its first slice replaces the oldest of the history; all slices go into the mean."""
        size, mean = self.slice_of(ctx.spec), state["mean"]
        sums = matrices.collocated(total, ctx.spec, ops)
        # a trigger during the dense steps restarts the mean
        count = state["count"] * float(int(state["since"][0]) == ctx.triggers) + 1.0
        # a running mean, because the sum of Lt gradients may overflow
        mean = mean * (1.0 - 1.0 / count) + sums[: len(mean)] * (1.0 / count)
        history = ops.concat([state["history"][size:], sums[:size]])
        return {"history": history, "mean": mean, "count": count, "since": state["since"] * 0 + ctx.triggers}

    def fit_basis(self, history: Array, ctx: Context, ops: Ops) -> Generator[Any, Any, dict[str, Array]]:
        """Compute d and the basis from the history [Lt × slice]. One rank runs the SVD and broadcasts its result."""
        size, lt = self.slice_of(ctx.spec), self.dense_steps
        most = self.max_components(size)
        root = zlib.crc32(ctx.spec.name.encode()) % ctx.world  # spreads the tensors of a step over ranks

        def make() -> Array:
            rank, weights = ops.principal(history, lt, most if self.matrix_rank else 1, most, self.lam)
            return ops.concat([ops.to_bytes(rank), ops.to_bytes(weights)])

        fit = yield Broadcast(make, root, self.num_fit_bytes(ctx.spec))
        d = int.from_bytes(ops.head_bytes(fit, 4), "little")
        if not 1 <= d <= most:
            raise wire.WireError(f"received {d} components, expected 1 to {most}")
        weights = ops.from_bytes(fit[4:], "float32")[: d * lt]
        # random vectors complete the basis if the history spans fewer than d dimensions
        basis = ops.orthonormalise(ops.combine(weights, history, lt), d, seed.shared_key(ctx))
        unused = ops.zeros((most - d) * size, "float32", like=history)
        return {"basis": ops.concat([basis, unused]), "rank": ops.from_bytes(fit[:4], "int32")}

    def exchange_compressed(self, x: Array, state: dict[str, Array], ctx: Context, ops: Ops) -> Communication:
        """Sum the slices' coefficients q, and the elements that fill no slice; then expand them to ĝ."""
        size, mean = self.slice_of(ctx.spec), state["mean"]
        slices, d = len(mean) // size, int(state["rank"][0])
        basis = state["basis"][: d * size]  # Uᵀ [d × slice]
        small = matrices.shrinkage(4 * size, ctx.world)  # g − μ/p is at most twice as large as the largest gradient

        def expand(payload: Array, share: float) -> Array:
            filled = ops.matmul(payload[: slices * d], basis, slices, size) + mean * (small * share)  # U·q + μ
            flat = ops.scaled(ops.concat([filled, payload[slices * d :]]), 1.0 / small)
            return matrices.stored_order(flat, ctx.spec, ops)

        shrunk = matrices.collocated(x, ctx.spec, ops) * small  # [n]
        centred = shrunk[: len(mean)] - mean * (small / ctx.world)
        q = ops.matmul_transposed(centred, basis, slices, d)  # Uᵀ(g − μ/p) [slices × d]
        payload = ops.concat([q, shrunk[len(mean) :]])
        ctx = replace(ctx, needs_own=ctx.needs_own or bool(self.retrain_error))
        total, own = yield from matrices.all_reduce(payload, small, self.values, ctx, ops)
        share = expand(own, 1.0 / ctx.world) if ctx.needs_own else None
        lost = False
        if self.retrain_error:
            lost = matrices.norm(x - share, ops) > self.retrain_error * matrices.norm(x, ops)
        return Reduced(total=expand(total, 1.0), own=share, trigger=lost)
