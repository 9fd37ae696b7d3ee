"""GradiVeQ: vector quantization of convolutions' gradients by principal components, which commutes with the sum.

Yu et al., "GradiVeQ: Vector Quantization for Bandwidth-Efficient Gradient Aggregation in Distributed CNN
Training", NeurIPS 2018 (arXiv 1811.03617).

A convolution's gradient is laid out so that the same weight of its F filters is adjacent, then depth D, width and
height (§3.2), and cut into slices. Slices at different places are strongly correlated, and so are steps, so one
basis serves them all: U, the principal components of the layer's first slice over Lt steps. The steps go round:

    Lt steps dense:       collect Σ g_n;  μ = mean, U from the SVD of the centred first slices, in the last of them
                          (d = the least number of components that drops at most λ of the eigenvalues' sum)
    Lc steps compressed:  q_n = Uᵀ(g_n − μ/p),   q = Σ q_n by all-reduce,   ĝ = U·q + μ

Σ Q(g_n) = Q(Σ g_n): payloads can be *summed*, in a ring, at a cost that does not grow with the workers.

What travels: n values in the dense steps (4-bit QSGD in the paper: ``dense_values: qsgd4``); then d of each slice, and
what does not fill a slice as it is, in one all-reduce. In the last of the dense steps one rank's SVD, broadcast: as
all ranks have the slices it was made of, it says how to combine them, which is shorter than U.

Bytes: with S = ⌊n/slice⌋ and fp32, 4·n in a dense step; at the fit + 4 + 4·D·Lt, D = min(Lt − 1, slice) or
``matrix_rank``; 4·(d·S + n mod slice) in a compressed one. Fewer by the width of ``dense_values`` and ``values``.

Departures from the paper: the slice is a multiple of F·D up to 4096 elements, else a divisor of F·D (a basis for
512·512 would take 100 MB a layer); U, though not d, is computed by every rank, in an order of additions that is fixed,
and equal to the bit; payloads are multiples of 2^-k, so that no sum overflows where gradients do not; the pipelined
ring is a driver's business. The paper has no error feedback, nor has the default. Windows of one place (1×1) and
tensors of less than a slice go dense. Learning rates that drop, or a loss that grows, start it again. U·q is a
matrix product, made on each rank: ranks with unlike processors may differ in its last bit.

Warm-up is a plan's, and is needed: μ of a training's first steps, added in each of the Lc that follow, can make it
diverge (a small net on digits did without, and did not after 100 dense steps).

>>> import numpy as np
>>> from hvdcompress.loopback import Loopback
>>> net = Loopback("gradiveq", world=2, dense_steps=4, compressed_steps=6)
>>> rng = np.random.default_rng(0)
>>> base = rng.normal(size=(3, 1, 1, 16, 16))
>>> for step in range(5):
...     g = np.float32((rng.normal(size=(3, 3, 3, 1, 1)) * base).sum(0)).transpose(2, 3, 0, 1)     # [F, D, H, W]
...     before = net.ledger.bytes_sent(rank=0)
...     out = net.allreduce([g, 3 * g], name="w")[0]
>>> net.ledger.bytes_sent(rank=0) - before, 4 * g.size     # each slice of 768: 3 values
(36, 9216)
"""

from __future__ import annotations

import zlib
from collections.abc import Generator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
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
from hvdcompress.parts import codecs, matrices, seed, wire


@method
class GradiVeQ(Method):
    paper = "Yu et al., NeurIPS 2018 (arXiv 1811.03617)"
    sends = "Lt steps dense, then Lc steps d values of each slice, summed: constant in p"
    exact = False
    linear = False  # μ is added once
    fixed = ("slice_elements", "matrix_rank", "dense_steps", "compressed_steps", "tensors")
    phases = ("train", "fit", "compress")
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"dense_steps": 2, "compressed_steps": 2},
        {"dense_steps": 2, "compressed_steps": 2, "slice_elements": 10, "feedback": "plain"},
        {"dense_steps": 2, "compressed_steps": 1, "feedback": "plain", "values": "qsgd8", "dense_values": "qsgd4"},
        {"dense_steps": 3, "compressed_steps": 2, "matrix_rank": 2, "tensors": "all", "retrain_error": 0.9},
    )

    slice_elements: Annotated[int, Number, Field(ge=0)] = 0
    """Elements of a slice; 0: near the paper's 768, a multiple of F·D where that is at most 4096, else a divisor."""
    lam: Annotated[float, Number, Field(ge=0.0, lt=1.0)] = 0.01
    """λ: the share of the sum of eigenvalues (of the variance) that may be dropped."""
    matrix_rank: Count | None = None
    """d, the components kept; none: as many as ``lam`` asks for. Never more than ``dense_steps`` − 1."""
    dense_steps: Annotated[int, Number, Field(ge=2)] = 100
    """Lt: dense steps of a round, in which the basis is trained."""
    compressed_steps: Count = 400
    """Lc: compressed steps of a round."""
    tensors: Literal["conv", "all"] = "conv"
    """"conv": convolutions of windows of more than one place, as in the paper; "all": matrices and others, too."""
    values: Values = "fp32"
    """How compressed slices are written: fp32, fp16, bf16, qsgd2 … qsgd8, rangefloat4 … rangefloat16."""
    dense_values: Values = "fp32"
    """How gradients are written in dense steps; the paper's is qsgd4."""
    retrain_drop: Annotated[float, Number, Field(ge=0.0, le=1.0)] = 0.5
    """Train again as soon as the learning rate falls below this share of what it was; 0: never."""
    retrain_error: Annotated[float, Number, Field(gt=0.0)] | None = None
    """Train again as soon as the loss ‖g − (U·q + μ/p)‖/‖g‖ on a rank is above this; none: never."""
    feedback: FeedbackName = "none"

    def slice_of(self, spec: TensorSpec) -> int:
        """Elements of a slice."""
        return self.slice_elements or matrices.slice_for(*matrices.filters(spec))

    def most(self, size: int) -> int:
        """The most components that there can be: Lt centred samples span Lt − 1 dimensions."""
        return min(self.matrix_rank or size, self.dense_steps - 1, size)

    def suits(self, spec: TensorSpec) -> bool:
        """A convolution of more than 1×1, or any tensor with ``tensors: all``, of at least one slice."""
        conv = len(spec.shape) == 4 and matrices.filters(spec)[1] > 1
        return spec.size > 0 and (conv or self.tensors == "all") and self.slice_of(spec) <= spec.size

    def phase_of(self, age: int) -> int:
        place = age % (self.dense_steps + self.compressed_steps)
        return (place >= self.dense_steps - 1) + (place >= self.dense_steps)

    def state(self, spec: TensorSpec) -> dict[str, Slot]:
        size = self.slice_of(spec)
        slots = {
            "history": Slot((self.dense_steps, size), scope="shared", merge="keep"),  # Σ g_n, of the first slice
            "mean": Slot((spec.size // size * size,), scope="shared", merge="keep"),  # μ, slice by slice
            "basis": Slot((self.most(size), size), scope="shared", merge="keep"),  # Uᵀ, then zeros
            "count": Slot((1,), scope="shared", merge="keep"),  # steps that are in the mean
        }
        whole = Slot((1,), "int32", scope="shared", merge="keep")
        return {**slots, "rank": whole, "since": whole}  # d; and the triggers there were when the mean was begun

    def notices(self, metric: str, value: float, low: float, high: float) -> bool:
        return metric == "learning_rate" and value < self.retrain_drop * high

    def sent(self, spec: TensorSpec, state: dict[str, Array] | None) -> int:
        """Values of a compressed step: d a slice, and what fills none. As many as can be, where d is not known."""
        size = self.slice_of(spec)
        rank = int(state["rank"][0]) if state else self.most(size)
        return rank * (spec.size // size) + spec.size % size

    def piggyback(self, spec: TensorSpec, phase: int, state: dict[str, Array]) -> int | None:
        if self.phases[phase] == "train" and self.dense_values == "fp32":
            return spec.size
        return self.sent(spec, state) if self.phases[phase] == "compress" and self.values == "fp32" else None

    def num_bytes(self, spec: TensorSpec, world: int, phase: int = 0, state: dict[str, Array] | None = None) -> int:
        if self.phases[phase] == "compress":
            return codecs.reduced_num_bytes(self.sent(spec, state), self.values, world)
        dense = codecs.reduced_num_bytes(spec.size, self.dense_values, world)
        return dense + self.num_fit_bytes(spec) * (self.phases[phase] == "fit")

    def num_fit_bytes(self, spec: TensorSpec) -> int:
        """Bytes of d, and of the combinations of the history that are the components."""
        return 4 + 4 * self.most(self.slice_of(spec)) * self.dense_steps

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, ops: Any) -> Communication:
        if self.phases[ctx.phase] == "compress":
            return (yield from self.compressed(x, state, ctx, ops))
        total, own = yield from codecs.all_reduce(x, self.dense_values, ctx, ops)
        new = self.collected(total, state, ctx, ops)
        if self.phases[ctx.phase] == "fit":
            new |= yield from self.fitted(new["history"], ctx, ops)
            new["count"] = ops.zeros(1, "float32", like=x)  # the next round begins another mean
        return Reduced(total=total, own=own, state=new)

    def collected(self, total: Array, state: dict[str, Array], ctx: Context, ops: Any) -> dict[str, Array]:
        """The sums' first slice joins the history, whose oldest leaves it; all slices join the mean."""
        size, mean = self.slice_of(ctx.spec), state["mean"]
        sums = matrices.collocated(total, ctx.spec, ops)
        # after a trigger in the middle of the training, it begins again
        count = state["count"] * float(int(state["since"][0]) == ctx.triggers) + 1.0
        mean = mean * (1.0 - 1.0 / count) + sums[: len(mean)] * (1.0 / count)  # no sum of Lt gradients: it may overflow
        history = ops.concat([state["history"][size:], sums[:size]])
        return {"history": history, "mean": mean, "count": count, "since": state["since"] * 0 + ctx.triggers}

    def fitted(self, history: Array, ctx: Context, ops: Any) -> Generator[Any, Any, dict[str, Array]]:
        """d and the basis, from the SVD that one rank makes of the history [Lt × slice]."""
        size, lt = self.slice_of(ctx.spec), self.dense_steps
        most = self.most(size)
        root = zlib.crc32(ctx.spec.name.encode()) % ctx.world  # tensors that are fitted at once take different ranks

        def make() -> Array:
            rank, weights = ops.principal(history, lt, most if self.matrix_rank else 1, most, self.lam)
            return ops.concat([ops.to_bytes(rank), ops.to_bytes(weights)])

        fit = yield Broadcast(make, root, self.num_fit_bytes(ctx.spec))
        d = int.from_bytes(ops.head_bytes(fit, 4), "little")
        if not 1 <= d <= most:
            raise wire.WireError(f"{d} components came, there can be 1 to {most}")
        weights = ops.from_bytes(fit[4:], "float32")[: d * lt]
        drawn = seed.uniform(seed.shared_key(ctx), d * size) - np.float32(0.5)  # where the history has less than d
        basis = ops.orthonormalise(ops.combine(weights, history, lt), d, fill=ops.asarray(drawn, like=history))
        unused = ops.zeros((most - d) * size, "float32", like=history)
        return {"basis": ops.concat([basis, unused]), "rank": ops.from_bytes(fit[:4], "int32")}

    def compressed(self, x: Array, state: dict[str, Array], ctx: Context, ops: Any) -> Communication:
        size, mean = self.slice_of(ctx.spec), state["mean"]
        slices, d = len(mean) // size, int(state["rank"][0])
        basis = state["basis"][: d * size]  # Uᵀ [d × slice]
        small = matrices.shrinkage(4 * size, ctx.world)  # of g − μ/p, at most twice the largest

        def expand(payload: Array, share: float) -> Array:
            filled = ops.matmul(payload[: slices * d], basis, slices, size) + mean * (small * share)  # U·q + μ
            flat = ops.scaled(ops.concat([filled, payload[slices * d :]]), 1.0 / small)
            return matrices.as_it_lay(flat, ctx.spec, ops)

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
