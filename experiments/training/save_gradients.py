"""``python -m experiments save-gradients``: what ``compare`` and ``bench saved`` work on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def windows(steps: int, length: int) -> set[int]:
    """The steps of three windows of ``length``, at the beginning, in the middle and at the end; all, if they are few.

    >>> sorted(windows(100, 2))
    [0, 1, 49, 50, 98, 99]
    """
    starts = (0, (steps - length) // 2, steps - length)
    return {step for start in starts for step in range(start, start + length) if 0 <= step < steps}


def save_gradients(
    file: Annotated[Path, typer.Argument(help="Where to write the gradients (safetensors).")],
    task: Annotated[str, typer.Option(help="A task of experiments/training/tasks.py.")] = "digits",
    net: Annotated[str | None, typer.Option(help="The net that learns it. Default: the task's own.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 100,
    window: Annotated[int, typer.Option(min=1, help="Steps of each of three windows that are saved.")] = 15,
    last: Annotated[int | None, typer.Option(min=1, help="Save the last steps instead, so many.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Simulated ranks.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per rank and step.")] = 32,
    learning_rate: float = 0.05,
    seed: Annotated[int, typer.Option(help="Of the initial parameters and the batches.")] = 0,
) -> None:
    """Train a task dense, in one process, and save each rank's gradients of some of the steps.

    They are saved from three windows of consecutive steps: at the beginning, in the middle and at the end of the
    training; with --last, from its last steps.

    Example: python -m experiments save-gradients runs/digits.safetensors --steps 600
    """
    from experiments.training import gradients
    from experiments.training.experiment import Task
    from experiments.training.simulate import Simulation
    from experiments.training.tasks import TASKS, net_of

    name = net_of(task, net)
    if problem := TASKS[task].missing():
        raise ValueError(problem)
    rate = {"learning_rate": learning_rate, "warmup_steps": 0, "decays": False}
    sizes = {"steps": steps, "batch_size": batch_size}
    given = Task.model_validate({"label": name, "task": task, "net": name, **sizes, **rate})
    chosen = windows(steps, window) if last is None else range(steps - last, steps)
    moments = Simulation(given, {"method": "none"}, ranks, seed).steps()
    kept = [moment.gradients for moment in moments if moment.step in chosen]
    gradients.save(file, kept)
    print(f"{file}: {len(kept)} steps of {ranks} ranks, {len(kept[0][0])} tensors")
