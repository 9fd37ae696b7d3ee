"""Data in memory, and the batches that ranks draw from it: pictures with labels, and text as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Batch = tuple[np.ndarray, np.ndarray]  # inputs, and the int64 class of each
HELD_OUT_BATCH = 64


@dataclass(frozen=True)
class Images:
    """Labelled pictures in memory: x [N, channels, height, width], y [N] int64."""

    x: np.ndarray
    y: np.ndarray
    x_held_out: np.ndarray
    y_held_out: np.ndarray
    classes: int
    shift: int = 0  # pictures are moved by up to so many pixels while training
    mirror: bool = False  # half of them are mirrored: right for photographs, wrong for digits
    label_noise: float = (
        0.0  # share of the labels that are drawn at random, again each time: none can be learned by heart
    )

    def batches(self, rank: int, world_size: int, seed: int, size: int) -> Iterator[Batch]:
        """Endless batches from this rank's shard, reshuffled every epoch; they depend on nothing else."""
        random = np.random.default_rng([seed, rank])
        mine = np.arange(rank, len(self.y), world_size)
        order = random.permutation(mine)
        while True:
            while len(order) < size:
                order = np.concatenate([order, random.permutation(mine)])
            chosen, order = order[:size], order[size:]
            yield prepare(self._moved(self.x[chosen], random)), self._noisy(self.y[chosen], random)

    def _moved(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return _shifted(x, random, self.shift, self.mirror) if self.shift or self.mirror else x

    def _noisy(self, y: np.ndarray, random: np.random.Generator) -> np.ndarray:
        if not self.label_noise:
            return y
        drawn = random.integers(0, self.classes, len(y))
        return np.where(random.random(len(y)) < self.label_noise, drawn, y)

    def held_out(self, rank: int, world_size: int) -> Iterator[Batch]:
        """This rank's share of the held-out set."""
        for start in range(rank * HELD_OUT_BATCH, len(self.y_held_out), world_size * HELD_OUT_BATCH):
            part = slice(start, start + HELD_OUT_BATCH)
            yield prepare(self.x_held_out[part]), self.y_held_out[part]


@dataclass(frozen=True)
class Bytes:
    """A text as bytes, cut into windows of ``context`` bytes; the class to predict is the next byte."""

    text: np.ndarray
    text_held_out: np.ndarray
    context: int = 64
    windows_held_out: int = 512
    classes: int = 256

    def _windows(self, text: np.ndarray, starts: np.ndarray) -> Batch:
        window = text[starts[:, None] + np.arange(self.context + 1)].astype(np.int64)
        return window[:, :-1], window[:, 1:]

    def batches(self, rank: int, world_size: int, seed: int, size: int) -> Iterator[Batch]:
        """Endless batches of windows at random places of this rank's part of the text."""
        random = np.random.default_rng([seed, rank])
        mine = np.array_split(self.text, world_size)[rank]
        while True:
            yield self._windows(mine, random.integers(0, len(mine) - self.context, size))

    def held_out(self, rank: int, world_size: int) -> Iterator[Batch]:
        """This rank's share of windows spread evenly over the held-out text."""
        last = len(self.text_held_out) - self.context - 1
        starts = np.linspace(0, last, self.windows_held_out).astype(np.int64)[rank::world_size]
        for start in range(0, len(starts), HELD_OUT_BATCH):
            yield self._windows(self.text_held_out, starts[start : start + HELD_OUT_BATCH])


def prepare(x: np.ndarray) -> np.ndarray:
    """Bytes 0..255 as float32 around zero; anything else as it is."""
    return (x.astype(np.float32) / 255 - 0.5) / 0.25 if x.dtype == np.uint8 else x


def _shifted(x: np.ndarray, random: np.random.Generator, pad: int, mirror: bool) -> np.ndarray:
    """Every picture moved by up to ``pad`` pixels, and with ``mirror`` half of them mirrored."""
    height, width = x.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)), mode="edge")
    out = np.empty_like(x)
    for i, (dy, dx, turn) in enumerate(random.integers(0, [2 * pad + 1, 2 * pad + 1, 1 + mirror], (len(x), 3))):
        moved = padded[i, :, dy : dy + height, dx : dx + width]
        out[i] = moved[:, :, ::-1] if turn else moved
    return out


def split(count: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Indices for training and held out: always the same ones, whatever the experiment's seed."""
    order = np.random.default_rng(1797).permutation(count)
    held_out = max(1, round(count * share))
    return order[held_out:], order[:held_out]
