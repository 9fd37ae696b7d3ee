"""Files of the gradients that each rank had in each step, and ``python -m experiments save-gradients``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

Gradients = list[list[dict[str, np.ndarray[Any, Any]]]]  # [step][rank][name]


def save(path: Path, gradients: Gradients) -> None:
    """Write gradients to a safetensors file, under keys "step/rank/name".

    Args:
        path: the file; its folder is made.
        gradients: [step][rank]{name: array}.
    """
    arrays = {
        f"{step}/{rank}/{name}": np.ascontiguousarray(array)
        for step, ranks in enumerate(gradients)
        for rank, one in enumerate(ranks)
        for name, array in one.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, path)


def load(path: Path) -> Gradients:
    """Read gradients that :func:`save` wrote, as [step][rank]{name: array}.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist; python -m experiments save-gradients {path} makes one")
    found: dict[int, dict[int, dict[str, Any]]] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                step, rank, name = key.split("/", 2)
                found.setdefault(int(step), {}).setdefault(int(rank), {})[name] = file.get_tensor(key)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} holds no gradients saved by hvdcompress: {error}") from None
    return [[found[step][rank] for rank in sorted(found[step])] for step in sorted(found)]


def windows(steps: int, length: int) -> set[int]:
    """The steps of three windows of ``length``, at the beginning, in the middle and at the end; all, if they are few.

    >>> sorted(windows(100, 2))
    [0, 1, 49, 50, 98, 99]
    """
    return {
        step
        for start in (0, (steps - length) // 2, steps - length)
        for step in range(start, start + length)
        if 0 <= step < steps
    }


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
    from experiments.training.experiment import Task
    from experiments.training.simulate import Simulation
    from experiments.training.tasks import TASKS, net_of

    name = net_of(task, net)
    TASKS[task].require()
    rate = {"learning_rate": learning_rate, "warmup_steps": 0, "decays": False}
    given = Task.model_validate(
        {"label": name, "task": task, "net": name, "steps": steps, "batch_size": batch_size, **rate}
    )
    chosen = windows(steps, window) if last is None else range(steps - last, steps)
    kept = [
        moment.gradients
        for moment in Simulation(given, {"method": "none"}, ranks, seed).steps()
        if moment.step in chosen
    ]
    save(file, kept)
    print(f"{file}: {len(kept)} steps of {ranks} ranks, {len(kept[0][0])} tensors")
