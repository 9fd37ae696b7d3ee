"""A training script that knows nothing of compression, in the style of PyTorch's tutorials on DDP: a Trainer class,
a DistributedSampler, snapshots, and arguments of its own."""

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, data, optimizer, snapshot):
        self.rank = int(os.environ["RANK"])
        self.data, self.optimizer, self.snapshot = data, optimizer, snapshot
        self.model = DDP(model)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def train(self, epochs):
        for epoch in range(epochs):
            self.data.sampler.set_epoch(epoch)
            losses = [self._run_batch(source, targets) for source, targets in self.data]
            if self.rank == 0:
                print(f"epoch {epoch}, loss {sum(losses) / len(losses):.6f}")
        if self.rank == 0:
            torch.save({"model": self.model.module.state_dict(), "epochs": epochs}, self.snapshot)


def main(arguments):
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    source = torch.randn(512, 64)
    dataset = TensorDataset(source, source @ torch.randn(64, 32))
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)
    data = DataLoader(dataset, arguments.batch_size, shuffle=False, sampler=DistributedSampler(dataset))
    Trainer(model, data, optimizer, arguments.snapshot).train(arguments.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--snapshot")
    given = parser.parse_args()
    if os.environ["RANK"] == "0":
        print(json.dumps(vars(given)))
    main(given)
