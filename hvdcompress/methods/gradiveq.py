"""GradiVeQ: PCA vector quantization of convolution gradients, which commutes with summation.

Yu et al., "GradiVeQ: Vector Quantization for Bandwidth-Efficient Gradient Aggregation in Distributed CNN
Training", NeurIPS 2018 (arXiv 1811.03617).

The gradient of a convolution is cut into slices. Slices from different parts of a layer are strongly correlated, and so
are the slices of different steps. One basis U, the principal components of sampled slices, therefore serves a whole
layer. Training alternates between two kinds of steps:

    Lt steps dense:       sample slices of Σ g_n; in the last of these steps, compute U from the SVD of the samples.
                          d = the smallest number of components that drops at most the share λ of the sum of squares
    Lc steps compressed:  q_n = Uᵀ·g_n,   q = Σ q_n by all-reduce,   ĝ = U·q

The compression Q is linear, so Σ Q(g_n) = Q(Σ g_n): compressed gradients can be *summed*, for example inside a ring,
at a cost that does not grow with the number of ranks.

What is sent: in dense steps, n values by one all-reduce (4-bit QSGD in the paper: ``dense_values: qsgd4``). In
compressed steps, d values per slice and the elements that fill no slice, by one all-reduce. In the last dense step
also the result of one rank's SVD, by a broadcast: U itself, or the weights that combine the samples, which all ranks
have, into U; the shorter of the two.

Bytes: with S = ⌊n/slice⌋ and fp32, 4·n in a dense step; at the fit + 4 + 4·D·min(M, slice), with M samples and
D = ``matrix_rank`` or ⌊slice/``min_rate``⌋, at most min(M, slice), M − 1 with a mean; 4·(d·S + n mod slice) in a
compressed one. Fewer by the width of ``dense_values`` and ``values``.

State: M·slice floats of samples (at most ``max_samples``·slice, 2.4 MB for slices of 576) and D·slice of the basis
(0.2 MB); with ``mean``, n more.

When it loses: one step in five is dense (Lt = 100, Lc = 400). With dense steps in fp32, the average compression
ratio is therefore below 5. Only convolutions larger than 1×1 are compressed. The SVD makes the last dense step long. U
ages: gradients that change between two fits are approximated worse. U·q is a matrix product computed on each rank, so
ranks with different processors may differ in its last bit.

Tensors of less than a slice, and convolutions with 1×1 windows, are sent uncompressed. The dense steps start again when
the learning rate drops (``retrain_drop``) or the approximation error grows (``retrain_error``). As in the paper, there
is no error feedback by default.

Departures from the paper, all removed by ``paper: true``:
- All slices are sampled (``samples: all``), up to ``max_samples``; each step samples its share of them in turn. The
  paper samples the first slice of a layer in each step. These Lt samples span Lt − 1 dimensions, and come from one part
  of the layer.
- A slice consists of whole filters' weights, one filter or several (``order: oihw``). The paper puts the same weight of
  all F filters next to each other, then depth D, width and height (§3.2).
- No mean is added (``mean: false``). The paper's rule is q_n = Uᵀ(g_n − μ/p) and ĝ = U·q + μ, where μ is the mean of
  the Lt dense steps and U are the principal components about μ. If the mean of the gradients moves, each of the Lc
  compressed steps adds the same error. In the first steps of a training that error can make it diverge.
- d is at most slice/8 (``min_rate``), however small λ. The paper's samples limit d to Lt − 1.

Measured without feedback on 6 layers of two small nets (Fashion-MNIST and digits, a fifth of the labels random, 3
seeds, Lt 100 from step 200 on, d = slice/8), the relative error over the 400 steps that follow, median and quartiles:
0.34 (0.31 to 0.41) at 8x; 0.47 (0.41 to 0.52) with ``order: hwio``; 0.75 (0.60 to 0.81) with the paper's samples and
order, at 8x to 41x, as 99 components are few for slices of 4096. The PCA of those 400 steps themselves reaches 0.30
(0.26 to 0.35), a random basis 0.94. The mean made no difference there; with Lt 20 from a training's first step on, it
raised the paper's error on digits from 0.91 to 1.09.

Other departures:
- The slice is a multiple of D·H·W (``hwio``: F·D) of at most 4096 elements, else a divisor of it: a basis for
  F·D = 512·512 would take 100 MB per layer.
- One rank chooses d, and U is equal to the bit on all ranks: it is sent, or computed in a fixed order of additions.
- Payloads are multiplied by a power of two, 2^-k, so that no sum overflows unless the gradients do.
- The paper overlaps compression with the steps of a ring. Here that is left to the driver.

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("gradiveq", world_size=2, dense_steps=4, compressed_steps=6)
>>> rng = np.random.default_rng(0)
>>> base = rng.normal(size=(3, 1, 64, 3, 3))
>>> for step in range(5):
...     g = np.float32((rng.normal(size=(3, 16, 1, 1, 1)) * base).sum(0))  # [F, D, H, W], of rank 3
...     before = net.ledger.bytes_sent(rank=0)
...     out = net.allreduce([g, 3 * g], name="w")[0]
>>> net.ledger.bytes_sent(rank=0) - before, 4 * g.size     # each slice of 576 elements: 3 values
(192, 36864)
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
    Workspace,
    method,
)
from hvdcompress.parts import codecs, matrices, seed, wire
from hvdcompress.parts.matrices import Order


@method
class GradiVeQ(Method):
    """Sends the PCA coefficients of gradient slices instead of the slices."""

    paper = "Yu et al., NeurIPS 2018 (arXiv 1811.03617)"
    sends = "n values in each of Lt steps, then d values per slice in each of Lc steps, summed: constant in p"
    exact = False
    published: ClassVar[dict[str, Any]] = {"samples": "first", "order": "hwio", "mean": True, "min_rate": 1.0}
    unschedulable = (
        "slice_elements", "matrix_rank", "min_rate", "dense_steps", "compressed_steps", "tensors",
        "samples", "max_samples", "order", "mean",
    )  # fmt: skip
    phases = ("train", "fit", "compress")
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"dense_steps": 2, "compressed_steps": 2},
        {"dense_steps": 2, "compressed_steps": 2, "slice_elements": 10, "feedback": "plain", "max_samples": 4},
        {"dense_steps": 2, "compressed_steps": 1, "values": "qsgd8", "dense_values": "qsgd4", "mean": True},
        {"dense_steps": 2, "compressed_steps": 2, "order": "hwio", "min_rate": 2.0},
        {"dense_steps": 2, "compressed_steps": 2, "paper": True},
        {"dense_steps": 2, "compressed_steps": 2, "slice_elements": 10, "feedback": "plain", "paper": True},
        {"dense_steps": 2, "compressed_steps": 1, "feedback": "plain", "values": "qsgd8", "dense_values": "qsgd4",
         "paper": True},
        {"dense_steps": 3, "compressed_steps": 2, "matrix_rank": 2, "tensors": "all", "retrain_error": 0.9,
         "paper": True},
    )  # fmt: skip

    slice_elements: Annotated[int, Number, Field(ge=0)] = 0
    """Elements per slice. 0: near the paper's 768, a multiple of a filter's D·H·W weights (``order: hwio``: of F·D) of
    at most 4096, or else a divisor of it."""
    samples: Literal["all", "first"] = "all"
    """Which slices are sampled for the basis in each dense step. "all": every slice. "first": the first one, as in the
    paper."""
    max_samples: Count = 1024
    """Maximum number of samples of all dense steps together; each step takes at least one. A step samples the slices
    that follow those of the previous step."""
    order: Order = "oihw"
    """Order of a convolution's weights before it is cut, in every framework. "oihw": one filter's weights adjacent.
    "hwio": the same weight of all filters adjacent, as in the paper."""
    mean: bool = False
    """Whether the mean of the dense steps is subtracted, and added to each compressed step, as in the paper."""
    lam: Annotated[float, Number, Field(ge=0.0, lt=1.0)] = 0.01
    """λ, the share of the samples' sum of squares (with ``mean``: of their variance) that U may drop."""
    matrix_rank: Count | None = None
    """d, the number of components kept; at most the number of samples, less 1 with ``mean``. null: as many as ``lam``
    requires, within ``min_rate``."""
    min_rate: Annotated[float, Number, Field(ge=1.0)] = 8.0
    """Minimum number of elements per value sent: without ``matrix_rank``, d is at most slice/``min_rate``."""
    dense_steps: Annotated[int, Number, Field(ge=2, le=10_000)] = 100
    """Lt, the number of dense steps in which the basis is trained."""
    compressed_steps: Count = 400
    """Lc, the number of compressed steps that follow."""
    tensors: Literal["conv", "all"] = "conv"
    """Which tensors are compressed. "conv": convolutions larger than 1×1, as in the paper. "all": any tensor."""
    values: Values = "fp32"
    """Number format of compressed slices."""
    dense_values: Values = "fp32"
    """Number format of gradients in dense steps; the paper uses qsgd4."""
    retrain_drop: Annotated[float, Number, Field(ge=0.0, le=1.0)] = 0.5
    """Restart the dense steps when the learning rate falls below this fraction of its largest value since the last
    restart; 0: never. Meant for rates that fall in steps. A rate that decays smoothly to zero halves again and again,
    and would restart them each time."""
    retrain_error: Annotated[float, Number, Field(gt=0.0)] | None = None
    """Restart the dense steps when the error ‖g − (U·q + μ/p)‖/‖g‖ exceeds this value on any rank; null: never."""
    feedback: FeedbackName = "none"

    def slice_of(self, spec: TensorSpec) -> int:
        """Return the number of elements per slice."""
        return self.slice_elements or matrices.slice_for(*matrices.blocks(spec, self.order))

    def num_filled(self, spec: TensorSpec) -> int:
        """Return the number of elements that are part of a slice."""
        return spec.size // self.slice_of(spec) * self.slice_of(spec)

    def samples_per_step(self, spec: TensorSpec) -> int:
        """Return the number of slices that each dense step samples."""
        if self.samples == "first":
            return 1
        return min(spec.size // self.slice_of(spec), max(1, self.max_samples // self.dense_steps))

    def num_samples(self, spec: TensorSpec) -> int:
        """Return M, the number of samples for one basis."""
        return self.dense_steps * self.samples_per_step(spec)

    def max_components(self, spec: TensorSpec) -> int:
        """Return D, the largest possible d. M centred samples span at most M − 1 dimensions."""
        size = self.slice_of(spec)
        most = self.matrix_rank or max(1, int(size / self.min_rate))
        return min(most, self.num_samples(spec) - self.mean, size)

    def suits(self, spec: TensorSpec) -> bool:
        """Return True for convolutions larger than 1×1 (``tensors: all``: any tensor) of at least one slice."""
        conv = len(spec.shape) == 4 and matrices.blocks(spec)[1] > 1
        return spec.size > 0 and (conv or self.tensors == "all") and self.slice_of(spec) <= spec.size

    def phase_of(self, age: int) -> int:
        step = age % (self.dense_steps + self.compressed_steps)
        if step < self.dense_steps - 1:
            return 0  # train
        return 1 if step < self.dense_steps else 2  # fit, compress

    def state(self, spec: TensorSpec) -> dict[str, Slot]:
        size = self.slice_of(spec)
        samples = Slot((self.samples_per_step(spec), size), scope="shared", merge="keep")
        integer = Slot((1,), "int32", scope="shared", merge="keep")
        # one slot per dense step, so that a step writes its own samples only
        slots = {f"samples{step}": samples for step in range(self.dense_steps)}
        slots["basis"] = Slot((self.max_components(spec), size), scope="shared", merge="keep")  # d rows Uᵀ, then zeros
        slots["count"] = Slot((1,), scope="shared", merge="keep")  # dense steps of this round so far
        if self.mean:
            slots["mean"] = Slot((self.num_filled(spec),), scope="shared", merge="keep")  # μ of all slices
        slots["rank"] = integer  # d
        slots["since"] = integer  # ctx.triggers when the round began
        return slots

    def wants_trigger(self, metric: str, value: float, low: float, high: float) -> bool:
        return metric == "learning_rate" and value < self.retrain_drop * high

    def num_bytes(
        self, spec: TensorSpec, world_size: int, phase: int = 0, state: dict[str, Array] | None = None
    ) -> int:
        if self.phases[phase] == "compress":
            d = int(state["rank"][0]) if state else self.max_components(spec)
            count = d * (self.num_filled(spec) // self.slice_of(spec)) + spec.size - self.num_filled(spec)
            return codecs.reduced_num_bytes(count, self.values, world_size)
        dense = codecs.reduced_num_bytes(spec.size, self.dense_values, world_size)
        return dense + self.num_fit_bytes(spec) if self.phases[phase] == "fit" else dense

    def num_fit_bytes(self, spec: TensorSpec) -> int:
        """Return the bytes of the broadcast: d, and U or the weights that combine the samples into U."""
        return 4 + 4 * self.max_components(spec) * min(self.num_samples(spec), self.slice_of(spec))

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        if self.phases[ctx.phase] == "compress":
            return (yield from self.exchange_compressed(x, state, ctx, work))
        ops = work.ops
        total, own = yield from codecs.all_reduce(x, self.dense_values, ctx, work)
        new = self.collect(total, state, ctx, work)
        if self.phases[ctx.phase] == "fit":
            current = {**state, **new}
            samples = ops.concat([current[f"samples{step}"] for step in range(self.dense_steps)])
            new |= yield from self.fit_basis(samples, ctx, work)
            new["count"] = ops.zeros(1, "float32", like=x)  # the next dense steps start a new round
        return Reduced(total=total, own=own, state=new)

    def collect(self, total: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> dict[str, Array]:
        """Return the new state after a dense step: the samples of its sum Σ g_n, and the mean so far."""
        ops = work.ops
        length = self.samples_per_step(ctx.spec) * self.slice_of(ctx.spec)
        sums = matrices.arranged(total, ctx.spec, ops, self.order)[: self.num_filled(ctx.spec)]
        # a trigger during the dense steps starts a new round
        count = state["count"] * float(int(state["since"][0]) == ctx.triggers)
        step = int(count[0]) % self.dense_steps
        start = step * length % len(sums) if self.samples == "all" else 0
        stop = start + length
        samples = ops.concat([sums[start:stop], sums[: max(0, stop - len(sums))]])  # after the last slice, the first
        new = {f"samples{step}": samples, "count": count + 1.0, "since": state["since"] * 0 + ctx.triggers}
        if self.mean:  # a running mean, because the sum of Lt gradients may overflow
            share = 1.0 / new["count"]
            new["mean"] = state["mean"] * (1.0 - share) + sums * share
        return new

    def fit_basis(self, samples: Array, ctx: Context, work: Workspace) -> Generator[Any, Any, dict[str, Array]]:
        """Compute d and the basis from the samples [M × slice]. One rank runs the SVD and broadcasts its result."""
        ops = work.ops
        size = self.slice_of(ctx.spec)
        count = self.num_samples(ctx.spec)
        max_d = self.max_components(ctx.spec)
        root = zlib.crc32(ctx.spec.name.encode()) % ctx.world_size  # spreads the SVDs of a step over the ranks
        sends_basis = size < count  # otherwise the weights are shorter

        def basis_of(weights: Array, d: int) -> Array:
            # random vectors complete the basis if the samples span fewer than d dimensions
            components = ops.combine(weights[: d * count], samples, count, self.mean)
            basis = ops.orthonormalise(components, d, seed.shared_key(ctx))
            return ops.concat([basis, ops.zeros((max_d - d) * size, "float32", like=samples)])

        def make() -> Array:
            min_d = max_d if self.matrix_rank else 1
            rank, result = ops.principal(samples, count, min_d, max_d, self.lam, self.mean)
            head = ops.to_bytes(rank)
            if sends_basis:
                result = basis_of(result, int.from_bytes(ops.head_bytes(head, 4), "little"))
            return ops.concat([head, ops.to_bytes(result)])

        fit = yield Broadcast(make, root, self.num_fit_bytes(ctx.spec))
        d = int.from_bytes(ops.head_bytes(fit, 4), "little")
        if not 1 <= d <= max_d:
            raise wire.WireError(f"tensor {ctx.spec.name!r}: received {d} components, expected 1 to {max_d}")
        result = ops.from_bytes(fit[4:], "float32")
        return {"basis": result if sends_basis else basis_of(result, d), "rank": ops.from_bytes(fit[:4], "int32")}

    def exchange_compressed(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        """Sum the coefficients q of the slices and the elements that fill no slice, and compute ĝ from the sums."""
        ops = work.ops
        size = self.slice_of(ctx.spec)
        filled = self.num_filled(ctx.spec)
        slices = filled // size
        d = int(state["rank"][0])
        basis = state["basis"][: d * size]  # Uᵀ [d × slice]
        # g − μ/p is at most twice as large as the largest gradient, hence the factor 4 = 2²
        shrinkage = matrices.shrinkage(4 * size, ctx.world_size)

        def expand(payload: Array, share: float) -> Array:
            sliced = ops.matmul(payload[: slices * d], basis, slices, size)  # U·q
            if self.mean:
                sliced = sliced + state["mean"] * (shrinkage * share)
            flat = ops.scaled(ops.concat([sliced, payload[slices * d :]]), 1.0 / shrinkage)
            return matrices.stored_order(flat, ctx.spec, ops, self.order)

        shrunk = ops.scaled(matrices.arranged(x, ctx.spec, ops, self.order), shrinkage)  # [n]
        centred = shrunk[:filled]
        if self.mean:
            centred = centred - state["mean"] * (shrinkage / ctx.world_size)
        q = ops.matmul_transposed(centred, basis, slices, d)  # Uᵀg [slices × d], Uᵀ(g − μ/p) with a mean
        payload = ops.concat([q, shrunk[filled:]])
        ctx = replace(ctx, needs_own=ctx.needs_own or bool(self.retrain_error))
        total, own = yield from matrices.all_reduce(payload, shrinkage, self.values, ctx, work)
        share = expand(own, 1.0 / ctx.world_size) if ctx.needs_own else None
        retrain = False
        if self.retrain_error:
            retrain = ops.l2_norm(x - share) > self.retrain_error * ops.l2_norm(x)
        return Reduced(total=expand(total, 1.0), own=share, trigger=retrain)
