"""A small net on digits, for claims about many workers."""

from __future__ import annotations

import numpy as np

from experiments.training.numpy_digits import Weights

BATCH, HIDDEN = 8, 64  #: of each worker; units


def initial(seed: int) -> Weights:
    """A net's weights."""
    rng = np.random.default_rng(seed)
    return {
        "fc1.weight": (rng.normal(size=(64, HIDDEN)) / 8).astype(np.float32),
        "fc1.bias": np.zeros(HIDDEN, np.float32),
        "fc2.weight": (rng.normal(size=(HIDDEN, 10)) / 8).astype(np.float32),
        "fc2.bias": np.zeros(10, np.float32),
    }
