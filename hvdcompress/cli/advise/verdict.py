"""The decision: dense training, the framework's own 16 bits, or one of our methods; and what to do, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdcompress.cli.advise.measure import Measured
from hvdcompress.cli.advise.ranks import ALONE, DENSE
from hvdcompress.cli.numbers import HEADERS, duration
from hvdcompress.engine.compressor import EVERY

LITTLE = 0.05  #: part of a step that a method has to save; the threshold is ours


def choose(found: Sequence[Measured]) -> Measured:
    """Return the fastest contender that is surely faster than dense; or a simpler one if it is close.

    Dense training is the simplest one, then the framework's own 16 bits, then ours.
    """
    alone, dense = named(found, ALONE), named(found, DENSE)
    able = [one for one in found if one not in (alone, dense) and _is_sure(one, dense)]
    best = min([dense, *able], key=lambda one: one.seconds)
    sixteen = [one for one in able if one.contender.plan is None]
    sixteen += [one for one in able if one.contender.plan and one.contender.plan.program.main.id in ("fp16", "bf16")]
    best = next((one for one in sixteen if one.seconds <= best.seconds * (1 + LITTLE)), best)
    return best if min(best.gain(dense), alone.gain(dense)) > LITTLE else dense


def explain(found: Sequence[Measured], best: Measured) -> str:
    """Return the verdict and its reasons."""
    alone, dense = named(found, ALONE), named(found, DENSE)
    if best is not dense:
        return (
            f"compress with {best.label}: a step takes {duration(best.seconds)} instead of {duration(dense.seconds)}. "
            "Accuracy was not measured: read it from docs/which-method.md."
        )
    exchange = f"the exchange takes {_percent(max(0.0, alone.gain(dense)))} of a dense step"
    if alone.gain(dense) <= LITTLE:
        return f"do not compress: {exchange}, so there is nothing to gain."
    fastest = min((one for one in found if one not in (alone, dense)), key=lambda one: one.seconds)
    gain = fastest.gain(dense)
    if gain > LITTLE and not _is_sure(fastest, dense):
        return (
            f"do not compress: {fastest.label} seems to make a step {_percent(gain)} shorter, but the steps vary by "
            "more than that. Measure on an idle machine, or with more --rounds."
        )
    little = f"shorter, and less than {_percent(LITTLE)} is not worth it"
    change = f"{_percent(abs(gain))} {little if gain > 0 else 'longer'}"
    return (
        f"do not compress: {fastest.label}, the fastest contender, makes a step {change}. As {exchange}, larger "
        "batches or gradient accumulation may help: they exchange less often."
    )


def how_to(best: Measured, driver: str) -> str:
    """Return the lines of the user's script that apply the verdict; empty for dense training."""
    plan, settings = best.contender.plan, dict(best.contender.settings)
    if best.label == DENSE:
        return ""
    if plan is None and driver == "DDP":
        hooks = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
        return f"from {hooks} import fp16_compress_hook\nmodel.register_comm_hook(None, fp16_compress_hook)"
    if plan is None:
        return "optimizer = hvd.DistributedOptimizer(optimizer, …, compression=hvd.Compression.fp16)"
    words = ", ".join([f'"{settings.pop("method")}"', *(f"{key}={value!r}" for key, value in settings.items())])
    if driver == "DDP":
        return f"from hvdcompress import ddp\nddp.attach(model, {words})"
    call = f"hc.DistributedOptimizer(optimizer, model.named_parameters(), {words})"
    return f"from hvdcompress.horovod import torch as hc\noptimizer = {call}"


def local_steps(found: Sequence[Measured], best: Measured, driver: str) -> str:
    """Return how long a step would be if the ranks exchanged parameters every 30 steps, and the line that does it.

    Parameters are as many as gradients, so an exchange is as long as with QSGD; as without compression if QSGD was not
    measured. Returns an empty text if that is not LITTLE faster than the best contender.
    """
    alone = named(found, ALONE).seconds
    plans = [one for one in found if one.contender.plan and one.contender.plan.program.main.id == "qsgd"]
    exchange = min([named(found, DENSE), *plans], key=lambda one: one.seconds).seconds - alone
    average = alone + exchange / EVERY
    if average > best.seconds * (1 - LITTLE):
        return ""
    call = f"ddp.attach(model, local_steps={EVERY})" if driver == "DDP" else f"LocalSteps(model, every={EVERY})"
    return (
        f"Local steps are faster: if the ranks exchange parameters every {EVERY} steps, instead of gradients in every "
        f"step, a step takes about {duration(average)} on average. What that does to accuracy is in "
        f"docs/guides/local-steps.md.\n    {call}"
    )


def predict(found: Sequence[Measured], rate: float) -> dict[str, float]:
    """Return {label: seconds of a step} over links of ``rate`` bits per second.

    Measured computing and codec time, plus the ledger's bytes at the rate of the link; with two levels (``nodes`` in
    the plan), those between nodes. This assumes a link for each rank, rings, no latency, and that nothing overlaps with
    the backward pass.
    """
    computing = named(found, ALONE).seconds
    return {one.label: computing + one.codec + 8 * one.on_wire * (1 + HEADERS) / rate for one in found}


def named(found: Sequence[Measured], label: str) -> Measured:
    """Return the contender of this name."""
    return next(one for one in found if one.label == label)


def _is_sure(one: Measured, dense: Measured) -> bool:
    """Return whether a contender is faster by more than the steps vary."""
    low = one.gains(dense).low
    return one.quartiles[2] < dense.quartiles[0] if math.isnan(low) else low > 0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
