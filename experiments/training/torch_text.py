"""Nets over bytes, in PyTorch: a causal transformer and an LSTM."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


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


class ByteLSTM(nn.Module):
    """A recurrent language model over bytes: 492 thousand parameters. Returns logits [..., 256]."""

    def __init__(self, embedding: int = 128, hidden: int = 256):
        super().__init__()
        self.embed = nn.Embedding(256, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


def byte_lstm(data) -> nn.Module:  # type: ignore[no-untyped-def]
    """A :class:`ByteLSTM`; it takes windows of any length."""
    return ByteLSTM()
