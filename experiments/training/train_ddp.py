"""Train an experiment's runs under PyTorch's DistributedDataParallel: no Horovod, no MPI. Every rank runs this module.

    torchrun --nproc-per-node 2 -m experiments.training.train_ddp runs/quickstart-ddp

``experiments run --driver ddp`` builds that line. What is written is the same as under Horovod (``train_torch``).
"""

from __future__ import annotations

import math
import time

import torch
from torch.nn.parallel import DistributedDataParallel

from experiments.training import loop
from experiments.training.experiment import Run
from experiments.training.loop import Clock
from experiments.training.tasks import Batch, Bytes, Images
from experiments.training.torch_ranks import Ranks
from experiments.training.torch_trainer import TorchTrainer
from hvdcompress import ddp

torch.set_num_threads(1)  # one core per rank: threads of several ranks would fight for the same ones


class Trainer(TorchTrainer):
    """The net in DDP, which hands its buckets to the compression, and SGD."""

    def __init__(self, run: Run, data: Images | Bytes):
        super().__init__(run, data)
        self.wrapped = DistributedDataParallel(self.model, broadcast_buffers=False)  # as under Horovod
        self.optimizer = self.sgd()
        self.compressor = ddp.attach(self.wrapped, self.plan, optimizer=self.optimizer)

    def step(self, batch: Batch, rate: float, clock: Clock) -> float:
        """Forward, backward with the exchange inside, update; returns this rank's loss."""
        began, codec_began = time.perf_counter(), self.codec_seconds()
        loss = self.forward(self.wrapped, batch, rate)
        (loss * self.clipping(loss)).backward()
        self.optimizer.step()
        clock.total += time.perf_counter() - began
        clock.select += self.codec_seconds() - codec_began
        clock.communicate = math.nan  # DDP waits inside the backward pass: it cannot be told from computing
        return loss.item()


if __name__ == "__main__":
    loop.main(__doc__, Ranks, Trainer, torch)
