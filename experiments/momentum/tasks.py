"""The tasks of the study: which net learns which data, and with which optimizer. Contenders are in ``contenders.py``.

A task is plain data, so that all of its settings can be part of the name of a result's file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.training import tasks as training
from experiments.training.models_torch import ByteLSTM, ByteTransformer, build
from experiments.training.tasks import Bytes, Images, Metric


@dataclass(frozen=True)
class Task:
    """A training.

    Attributes:
        net: a key of :data:`NETS`.
        data: a key of :data:`DATA`.
        optimizer: "sgd", "adamw", "rmsprop" or "adagrad".
        rate: the learning rate of dense training.
        momentum: the momentum of SGD or RMSprop, or AdamW's beta1; Adagrad has none.
        batch: examples per rank and step.
        clip: the largest norm of each rank's gradient before the exchange; None does not clip.
        ranks: simulated ranks.
        decays: whether the rate is warmed up over a tenth of the steps and falls to 0 with a cosine, or constant.
    """

    net: str
    data: str
    optimizer: Literal["sgd", "adamw", "rmsprop", "adagrad"]
    rate: float
    momentum: float
    batch: int = 64
    clip: float | None = None
    ranks: int = 2
    decays: bool = False

    def rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of a step, from 0, of a training of ``steps``."""
        if not self.decays:
            return self.rate
        return self.rate * min(1.0, (step + 1) / max(1, steps // 10)) * 0.5 * (1 + math.cos(math.pi * step / steps))

    @property
    def metric(self) -> Metric:
        """The held-out measure: accuracy of images, bits per byte of text."""
        return training.BITS_PER_BYTE if self.data.startswith("text") else training.ACCURACY

    def make_optimizer(self, parameters: Iterable[nn.Parameter], rate: float, momentum: float) -> torch.optim.Optimizer:
        """Return the optimizer of a contender with its own rate and momentum (AdamW: beta1)."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=rate, betas=(momentum, 0.999))
        if self.optimizer == "rmsprop":
            return torch.optim.RMSprop(parameters, lr=rate, momentum=momentum)
        if self.optimizer == "adagrad":
            return torch.optim.Adagrad(parameters, lr=rate)
        return torch.optim.SGD(parameters, lr=rate, momentum=momentum)


TASKS = {
    "mlp": Task("mlp", "fashion_mnist", "sgd", rate=0.05, momentum=0.9),
    "cnn": Task("cnn", "fashion_mnist", "sgd", rate=0.02, momentum=0.9, batch=32),
    "mnist_example": Task("mnist_example", "fashion_mnist_example", "sgd", rate=0.02, momentum=0.5),
    "lstm": Task("lstm", "text48", "sgd", rate=1.0, momentum=0.9, batch=16, clip=0.25),
    "transformer": Task("transformer", "text32", "adamw", rate=0.002, momentum=0.9, batch=16),
    "transformer_rmsprop": Task("transformer", "text32", "rmsprop", rate=0.0002, momentum=0.9, batch=16),
    "transformer_adagrad": Task("transformer", "text32", "adagrad", rate=0.02, momentum=0.0, batch=16),
    # those of the papers' claims, near the largest rate that they bear; 300 steps suffice
    "fnn3": Task("fnn3", "fashion_mnist_plain", "sgd", rate=0.05, momentum=0.9, batch=32, decays=True),
    "lenet5": Task("lenet5", "fashion_mnist_plain", "sgd", rate=0.05, momentum=0.9, batch=32, decays=True),
}


def cnn(width: int, normalise: bool) -> nn.Module:
    """Return two convolutions, with batch norm or biases, and two linear layers, the first one ``width`` wide."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32)):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1, bias=not normalise))
        layers += [*([nn.BatchNorm2d(outputs)] if normalise else []), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 7 * 7, width), nn.ReLU(), nn.Linear(width, 10))


class MnistExample(nn.Module):
    """The net of Horovod's ``pytorch_mnist.py``, with its dropout: 22 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [N, 10] of images [N, 1, 28, 28]."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(F.dropout(x, training=self.training))


def mlp(width: int = 1024) -> nn.Module:
    """Return a net of two hidden layers with ReLU: 1.9 million parameters."""
    hidden = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))


#: Nets by name. The text nets are small enough for 1500 steps in about 90 seconds on one core.
NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "mlp_wide": lambda: mlp(width=2048),  # 5.8 million
    "cnn": lambda: cnn(256, normalise=True),  # 0.4 million
    "cnn_wide": lambda: cnn(2048, normalise=False),  # 3.2 million, nearly all of them in one linear layer
    "resnet": lambda: build("resnet", DATA["fashion_mnist"]()),
    "resnet_wide": lambda: build("resnet", DATA["fashion_mnist"](), width=128),  # 11 million
    "mnist_example": MnistExample,
    "lstm": lambda: ByteLSTM(embedding=64, hidden=192),
    "lstm_wide": lambda: ByteLSTM(embedding=256, hidden=512),
    "transformer": lambda: ByteTransformer(context=32, width=96),
    "transformer_wide": lambda: ByteTransformer(context=32, width=256, heads=8),
    "transformer_deep": lambda: ByteTransformer(context=128, width=512, blocks=6, heads=8),  # 19 million
    "fnn3": lambda: build("fnn3", DATA["fashion_mnist_plain"]()),
    "lenet5": lambda: build("lenet5", DATA["fashion_mnist_plain"]()),
}


@cache
def images(mean: float, deviation: float = 1.0, held_out: int = 10_000) -> Images:
    """Return Fashion-MNIST with pixels 0..1, minus ``mean``, divided by ``deviation``, as float32.

    The first ``held_out`` of the held-out images are kept.
    """
    raw = training.TASKS["fashion_mnist"].load()
    assert isinstance(raw, Images)

    def scaled(x: np.ndarray) -> np.ndarray:
        return ((x.astype(np.float32) / 255 - mean) / deviation).astype(np.float32)

    x_held_out, y_held_out = raw.x_held_out[:held_out], raw.y_held_out[:held_out]
    return replace(raw, x=scaled(raw.x), x_held_out=scaled(x_held_out), y_held_out=y_held_out)


@cache
def text(context: int) -> Bytes:
    """Return the standard library's source in windows of ``context`` bytes; 256 windows are held out."""
    raw = training.TASKS["bytes"].load()
    assert isinstance(raw, Bytes)
    return replace(raw, context=context, windows_held_out=256)


#: Data by name; the names of texts begin with "text".
DATA: dict[str, Callable[[], Any]] = {
    "fashion_mnist": lambda: images(0.286),
    "fashion_mnist_short": lambda: images(0.286, held_out=2000),  # for nets whose evaluation takes long
    "fashion_mnist_example": lambda: images(0.1307, 0.3081),  # as pytorch_mnist.py scales MNIST
    "fashion_mnist_plain": cache(training.TASKS["fashion_mnist"].load),
    "text48": lambda: text(48),
    "text32": lambda: text(32),
    "text128": lambda: text(128),
}
