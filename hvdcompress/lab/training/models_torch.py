"""The nets that the tasks train: small, and nearly all of their weights in tensors of 1024 elements or more.

There is no batch normalisation, whose running means would differ between ranks, and hardly a bias:
tensors too small to compress travel dense, and would hide what the methods save.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def digits_net(data) -> nn.Module:  # type: ignore[no-untyped-def]
    """Three convolutions and two linear layers for 8x8 pictures: 124 thousand parameters."""
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 256, bias=False),
        nn.ReLU(),
        nn.Linear(256, data.classes),
    )
    for layer in net:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # PyTorch's own start is slow here
    return net


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
        batch, length, width = x.shape
        qkv = self.qkv(F.layer_norm(x, (width,))).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
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
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(F.layer_norm(x, x.shape[-1:]))


def byte_transformer(data) -> nn.Module:  # type: ignore[no-untyped-def]
    """A :class:`ByteTransformer` for the windows of ``data``."""
    return ByteTransformer(data.context)


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
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet(data, width: int = 32) -> nn.Module:  # type: ignore[no-untyped-def]
    """A small residual net for colour pictures of any size: about 0.7 million parameters."""
    stages = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
    return nn.Sequential(
        nn.Conv2d(data.x.shape[1], width, 3, padding=1, bias=False),
        nn.GroupNorm(8, width),
        nn.ReLU(),
        *(block for i, o, s in stages for block in (ResidualBlock(i, o, s), ResidualBlock(o, o, 1))),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, data.classes),
    )
