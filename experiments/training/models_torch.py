"""The nets that the tasks train, in PyTorch, by the names in ``tasks.NETS``; optimizer, loss, gradients and evaluation.

But for ``cnn``, there is no batch normalisation, whose running means would differ between ranks, and hardly a bias:
tensors too small to compress travel dense, and would hide what the methods save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.training.experiment import Task
from experiments.training.tasks import Batch


def digits_net(data: Any) -> nn.Module:
    """Three convolutions and two linear layers: 124 thousand parameters for pictures of 8x8."""
    channels, height, width = data.x.shape[1:]
    net = nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 256, bias=False),
        nn.ReLU(),
        nn.Linear(256, data.classes),
    )
    for layer in net:  # He's start; PyTorch's own is slow here
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return net


def lenet5(data: Any) -> nn.Module:
    """LeNet-5 with ReLUs and maxima, as Gaussian-k's study has it: 62 thousand parameters for 28x28 in grey."""
    channels, height, width = data.x.shape[1:]
    sides = [(side // 2 - 4) // 2 for side in (height, width)]
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2),  # MNIST's 28 pixels as the 32 that the net was made for
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * sides[0] * sides[1], 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, data.classes),
    )


def mlp(data: Any, width: int = 1024) -> nn.Module:
    """Two hidden layers with ReLU: 1.9 million parameters for pictures of 28x28."""
    hidden = [nn.Linear(data.x[0].size, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, data.classes))


def cnn(data: Any, width: int = 256, normalise: bool = True) -> nn.Module:
    """Two convolutions, with batch norm or biases, and two linear layers, the first one ``width`` wide: for 28x28."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32)):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1, bias=not normalise))
        layers += [*([nn.BatchNorm2d(outputs)] if normalise else []), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 7 * 7, width), nn.ReLU(), nn.Linear(width, data.classes))


def mnist_example(data: Any) -> nn.Module:
    """The net of Horovod's ``pytorch_mnist.py``, with its dropout: 22 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, 5),
        nn.Dropout2d(),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(50, data.classes),
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with group norm, around a (strided, where the shape changes) shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, channels_out)
        same = channels_in == channels_out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def _residual(data: Any, widths: tuple[int, ...], blocks: int) -> nn.Module:
    channels = widths[0]
    layers: list[nn.Module] = [nn.Conv2d(data.x.shape[1], channels, 3, padding=1, bias=False)]
    layers += [nn.GroupNorm(8, channels), nn.ReLU()]
    for stage, wanted in enumerate(widths):
        for number in range(blocks):
            layers.append(ResidualBlock(channels, wanted, 2 if stage and not number else 1))
            channels = wanted
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, data.classes))


def resnet(data: Any, width: int = 32) -> nn.Module:
    """A small residual net for pictures of any size: about 0.7 million parameters."""
    return _residual(data, (width, 2 * width, 4 * width), 2)


def resnet20(data: Any) -> nn.Module:
    """ResNet-20 for small pictures (He et al., arXiv 1512.03385, §4.2): 0.27 million parameters.

    Group norm is in the place of batch norm, and a 1x1 convolution where the paper's shortcut pads with zeros.
    """
    return _residual(data, (16, 32, 64), 3)


class TransformerBlock(nn.Module):
    """Pre-norm causal attention and a ReLU feed-forward layer; both start as the identity."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        for layer in (self.qkv, self.up):
            nn.init.normal_(layer.weight, std=width**-0.5)
        nn.init.zeros_(self.project.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, [batch, length, width] like ``x``."""
        batch, length, width = x.shape
        qkv = self.qkv(F.layer_norm(x, (width,))).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = x + self.project(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        )
        return x + self.down(F.relu(self.up(F.layer_norm(x, (width,)))))


class ByteTransformer(nn.Module):
    """A causal language model over bytes: 467 thousand parameters. Returns logits [..., 256]."""

    def __init__(self, context: int, width: int = 128, blocks: int = 2, heads: int = 4):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(blocks))
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.normal_(self.position.weight, std=0.1)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, length, 256] of tokens [batch, length]."""
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(F.layer_norm(x, x.shape[-1:]))


class ByteLSTM(nn.Module):
    """A recurrent language model over bytes: 492 thousand parameters. Returns logits [..., 256]."""

    def __init__(self, embedding: int = 128, hidden: int = 256):
        super().__init__()
        self.embed = nn.Embedding(256, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, length, 256] of tokens [batch, length]."""
        return self.head(self.lstm(self.embed(tokens))[0])


#: The text nets of the momentum study are small enough for 1500 steps in about 90 seconds on one core.
BUILDERS: dict[str, Callable[[Any], nn.Module]] = {
    **{build.__name__: build for build in (digits_net, lenet5, resnet, resnet20, mlp, cnn, mnist_example)},
    "fnn3": lambda data: mlp(data, width=200),  # of Gaussian-k's study, as in the authors' code: 199 210 for 28x28
    "mlp_wide": lambda data: mlp(data, width=2048),  # 5.8 million
    "cnn_wide": lambda data: cnn(data, width=2048, normalise=False),  # 3.2 million, nearly all of one linear layer
    "resnet_wide": lambda data: resnet(data, width=128),  # 11 million
    "byte_transformer": lambda data: ByteTransformer(data.context),
    "byte_lstm": lambda data: ByteLSTM(),
    "transformer": lambda data: ByteTransformer(data.context, width=96),
    "transformer_wide": lambda data: ByteTransformer(data.context, width=256, heads=8),  # 1.8 million
    "transformer_deep": lambda data: ByteTransformer(data.context, width=512, blocks=6, heads=8),  # 19 million
    "lstm": lambda data: ByteLSTM(embedding=64, hidden=192),
    "lstm_wide": lambda data: ByteLSTM(embedding=256, hidden=512),  # 1.8 million
}


def build(net: str, data: Any) -> nn.Module:
    """Return a new net for the data's shapes; its initial weights depend on PyTorch's seed.

    Args:
        net: a name in ``tasks.NETS``.
        data: the data set, ``Images`` or ``Bytes``.
    """
    return BUILDERS[net](data)


class MuonWithAdamW:
    """Muon for the matrices of a net's blocks, and AdamW for the other parameters; used as one optimizer.

    Args:
        task: its learning rate is that of AdamW; Muon's is ten times as large.
        net: the net.

    Attributes:
        optimizers: both optimizers.
    """

    RATIO = 10.0

    def __init__(self, task: Task, net: nn.Module):
        named = list(net.named_parameters())
        matrices = [each for name, each in named if name.startswith("blocks.") and each.ndim == 2]
        others = [each for name, each in named if not (name.startswith("blocks.") and each.ndim == 2)]
        adamw = torch.optim.AdamW(others, lr=task.learning_rate, weight_decay=task.weight_decay)
        muon = torch.optim.Muon(matrices, lr=self.RATIO * task.learning_rate, momentum=0.95, weight_decay=0.0)
        self.optimizers = [muon, adamw]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of both."""
        return [group for each in self.optimizers for group in each.param_groups]

    def step(self) -> None:
        """Take a step of both."""
        for each in self.optimizers:
            each.step()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
}


def optimizer_of(task: Task, net: nn.Module) -> Any:
    """Return the optimizer of a task, at the task's largest learning rate."""
    if task.optimizer == "muon":
        return MuonWithAdamW(task, net)
    common: dict[str, Any] = {"params": net.parameters(), "lr": task.learning_rate, "weight_decay": task.weight_decay}
    own: dict[str, Any] = {"adamw": {"betas": (task.momentum, 0.999)}, "adagrad": {}}
    return OPTIMIZERS[task.optimizer](**common, **own.get(task.optimizer, {"momentum": task.momentum}))


def _tensors(net: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return inputs and labels as tensors on the device of the net's parameters."""
    device = next(net.parameters()).device
    return torch.from_numpy(batch[0]).to(device), torch.from_numpy(batch[1]).to(device).flatten()


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of a batch, in nats, computed on the net's device."""
    x, y = _tensors(net, batch)
    return F.cross_entropy(net(x).flatten(0, -2), y)


def gradients_of(net: nn.Module, batch: Batch, clip: float | None = None) -> tuple[dict[str, np.ndarray], float]:
    """Return the gradients of a batch by parameter name, and the loss; ``clip`` bounds the norm of all of them."""
    net.zero_grad()  # the next backward pass makes new tensors, so what is returned needs no copies
    loss = loss_of(net, batch)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(net.parameters(), clip)
    return {name: parameter.grad.numpy() for name, parameter in net.named_parameters()}, loss.item()  # type: ignore[union-attr]


@torch.no_grad()
def held_out_sums(net: nn.Module, batches: Iterable[Batch]) -> list[float]:
    """Return a metric's sums over batches: log loss in nats, hits and examples. Leaves the net in training mode."""
    net.eval()
    sums = np.zeros(3)
    for batch in batches:
        x, y = _tensors(net, batch)
        logits = net(x).flatten(0, -2)
        sums += [F.cross_entropy(logits, y, reduction="sum").item(), (logits.argmax(1) == y).sum().item(), y.numel()]
    net.train()
    return sums.tolist()
