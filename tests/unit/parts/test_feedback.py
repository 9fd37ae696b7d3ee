"""Clipping before feedback: one rule for all methods. (The conformance suite checks feedback itself.)"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.testing import numbers

METHODS = hvdcompress.available()


def clipped(gradient: np.ndarray, norm: float) -> np.ndarray:
    """Return a gradient that is scaled down to a norm, if its norm is larger."""
    own = math.sqrt(math.fsum(float(x) ** 2 for x in gradient.ravel()))
    return gradient * np.float32(min(1.0, norm / own))


@pytest.mark.parametrize(
    "id,feedback",
    [*((id, "plain") for id in METHODS), ("topk", "lowpass"), ("topk", "momentum")],
)
def test_clipping_equals_clipped_gradients(id: str, feedback: str) -> None:
    """Each rank's gradient of each tensor is clipped to local_clip_norm/√p; smaller ones stay as they are."""
    density = {"density": 0.1} if "density" in hvdcompress.get_method(id).hyperparameters() else {}
    settings = {"world_size": 2, "min_elements": 1, "feedback": feedback, **density}
    if feedback == "lowpass":
        settings["beta"] = 0.3
    net, plain = Loopback(id, local_clip_norm=3.0, **settings), Loopback(id, **settings)
    for step in range(3):
        gradients = [
            {"big": numbers((8, 40, 3, 3), rank, step), "small": numbers((3, 5), rank, step) * np.float32(0.1)}
            for rank in range(2)
        ]
        ready = [{name: clipped(g, 3.0 / math.sqrt(2)) for name, g in one.items()} for one in gradients]
        assert (ready[0]["small"] == gradients[0]["small"]).all() and (ready[0]["big"] != gradients[0]["big"]).any()
        found, expected = net.allreduce(gradients)[0], plain.allreduce(ready)[0]
        for name in ("big", "small"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size,loss_scale", [(0.0, 1.0), (1e-30, 1.0), (100.0, 1024.0), (1e37, 1.0)])
def test_clipping_of_any_size_and_with_a_loss_scale(size: float, loss_scale: float) -> None:
    net = Loopback("topk", world_size=1, density=1.0, local_clip_norm=2.0, min_elements=1, loss_scale=loss_scale)
    g = numbers((100,), 1).astype(np.float64) * size
    expected = g * min(1.0, 2.0 / np.linalg.norm(g)) if size else g
    out = net.allreduce([(g * loss_scale).astype(np.float32)], "w")[0]
    np.testing.assert_allclose(out, expected * loss_scale, rtol=1e-4)


def test_tensors_of_a_bucket_are_clipped_separately() -> None:
    gradients = [{name: numbers((30,), i, rank) * np.float32(10**i) for i, name in enumerate("abc")} for rank in (0, 1)]
    bucket, alone = (
        Loopback("topk", world_size=2, density=0.1, local_clip_norm=2.0, min_elements=1, bucket_elements=size)
        for size in (100, 0)
    )
    for _ in range(2):
        found, expected = (net.allreduce(gradients)[0] for net in (bucket, alone))
        for name in "abc":
            np.testing.assert_array_equal(found[name], expected[name])
    assert bucket.ledger.collectives(0) < alone.ledger.collectives(0)


def test_step_with_an_inf_is_undone_under_clipping() -> None:
    net = Loopback("topk", world_size=1, density=0.1, local_clip_norm=1.0, min_elements=1)
    net.allreduce([numbers((50,), 1)], "w")
    before = net.residual("w", 0).copy()
    bad = numbers((50,), 2)
    bad[3] = np.inf
    assert not np.isfinite(net.allreduce([bad], "w")[0]).all()
    np.testing.assert_array_equal(net.residual("w", 0), before)


@pytest.mark.parametrize(
    "id,settings,words",
    [
        *((id, {"local_clip_norm": 1.0, "feedback": "none"}, "local_clip_norm has no effect") for id in METHODS),
        *(("topk", {"local_clip_norm": wrong}, "local_clip_norm") for wrong in (0.0, -1.0, float("inf"), True)),
        ("powersgd", {"feedback": "momentum"}, "needs a sparse method"),
    ],
)
def test_wrong_settings_are_refused(id: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hvdcompress.get_method(id, **settings)
