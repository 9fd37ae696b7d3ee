"""The DDP script as a Ray Train job with compressed gradients, on any nodes of a Ray cluster.

python examples/ray_compressed.py
"""

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from sklearn.datasets import load_digits

from hvdcompress import ddp


def train() -> None:
    """Train on one rank. Ray has initialized the process group."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 0

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    model = prepare_model(model)  # wraps the model in DistributedDataParallel if there are several ranks
    ddp.attach(model, "scalecom", density=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = (~held_out).nonzero().flatten()[rank::world_size]
    for _ in range(600):
        batch = mine[torch.randint(len(mine), (32,))]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    accuracy = (model(images[held_out]).argmax(1) == labels[held_out]).float().mean().item()
    if rank == 0:
        print(f"loss {loss.item():.4f}, held-out accuracy {accuracy:.1%}")


if __name__ == "__main__":
    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
