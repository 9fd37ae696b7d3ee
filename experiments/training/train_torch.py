"""Train every run of an experiment that has no result yet. Every rank runs this module.

    horovodrun -np 2 --mpi python -m experiments.training.train_torch runs/quickstart

``python -m experiments run`` builds that line and watches the events that rank 0 appends to
``runs/<name>/metrics/<run>.jsonl``: start, step ..., finished or failed. A run whose file ends with one
of the last two is not trained again, so the same line takes up where a killed one stopped.
"""

from __future__ import annotations

import time

import torch

from experiments.training import loop
from experiments.training.experiment import Run
from experiments.training.loop import Clock
from experiments.training.tasks import Batch, Bytes, Images
from experiments.training.torch_trainer import TorchTrainer

torch.set_num_threads(1)  # one core per rank: threads of several ranks would fight for the same ones
import horovod  # noqa: E402
import horovod.torch as hvd  # noqa: E402  (after the line above; it starts threads)

from hvdcompress.horovod.torch import Compressor  # noqa: E402


class Trainer(TorchTrainer):
    """The net, the stock Horovod optimizer around SGD, and the compression inside it."""

    def __init__(self, run: Run, data: Images | Bytes):
        super().__init__(run, data)
        names = list(self.model.named_parameters())
        self.compressor = Compressor(self.plan, names)
        self.optimizer = hvd.DistributedOptimizer(self.sgd(), named_parameters=names, compression=self.compressor)
        self.compressor.use_optimizer(self.optimizer)  # before its first step, as gradients are asked for first here
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def step(self, batch: Batch, rate: float, clock: Clock) -> float:
        """Forward, backward, exchange, update; returns this rank's loss."""
        began, codec_began = time.perf_counter(), self.codec_seconds()
        loss = self.forward(self.model, batch, rate)
        (loss * self.clipping(loss)).backward()
        before, codec_before = time.perf_counter(), self.codec_seconds()
        self.optimizer.synchronize()
        after, codec_after = time.perf_counter(), self.codec_seconds()
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        clock.total += time.perf_counter() - began
        clock.select += codec_after - codec_began
        clock.communicate += (after - before) - (codec_after - codec_before)
        return loss.item()


if __name__ == "__main__":
    loop.main(__doc__, hvd, Trainer, torch, horovod)
