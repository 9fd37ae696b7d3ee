"""Train contenders on tasks, with simulated ranks, each run in one process."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.momentum import remedies
from experiments.momentum.contenders import STEPS, TASKS, parse
from experiments.training.experiment import Task
from experiments.training.local_steps import LocalSimulation
from experiments.training.simulate import Simulation
from experiments.units import Unit

EVERY = 50  #: steps between evaluations, of which every second is left out before those that are scored
SCORED = 5  #: the score is the mean of so many last evaluations


def units_of(
    names: Sequence[str],
    contenders: Sequence[str],
    seeds: Iterable[int],
    steps: int = STEPS,
    ranks: int = 2,
    decay: bool = False,
) -> list[Unit]:
    """Return a unit of work per task, contender and seed. The seeds are the outer loop, so that pairs end early.

    Args:
        names: of tasks.
        contenders: see ``contenders.py``.
        seeds: of the runs.
        steps: of a run.
        ranks: simulated ones.
        decay: warm the learning rate up over a tenth of the steps, and let it fall to 0, in every task.

    Raises:
        ValueError: a task or a contender does not exist, or they do not fit together.
    """
    if unknown := [name for name in names if name not in TASKS]:
        raise ValueError(f"unknown task {unknown[0]!r}; available: {', '.join(TASKS)}")
    units = []
    for seed in seeds:
        for name in names:
            decays = decay or TASKS[name].decays
            changes = {"steps": steps, "decays": decays, "warmup_steps": steps // 10 if decays else 0}
            task = TASKS[name].model_copy(update=changes)
            common = {"task": name, "steps": steps, "ranks": ranks, "decays": decays, "unit": task.metric.unit}
            for contender in contenders:
                parse(contender, task)
                settings = {"task": task.model_dump(), "contender": contender, "ranks": ranks, "seed": seed}
                units.append(Unit(train, settings, {**common, "contender": contender, "seed": seed}))
    return units


def train(task: dict[str, Any], contender: str, ranks: int, seed: int) -> dict[str, Any]:
    """Train one net on all ranks' gradients.

    Returns:
        status: "done", or "diverged" if the loss or the score is NaN or Inf.
        score: the mean of the last five evaluations; None if the run diverged.
        evaluations: [step, value] each.
        ratio: dense bytes / bytes sent by the last rank.
        seconds: of the run.
    """
    remedies.register()  # this may be a process of its own
    began, usual = time.perf_counter(), Task.model_validate(task)
    chosen = parse(contender, usual)
    given = chosen.trained(usual), chosen.plan(), ranks, seed
    simulation = Simulation(*given) if chosen.local is None else LocalSimulation(*given, **chosen.local)
    steps = usual.steps
    evaluations: list[tuple[int, float]] = []
    taken, value = 0, 0.0
    for moment in simulation.steps():
        taken = moment.step + 1
        if taken % (EVERY if taken > steps - SCORED * EVERY else 2 * EVERY) == 0 or taken == steps:
            value = simulation.score()
            if not math.isfinite(value):
                break
            evaluations.append((taken, value))
    done = taken == steps and math.isfinite(value)
    return {
        "status": "done" if done else "diverged",
        "score": statistics.fmean(value for _, value in evaluations[-SCORED:]) if done else None,
        "evaluations": evaluations,
        "ratio": simulation.ratio(),
        "seconds": round(time.perf_counter() - began, 1),
    }
