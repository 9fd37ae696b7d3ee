"""Gradients that resemble a training's, drawn again for each step.

    gradient = level · scale · (0.5·direction + noise)

*scale* is each element's own, and stays: blocks of elements, as layers and filters have them, differ log-normally, and
so do the elements of a block. So magnitudes have a heavy tail (kurtosis about 50, where a normal distribution's is 3),
and the same elements tend to be large in each step. *direction* stays, too: what a residual holds back adds up. *noise*
is drawn for each step, half of its variance common to all ranks. *level* differs by a tenth from step to step.

Noise is a random combination of a few prepared vectors: fresh normal numbers would take a second per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.bench.devices import Device
from hvdcompress.method import Array

__all__ = ["Draws"]

BLOCK = 4096  #: elements that have a scale in common
BLOCKS, ELEMENTS = 0.7, 0.5  #: standard deviations of the logarithms of blocks' scales, and of elements' in a block
DIRECTION, COMMON, LEVEL = 0.5, 0.5, 0.1
SIZE = 1e-3  #: of a typical element
PREPARED = 4  #: vectors of which noise is combined


class Draws:
    """Gradients of several ranks, step by step.

    Args:
        n: elements of a rank's gradients.
        device: where they lie.
        seed: of the random numbers.
    """

    def __init__(self, n: int, device: Device, seed: int = 0):
        self.device, self.random = device, np.random.default_rng(seed)
        blocks = self.random.lognormal(0.0, BLOCKS, -(-n // BLOCK)).astype(np.float32)
        scale = np.exp(np.float32(ELEMENTS) * self._normal(n)) * np.repeat(blocks, BLOCK)[:n] * np.float32(SIZE)
        rows = np.empty((1 + PREPARED, n), np.float32)  # the direction, and what noise is made of
        for row in rows:
            np.multiply(self._normal(n), scale, out=row)
        self.rows = device.array(rows)

    def _normal(self, n: int) -> Any:
        return self.random.standard_normal(n, np.float32)

    def fill(self, gradients: Sequence[Sequence[Array]]) -> None:
        """Write the next step's gradients.

        Args:
            gradients: by rank and tensor, flat; as long together, for each rank, as was said, or shorter.
        """
        level = np.exp(LEVEL * self.random.standard_normal())
        common = self.random.standard_normal(PREPARED)
        for tensors in gradients:
            noise = COMMON**0.5 * common + (1.0 - COMMON) ** 0.5 * self.random.standard_normal(PREPARED)
            # at length 1, so that no step has hardly any noise
            weights = level * np.array([DIRECTION, *(noise / np.linalg.norm(noise))])
            start = 0
            for out in tensors:
                self.device.combine(weights.astype(np.float32), self.rows[:, start : start + len(out)], out)
                start += len(out)
