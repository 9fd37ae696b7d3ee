"""The decision: dense training, the framework's own 16 bits, or one of our methods; and what to do, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdcompress.cli.advise.measure import Measured
from hvdcompress.cli.advise.ranks import ALONE, DENSE
from hvdcompress.cli.numbers import HEADERS, duration

LITTLE = 0.05  #: part of a step that a method has to save; the threshold is ours
FAR = 2.0  #: local steps are suggested if the best contender's step takes so many times a step without an exchange
EXCHANGE = "qsgd"  #: method of local steps that lost no accuracy in docs/guides/local-steps.md


def choose(found: Sequence[Measured]) -> Measured:
    """Return the fastest contender that is surely faster than dense and lost no trial; or a simpler one if it is close.

    Dense training is the simplest one, then the framework's own 16 bits, then ours.
    """
    alone, dense = named(found, ALONE), named(found, DENSE)
    able = [one for one in found if one not in (alone, dense) and not one.lost and _is_sure(one, dense)]
    best = min([dense, *able], key=lambda one: one.seconds)
    sixteen = [one for one in able if one.contender.plan is None]
    sixteen += [one for one in able if one.contender.plan and one.contender.plan.program.main.id in ("fp16", "bf16")]
    best = next((one for one in sixteen if one.seconds <= best.seconds * (1 + LITTLE)), best)
    return best if min(best.gain(dense), alone.gain(dense)) > LITTLE else dense


def explain(found: Sequence[Measured], best: Measured, untrained: str) -> str:
    """Return the verdict and its reasons; ``untrained`` says why no losses were compared, if they were not."""
    alone, dense = named(found, ALONE), named(found, DENSE)
    if best is not dense:
        times = f"{duration(best.seconds)} instead of {duration(dense.seconds)}"
        is_known = best.trial is not None and best.trial.learns
        words = f"compress with {best.label}{'' if is_known else ', if its loss keeps up'}: a step takes {times}."
        caution = f"Losses were not compared, because {untrained}; a method with shorter steps can need more of them."
        return f"{words} {best.trial.conclusion() if best.trial else caution}"
    exchange = f"the exchange takes {_percent(max(0.0, alone.gain(dense)))} of a dense step"
    if alone.gain(dense) <= LITTLE:
        return f"do not compress: {exchange}, so there is nothing to gain."
    others = sorted((one for one in found if one not in (alone, dense)), key=lambda one: one.seconds)
    if trials := [one.trial for one in others if one.trial and one.lost]:
        return f"do not compress: shorter steps did not pay. {' '.join(trial.conclusion() for trial in trials)}"
    fastest = others[0]
    gain = fastest.gain(dense)
    if gain > LITTLE and not _is_sure(fastest, dense):
        return (
            f"do not compress: {fastest.label} seems to make a step {_percent(gain)} shorter, but the steps vary by "
            "more than that. Measure on an idle machine, or with more --rounds."
        )
    change = f"{_percent(-gain)} longer"
    if gain > 0:
        change = f"{_percent(gain)} shorter, and less than {_percent(LITTLE)} is not worth it"
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


def is_far(found: Sequence[Measured], best: Measured) -> bool:
    """Return whether even the best contender's step is much longer than a step without an exchange."""
    return best.seconds > FAR * named(found, ALONE).seconds


def local_steps(found: Sequence[Measured], best: Measured, seconds: float) -> str:
    """Return how seldom parameters must be exchanged so that it takes little of the time, in words and as a call.

    Args:
        found: all contenders.
        best: the verdict of steps that exchange gradients.
        seconds: duration of an exchange of all parameters, by :data:`EXCHANGE`.
    """
    alone = named(found, ALONE).seconds
    every = math.ceil(seconds / (LITTLE * alone))
    return (
        f"Even so, {_percent(1 - alone / best.seconds)} of a step is communication. Local steps exchange parameters "
        f"instead. An exchange took {duration(seconds)}; once in {every} steps, it takes {_percent(LITTLE)} of it. "
        "Their accuracy was not measured; with Adam, begin with a warm-up: see docs/guides/local-steps.md.\n"
        f'    local = LocalSteps(model, optimizer, every={every}, method="{EXCHANGE}")'
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
