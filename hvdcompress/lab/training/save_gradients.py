"""Train one of the quickstart's tasks dense, in one process, and save each rank's gradients of the last steps.

    python -m hvdcompress.lab.training.save_gradients runs/digits.safetensors --task digits --steps 100 --last 40

``hvdcompress compare`` then shows what every method makes of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

from hvdcompress.lab.output import gradients
from hvdcompress.lab.training import models_torch
from hvdcompress.lab.training.tasks import TASKS


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where to write the gradients (safetensors)")
    known = sorted(id for id, task in TASKS.items() if not task.needs_path)
    parser.add_argument("--task", default="digits", choices=known)
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--last", type=int, default=40, help="how many of them are saved, counted from the end")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="examples a rank and step")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0, help="of the initial parameters and the batches")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)
    data = TASKS[given.task].load()
    model = getattr(models_torch, TASKS[given.task].model)(data)
    sgd = torch.optim.SGD(model.parameters(), lr=given.learning_rate, momentum=0.9)
    batches = [data.batches(rank, given.ranks, given.seed, given.batch_size) for rank in range(given.ranks)]
    kept: gradients.Gradients = []
    for step in range(given.steps):
        ranks = []
        for shares in batches:
            x, y = map(torch.from_numpy, next(shares))
            model.zero_grad()
            F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
            ranks.append({name: p.grad.clone() for name, p in model.named_parameters()})  # type: ignore[union-attr]
        if step >= given.steps - given.last:
            kept.append([{name: gradient.numpy() for name, gradient in one.items()} for one in ranks])
        for name, parameter in model.named_parameters():
            parameter.grad = torch.stack([one[name] for one in ranks]).mean(dim=0)
        sgd.step()
    gradients.save(given.file, kept)
    print(f"{given.file}: {len(kept)} steps of {given.ranks} ranks, {len(kept[0][0])} tensors")


if __name__ == "__main__":
    main()
