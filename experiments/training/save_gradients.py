"""Train a task dense, in one process, and save each rank's gradients of some of the steps.

    python -m experiments.training.save_gradients runs/digits.safetensors --task digits --steps 600 --window 15

They are saved from three windows of consecutive steps: at the beginning, in the middle and at the end of the training;
with ``--last``, from its last steps.

``python -m experiments compare`` then shows how every method performs on them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from experiments.training import gradients, models_torch
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
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)
    try:
        net = net_of(given.task, given.net)
        if problem := TASKS[given.task].missing():
            raise ValueError(problem)
        data = TASKS[given.task].load()
    except ValueError as error:
        parser.error(str(error))
    model = models_torch.build(net, data)
    chosen = windows(given.steps, given.window) if given.last is None else range(given.steps - given.last, given.steps)
    sgd = torch.optim.SGD(model.parameters(), lr=given.learning_rate, momentum=0.9)
    batches = [data.batches(rank, given.ranks, given.seed, given.batch_size) for rank in range(given.ranks)]
    kept: gradients.Gradients = []
    for step in range(given.steps):
        ranks = [models_torch.gradients_of(model, next(shares))[0] for shares in batches]
        if step in chosen:
            kept.append(ranks)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.stack([torch.from_numpy(one[name]) for one in ranks]).mean(dim=0)
        sgd.step()
    gradients.save(given.file, kept)
    print(f"{given.file}: {len(kept)} steps of {given.ranks} ranks, {len(kept[0][0])} tensors")


if __name__ == "__main__":
    main()
