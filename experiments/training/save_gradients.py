"""Train a task dense, in one process, and save each rank's gradients of some of the steps.

    python -m experiments.training.save_gradients runs/digits.safetensors --task digits --steps 600 --window 15

They are saved from three windows of consecutive steps: at the beginning, in the middle and at the end of the training;
with ``--last``, from its last steps.

``python -m experiments compare`` then shows how every method performs on them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.training import gradients
from experiments.training.experiment import Task
from experiments.training.simulate import Simulation
from experiments.training.tasks import TASKS, net_of


def windows(steps: int, length: int) -> set[int]:
    """The steps of three windows of ``length``, at the beginning, in the middle and at the end; all, if they are few.

    >>> sorted(windows(100, 2))
    [0, 1, 49, 50, 98, 99]
    """
    starts = (0, (steps - length) // 2, steps - length)
    return {step for start in starts for step in range(start, start + length) if 0 <= step < steps}


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where to write the gradients (safetensors)")
    parser.add_argument("--task", default="digits", choices=sorted(TASKS))
    parser.add_argument("--net", help="the net that learns it (default: the task's own)")
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    saved = parser.add_mutually_exclusive_group()
    saved.add_argument("--window", type=int, default=15, help="steps of each of the three windows (default: 15)")
    saved.add_argument("--last", type=int, help="save the last steps instead, so many")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="examples per rank and step")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0, help="of the initial parameters and the batches")
    given = parser.parse_args()
    try:
        net = net_of(given.task, given.net)
        if problem := TASKS[given.task].missing():
            raise ValueError(problem)
    except ValueError as error:
        parser.error(str(error))
    sizes = {"steps": given.steps, "batch_size": given.batch_size, "learning_rate": given.learning_rate}
    task = Task(label=net, task=given.task, net=net, warmup_steps=0, decays=False, **sizes)
    chosen = windows(given.steps, given.window) if given.last is None else range(given.steps - given.last, given.steps)
    moments = Simulation(task, {"method": "none"}, given.ranks, given.seed).steps()
    kept = [moment.gradients for moment in moments if moment.step in chosen]
    gradients.save(given.file, kept)
    print(f"{given.file}: {len(kept)} steps of {given.ranks} ranks, {len(kept[0][0])} tensors")


if __name__ == "__main__":
    main()
