"""Real steps, plan against plan: the same model, optimizer and ranks, in turns."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

from experiments.advise.fabric import Fabric
from experiments.advise.workload import Workload
from hvdcompress.plan import Plan, load

__all__ = ["measure", "stages"]

WARM = 3  # steps before the first that counts, at least: ranks compare plans, buffers are made, residuals are filled
SETTLING = 0.5  # of a turn, for which it is made ready
LEAST, MOST = 2, 100  # steps of a turn


def stages(plans: Mapping[str, Mapping[str, Any]]) -> dict[str, Plan | None]:
    """Plans as :func:`measure` takes them, from their dicts."""
    return {label: None if plan == {"method": "none"} else load(plan) for label, plan in plans.items()}


def measure(
    fabric: Fabric,
    workload: Workload,
    plans: Mapping[str, Plan | None],
    rounds: int,
    seconds: float,
    say: Callable[[str], None],
) -> dict[str, list[float]]:
    """Measure steps; each round begins with another plan, so that none always comes after the same one.

    Args:
        fabric: the ranks.
        workload: what is trained.
        plans: by label; None is the stock optimizer, or DDP without a hook.
        rounds: turns of each plan.
        seconds: how long a turn lasts, warm-up aside; at least two steps.
        say: called with what is measured next.

    Returns:
        Seconds of each step by label: those of the rank that took longest; all begin together.
    """
    found: dict[str, list[float]] = {label: [] for label in plans}
    order = list(plans)
    for number in range(rounds):
        first = number * len(order) // rounds
        for label in order[first:] + order[:first]:
            say(f"measuring {label} on {workload.name}, round {number + 1} of {rounds}")
            found[label] += _turn(fabric, workload, plans[label], seconds)
    return found


def _turn(fabric: Fabric, workload: Workload, plan: Plan | None, seconds: float) -> list[float]:
    model, loss = workload.make(fabric.rank, fabric.world_size)
    module, optimizer, compressor = fabric.wrap(model, plan, workload.optimizer(model))
    steps = (_step(fabric, module, optimizer, loss, workload.waits) for _ in itertools.count())
    last = max(fabric.share(next(steps)))
    if last < seconds or (plan and not plan.stateless):  # buffers are touched, residuals fill up, thresholds settle
        last = max(fabric.share([next(steps) for _ in range(WARM - 1)][-1]))
        for _ in range(min(MOST, round(seconds * SETTLING / last))):
            next(steps)
    times = [next(steps) for _ in range(min(MOST, max(LEAST, round(seconds / last))))]
    every = fabric.share(times)
    if compressor:
        compressor.release()
    del model, loss, module, optimizer, compressor, steps
    gc.collect()  # hooks and their optimizers hold each other
    return [max(each) for each in zip(*every, strict=True)]


def _step(fabric: Fabric, module: Any, optimizer: Any, loss: Callable[[Any], Any], prepared: bool) -> float:
    """One step's seconds; what only prepares gradients is not counted."""
    optimizer.zero_grad()
    if not prepared:
        fabric.meet()
        began = time.perf_counter()
        loss(module).backward()
    else:
        value = loss(module)
        fabric.meet()
        began = time.perf_counter()
        value.backward()
    optimizer.step()
    return time.perf_counter() - began
