"""What is the same of a PyTorch training whichever driver exchanges the gradients: net, SGD, clipping, evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import hvdcompress
from experiments.training import models_torch
from experiments.training.experiment import Run
from experiments.training.tasks import Batch, Bytes, Images, net_of


def tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as torch tensors."""
    return torch.from_numpy(batch[0]), torch.from_numpy(batch[1])


class TorchTrainer:
    """The net of a run. Subclasses add the compression, the optimizer, and a step.

    Attributes:
        plan: the method's, with the task's clipping after the exchange.
        compressor: the compression.
        optimizer: the one that updates.
    """

    compressor: Any
    optimizer: Any

    def __init__(self, run: Run, data: Images | Bytes):
        torch.manual_seed(run.seed)  # same initial parameters for every method, and on every rank
        self.task = run.task
        # clipped by the Compressor, as what the optimizer is handed is larger where momentum is cancelled
        clip = {"clip_norm": run.task.clip_norm} if run.task.clip == "after" else {}
        self.plan = hvdcompress.load({"seed": run.seed, **run.method.settings, **clip})
        self.model = models_torch.build(net_of(run.task.task, run.task.net), data)

    def sgd(self) -> torch.optim.SGD:
        """The task's optimizer; each step sets its learning rate."""
        task = self.task
        return torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=task.momentum, weight_decay=task.weight_decay)

    def parameters(self) -> dict[str, np.ndarray]:
        """All parameters by name."""
        return {name: parameter.detach().numpy() for name, parameter in self.model.named_parameters()}

    def codec_seconds(self) -> float:
        """Seconds at work in codecs so far."""
        return self.compressor.ledger.seconds()["codec"]

    def forward(self, model: torch.nn.Module, batch: Batch, rate: float) -> torch.Tensor:
        """Set the learning rate, forget the gradients, and return the loss of a batch."""
        x, y = tensors(batch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    def clipping(self, loss: torch.Tensor) -> torch.Tensor | float:
        """Return the factor that clips this rank's own gradient, if it is to be clipped before the exchange.

        In the backward pass that the exchange goes along with, the first tensors are on their way before the last are
        known. So the norm comes from a pass of its own, which fires no hooks.
        """
        if self.task.clip == "after" or self.task.clip_norm is None:
            return 1.0
        own = torch.autograd.grad(loss, list(self.model.parameters()), retain_graph=True)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in own]))
        return (self.task.clip_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[float, float]:
        """Sums over a batch: negative log-likelihood, correct."""
        x, y = tensors(batch)
        self.model.eval()
        logits = self.model(x).flatten(0, -2)
        self.model.train()
        nll = F.cross_entropy(logits, y.flatten(), reduction="sum")
        return float(nll), float((logits.argmax(1) == y.flatten()).sum())
