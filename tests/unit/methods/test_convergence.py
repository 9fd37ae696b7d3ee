"""A small task, trained dense and compressed from one seed: every method must end close to dense.

A two-layer net on scikit-learn's digits, four ranks in loopback. With ``--slow`` all methods are tried, with their
sparsest sensible settings. A sparse method that forgets its residuals must fail.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import hvdcompress
from experiments.training.numpy_digits import Weights, load, loss_and_gradient
from hvdcompress import registry
from hvdcompress.loopback import Loopback
from hvdcompress.ops import fast
from hvdcompress.parts import seed

WORLD, STEPS, BATCH, HIDDEN = 4, 300, 32, 24


def digits() -> tuple[np.ndarray[Any, Any], ...]:
    pytest.importorskip("sklearn.datasets")
    return load()


def initial() -> Weights:
    rng = np.random.default_rng(1)
    return {
        "fc1.weight": (rng.normal(size=(64, HIDDEN)) / 8).astype(np.float32),
        "fc1.bias": np.zeros(HIDDEN, np.float32),
        "fc2.weight": (rng.normal(size=(HIDDEN, 10)) / 5).astype(np.float32),
        "fc2.bias": np.zeros(10, np.float32),
    }


def train(method: str, steps: int = STEPS, **settings: Any) -> tuple[float, float, Loopback]:
    """Return the training loss, the held-out accuracy in percent after ``steps``, and the network."""
    x, y, held_x, held_y = digits()
    net = Loopback(method, world_size=WORLD, min_elements=100, ops=fast, **settings)
    w, speed = initial(), {name: np.zeros_like(v) for name, v in initial().items()}
    for step in range(steps):
        gradients = []
        for rank in range(WORLD):
            rows = (seed.uniform(seed._key(step, rank), BATCH) * len(x)).astype(int)
            gradients.append(loss_and_gradient(w, x[rows], y[rows])[1])
        mean = net.allreduce(gradients)[0]
        rate = 0.1 * min(1, (step + 1) / 20) * (1 - step / steps)
        for name in w:  # if the method applies momentum, the optimizer does not
            own = net.plan.program.main.feedback == "momentum" and w[name].size >= net.plan.min_elements
            speed[name] = (0.0 if own else 0.9) * speed[name] + mean[name]
            w[name] = w[name] - np.float32(rate) * speed[name]
    hidden = np.maximum(held_x @ w["fc1.weight"] + w["fc1.bias"], 0)
    right = (hidden @ w["fc2.weight"] + w["fc2.bias"]).argmax(axis=1) == held_y
    return loss_and_gradient(w, x, y)[0], 100 * float(right.mean()), net


@cache
def dense() -> tuple[float, float]:
    return train("none")[:2]


#: exceptions to the rule below: methods without a density, or without a residual
SETTINGS: dict[str, dict[str, Any]] = {
    "dgc": {"density": 0.02, "momentum": 0.9},  # the optimizer has no momentum here, and a rate for one of 0.9
    "fft": {"density": 0.3},
    "gradiveq": {  # there is no convolution here; and a basis from the first steps would not do
        "tensors": "all",
        "slice_elements": 24,
        "warmup": {"steps": 60},
        "dense_steps": 30,
        "compressed_steps": 60,
    },
}


def settings_of(id: str) -> dict[str, Any]:
    """Choose a density at which lost residuals show; a higher one for random-k, which does not look at values."""
    if id in SETTINGS:
        return SETTINGS[id]
    sparse = "density" in hvdcompress.get_method(id).hyperparameters()
    return {"density": 0.02 if registry.classes()[id].needs_feedback else 0.2} if sparse else {}


def gate(id: str, **settings: Any) -> None:
    """Raise AssertionError unless the method ends near dense and sent as many bytes as it says."""
    loss, accuracy, net = train(id, **settings)
    assert loss <= dense()[0] + 0.05, f"{id}: training loss {loss:.3f}, dense {dense()[0]:.3f}"
    assert accuracy >= dense()[1] - 2.0, f"{id}: held-out accuracy {accuracy:.1f} %, dense {dense()[1]:.1f} %"
    if "density" in settings:
        assert net.ledger.compression_ratio(0) > 4, f"{id}: a rate of only {net.ledger.compression_ratio(0):.1f}"


def test_dense_learns() -> None:
    loss, accuracy = dense()
    assert loss < 0.1 and accuracy > 94


@pytest.mark.parametrize(
    "id",
    [
        pytest.param(id, marks=[] if id in ("topk", "powersgd", "signsgd", "gradiveq") else [pytest.mark.slow])
        for id in hvdcompress.available()
    ],
)
def test_method_converges_as_dense(id: str) -> None:
    gate(id, **settings_of(id))


@pytest.mark.slow
@pytest.mark.parametrize(
    "id,settings",
    [
        ("scalecom", {"density": 0.02, "select": "exact"}),
        ("scalecom", {"density": 0.02, "beta": 1.0}),
        ("scalecom", {"density": 0.02, "values": "bf16"}),
        ("gaussiank", {"density": 0.02, "scope": "global"}),
        ("gaussiank", {"density": 0.02, "values": "fp16"}),
        ("topk", {"density": 0.02, "warmup": {"steps": 30}}),
        ("topk", {"density": 0.02, "values": "qsgd4"}),
        ("scalecom", {"density": 0.02, "values": "rangefloat8"}),
        ("randomk", {"density": 0.2, "values": "qsgd8"}),
        ("fft", {"density": 0.02, "feedback": "plain"}),
        ("fft", {"density": 0.1, "recovery": 1.5, "feedback": "lowpass", "beta": 0.5}),
        ("qsgd", {"route": "scatter"}),
        ("qsgd", {"bits": 2, "norm": "max", "bucket": 64}),
        ("terngrad", {"route": "gather"}),
        ("terngrad", {"clip_factor": 0.0}),
        ("signsgd", {"route": "scatter"}),
        ("powersgd", {"matrix_rank": 1, "values": "qsgd8"}),
        ("gradiveq", {**SETTINGS["gradiveq"], "values": "qsgd8", "dense_values": "qsgd4"}),
        ("gradiveq", {**SETTINGS["gradiveq"], "matrix_rank": 8, "feedback": "plain"}),
        ("dgc", {"density": 0.02, "momentum": 0.9, "select": "exact", "local_clip_norm": 2.0}),
    ],
)
def test_options_converge_as_dense(id: str, settings: dict[str, Any]) -> None:
    gate(id, **settings)


@pytest.mark.parametrize("id", ["topk", pytest.param("scalecom", marks=pytest.mark.slow)])
def test_gate_closes_without_feedback(id: str) -> None:
    """Without its residual the method fails at the density at which it passes with it."""
    with pytest.raises(AssertionError, match=r"training loss|accuracy"):
        gate(id, **settings_of(id), feedback="none")
