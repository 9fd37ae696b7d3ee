"""Other remedies for error feedback with momentum, as contenders of the study. They are not part of the library.

Each is top-k with another rule around it, in NumPy only. ``momentum`` and ``decay`` are the papers' factors; GMC and
EF21-SGDM need an optimizer without momentum, which :data:`REMEDIES` sets.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar

import numpy as np

from hvdcompress.method import (
    REGISTERED,
    AllGather,
    Array,
    Communication,
    Context,
    FeedbackName,
    Momentum,
    Reduced,
    Slot,
    Sparse,
    TensorSpec,
    Workspace,
    method,
)
from hvdcompress.methods.topk import TopK
from hvdcompress.ops.scan import NOTHING, Scan
from hvdcompress.ops.vectors import Shares
from hvdcompress.parts import pack, select

Gathering = Generator[AllGather, Any, tuple[list[Sparse], Array]]


class Remedy(TopK):
    """Top-k whose selection depends on more than gradient + residual, so nothing can be scanned in advance."""

    def scan(self, index: int, state: dict[str, Array], ctx: Context, work: Workspace, like: Array) -> Scan:
        return NOTHING

    def gather(self, chosen: Sparse, ctx: Context, work: Workspace) -> Gathering:
        """Gather the ranks' elements. Return the shares of all ranks, and their dense sum."""
        payloads = yield AllGather(pack.encode(chosen, self.packing(ctx.spec), ctx, work))
        shares = [self.decode(payload, ctx, work) for payload in payloads]
        total = np.zeros(ctx.spec.size, np.float32)
        work.ops.write(total, Shares(shares), 1.0)
        return shares, total


@method
class GMC(Remedy):
    """Global Momentum Compression (Zhao et al. 2019, arXiv 1905.12948).

    The momentum is that of the last update, which all ranks know, and it passes through the residual::

        u = g + e + β·s_{t−1}           s = mean over ranks of C(u)           e = u − C(u)           w = w − lr·s

    In the paper β·s_{t−1} is −(β/lr)·(w_t − w_{t−1}), which is the same for a constant rate.
    """

    momentum: Momentum = 0.9

    def state(self, spec: TensorSpec) -> dict[str, Slot]:
        return {"update": Slot((spec.size,), scope="shared", merge="keep")}

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        push = np.float32(self.momentum) * state["update"]
        chosen = select.largest(x + push, self.counts(ctx.spec), ctx, work)
        shares, total = yield from self.gather(chosen, ctx, work)
        own = shares[ctx.rank]
        # The feedback computes e = x − own, and x lacks β·s_{t−1}
        np.negative(push, out=push)
        push[own.index] += own.values
        return Reduced(total, push, {"update": total / np.float32(ctx.world_size)})


@method
class RegTopK(Remedy):
    """RegTop-k (Bereyhi et al. 2024, arXiv 2409.14893): elements that have just been sent are less likely to be sent.

    ::

        a = g + residual           Δ = (Σ_ranks a_{t−1} − a_{t−1}) / a_{t−1} at the elements sent in step t − 1
        send a where |a|·tanh(|1 + Δ|/μ) is among the k largest; the factor is 1 at the other elements

    Equal weights of the ranks. The denominator, and μ = 5, are those of the authors' code.
    """

    softness: float = 5.0
    """μ; a smaller one changes the selection less."""

    def state(self, spec: TensorSpec) -> dict[str, Slot]:
        return {"penalty": Slot((spec.size,))}  # 1 − tanh(|1 + Δ|/μ)

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        index = select.largest(x * (1.0 - state["penalty"]), self.counts(ctx.spec), ctx, work).index
        shares, total = yield from self.gather(Sparse(index, x[index]), ctx, work)
        own = shares[ctx.rank]
        penalty = np.zeros(len(x), np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.abs(np.nan_to_num(total[index] / own.values))  # |1 + Δ|
        penalty[index] = 1.0 - np.tanh(ratio / np.float32(self.softness))
        return Reduced(Shares(shares), own, {"penalty": penalty})


@method
class EF21SGDM(Remedy):
    """EF21 with momentum (Fatkhullin et al. 2023, arXiv 2305.15155, Alg. 1), where ranks send changes of an estimate.

    ::

        v = (1 − η)·v + η·g           c = C(v − h)           h = h + c           w = w − lr·(mean over ranks of h)

    η is 1 − ``decay``. v begins with the first gradient, as in the paper. h begins with zeros: the paper sends the
    first gradient whole.
    """

    sparse: ClassVar[bool] = False
    needs_feedback: ClassVar[bool] = False
    feedback: FeedbackName = "none"
    decay: Momentum = 0.9

    def state(self, spec: TensorSpec) -> dict[str, Slot]:
        return {
            "average": Slot((spec.size,)),
            "estimate": Slot((spec.size,)),
            "total": Slot((spec.size,), scope="shared", merge="keep"),
        }

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        kept = np.float32(self.decay if ctx.step else 0.0)
        average = kept * state["average"] + (np.float32(1.0) - kept) * x
        chosen = select.largest(average - state["estimate"], self.counts(ctx.spec), ctx, work)
        shares, change = yield from self.gather(chosen, ctx, work)
        own = shares[ctx.rank]
        estimate = state["estimate"].copy()
        estimate[own.index] += own.values
        total = state["total"] + change
        return Reduced(total, None, {"average": average, "estimate": estimate, "total": total})


CLASSES: dict[str, type[Remedy]] = {"gmc": GMC, "regtopk": RegTopK, "ef21_sgdm": EF21SGDM}
for _id, _class in CLASSES.items():
    _class.id = _id


def register() -> None:
    """Register the classes under their ids, so that plans find them; importing this module does not."""
    REGISTERED.update(CLASSES)


#: Settings by the names that they have as contenders. ``mu`` is the optimizer's momentum, and ``lr`` the factor that
#: gives EF21-SGDM, whose momentum averages, the effective rate lr/(1 − 0.9) of the other contenders.
REMEDIES: dict[str, dict[str, Any]] = {
    "lowpass": {"method": "topk", "density": 0.01, "feedback": "lowpass", "beta": 0.1},
    "gmc": {"method": "gmc", "density": 0.01, "mu": 0.0},
    "regtopk": {"method": "regtopk", "density": 0.01},
    "ef21_sgdm": {"method": "ef21_sgdm", "density": 0.01, "mu": 0.0, "lr": 10.0},
    # of 1-bit Adam (Tang et al. 2021, arXiv 2102.02888): signs with feedback after a dense phase, of gradients
    "onebit_adam": {"method": "signsgd", "route": "scatter", "warmup": {"steps": 100}},
}
