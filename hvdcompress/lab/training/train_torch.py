"""Train every run of an experiment that has no result yet. Every rank runs this module.

    horovodrun -np 2 --mpi python -m hvdcompress.lab.training.train_torch runs/quickstart

``hvdcompress run`` builds that line and watches the events that rank 0 appends to
``runs/<name>/metrics/<run>.jsonl``: start, step ..., finished or failed. A run whose file ends with one
of the last two is not trained again, so the same line takes up where a killed one stopped.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.nn.functional as F

import hvdcompress
from hvdcompress.lab.training import loop, models_torch
from hvdcompress.lab.training.experiment import Run
from hvdcompress.lab.training.loop import Clock
from hvdcompress.lab.training.tasks import Batch, Bytes, Images, net_of

torch.set_num_threads(1)  # a rank a core: threads of several ranks would fight for the same ones
import horovod  # noqa: E402
import horovod.torch as hvd  # noqa: E402  (after the line above; it starts threads)

from hvdcompress.torch import Compressor  # noqa: E402


def tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as torch tensors."""
    return torch.from_numpy(batch[0]), torch.from_numpy(batch[1])


class Trainer:
    """The net, the stock Horovod optimizer around SGD, and the compression inside it."""

    def __init__(self, run: Run, data: Images | Bytes):
        torch.manual_seed(run.seed)  # same initial parameters for every method, and on every rank
        self.clip, self.clip_norm = run.task.clip, run.task.clip_norm
        self.model = models_torch.build(net_of(run.task.task, run.task.net), data)
        names, weights = list(self.model.named_parameters()), self.model.parameters()
        self.compressor = Compressor(hvdcompress.load({"seed": run.seed, **run.method.settings}), names)
        sgd = torch.optim.SGD(weights, lr=0.0, momentum=run.task.momentum, weight_decay=run.task.weight_decay)
        self.optimizer = hvd.DistributedOptimizer(sgd, named_parameters=names, compression=self.compressor)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def parameters(self) -> dict[str, np.ndarray]:
        """All parameters by name."""
        return {name: parameter.detach().numpy() for name, parameter in self.model.named_parameters()}

    def step(self, batch: Batch, rate: float, clock: Clock) -> float:
        """Forward, backward, exchange, update; returns this rank's loss."""

        def codec() -> float:
            return self.compressor.ledger.seconds()["select"]

        x, y = tensors(batch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        began, codec_began = time.perf_counter(), codec()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x).flatten(0, -2), y.flatten())
        (loss * self.clipping(loss)).backward()
        before, codec_before = time.perf_counter(), codec()
        self.optimizer.synchronize()
        after, codec_after = time.perf_counter(), codec()
        if self.clip == "after" and self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        clock.total += time.perf_counter() - began
        clock.select += codec_after - codec_began
        clock.communicate += (after - before) - (codec_after - codec_before)
        return loss.item()

    def clipping(self, loss: torch.Tensor) -> torch.Tensor | float:
        """Return the factor that clips this rank's own gradient, if it is to be clipped before the exchange.

        In the backward pass that the exchange goes along with, the first tensors are on their way before the last are
        known. So the norm comes from a pass of its own, which fires no hooks.
        """
        if self.clip == "after" or self.clip_norm is None:
            return 1.0
        own = torch.autograd.grad(loss, list(self.model.parameters()), retain_graph=True)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in own]))
        return (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[float, float]:
        """Sums over a batch: negative log-likelihood, correct."""
        x, y = tensors(batch)
        self.model.eval()
        logits = self.model(x).flatten(0, -2)
        self.model.train()
        nll = F.cross_entropy(logits, y.flatten(), reduction="sum")
        return float(nll), float((logits.argmax(1) == y.flatten()).sum())


if __name__ == "__main__":
    loop.main(__doc__, hvd, Trainer, torch, horovod)
