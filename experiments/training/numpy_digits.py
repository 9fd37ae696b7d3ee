"""A training that takes a second, in numpy alone: a two-layer net on scikit-learn's handwritten digits."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

Weights = dict[str, np.ndarray[Any, Any]]


@cache
def load() -> tuple[np.ndarray[Any, Any], ...]:
    """Training images [n, 64] float32 and labels, 300 held-out images and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, y = (data.data / 16 - 0.3).astype(np.float32)[order], data.target[order]
    return x[300:], y[300:], x[:300], y[:300]


def loss_and_gradient(w: Weights, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[float, Weights]:
    """Return the net's cross-entropy and its gradient.

    Weights: ``fc1.weight`` [64, hidden], ``fc1.bias``, ``fc2.weight`` [hidden, 10] and ``fc2.bias``.
    """
    hidden = np.maximum(x @ w["fc1.weight"] + w["fc1.bias"], 0)
    logits = hidden @ w["fc2.weight"] + w["fc2.bias"]
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    loss = float(-np.log(p[rows, y] + 1e-12).mean())
    p[rows, y] -= 1
    p /= len(y)
    back = (p @ w["fc2.weight"].T) * (hidden > 0)
    found = {"fc1.weight": x.T @ back, "fc1.bias": back.sum(0), "fc2.weight": hidden.T @ p, "fc2.bias": p.sum(0)}
    return loss, {name: gradient.astype(np.float32) for name, gradient in found.items()}
