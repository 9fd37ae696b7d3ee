"""A training script that knows nothing of compression, in the style of PyTorch's tutorials on DDP: with a
DistributedSampler, snapshots, and arguments of its own."""

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    source = torch.randn(512, 64)
    dataset = TensorDataset(source, source @ torch.randn(64, 32))
    model = DDP(torch.nn.Linear(64, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    sampler = DistributedSampler(dataset)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for source, targets in DataLoader(dataset, 32, sampler=sampler):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(source), targets)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}, loss {loss.item():.6f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.snapshot)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--snapshot")
    args = parser.parse_args()
    if os.environ["RANK"] == "0":
        print(json.dumps(vars(args)))
    main(args)
