"""Clipping before feedback: one rule for all methods. (Feedback itself is held by the conformance suite.)"""

from __future__ import annotations

import math

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.testing import numbers


def clipped(gradient: np.ndarray, norm: float) -> np.ndarray:
    """Return a gradient as scaled down to a norm, if it has more."""
    own = math.sqrt(math.fsum(float(x) ** 2 for x in gradient.ravel()))
    return gradient * np.float32(min(1.0, norm / own))


def settings(id: str) -> dict[str, float]:
    return {"density": 0.1} if "density" in hvdcompress.get(id).hyperparameters() else {}


@pytest.mark.parametrize("feedback", ["plain", "lowpass", "momentum"])
@pytest.mark.parametrize("id", hvdcompress.available())
def test_every_method_clips_as_if_the_gradients_had_come_clipped(id: str, feedback: str) -> None:
    """Each rank's gradient of each tensor, to local_clip_norm/√p; tensors below it stay as they are."""
    try:
        nets = [
            Loopback(id, world_size=2, min_elements=1, feedback=feedback, beta=0.3, **settings(id), **clip)
            for clip in ({"local_clip_norm": 3.0}, {})
        ]
    except ValueError as error:
        assert feedback == "momentum" and "needs a sparse method" in str(error)
        return
    for step in range(3):
        gradients = [
            {"big": numbers((8, 40, 3, 3), rank, step), "small": numbers((3, 5), rank, step) * np.float32(0.1)}
            for rank in range(2)
        ]
        ready = [{name: clipped(g, 3.0 / math.sqrt(2)) for name, g in one.items()} for one in gradients]
        assert (ready[0]["small"] == gradients[0]["small"]).all() and (ready[0]["big"] != gradients[0]["big"]).any()
        found, expected = nets[0].allreduce_many(gradients)[0], nets[1].allreduce_many(ready)[0]
        for name in ("big", "small"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_tensors_of_a_bucket_are_clipped_each_by_itself() -> None:
    gradients = [{name: numbers((30,), i, rank) * np.float32(10**i) for i, name in enumerate("abc")} for rank in (0, 1)]
    joined, alone = (
        Loopback("topk", world_size=2, density=0.1, local_clip_norm=2.0, min_elements=1, bucket_elements=size)
        for size in (100, 0)
    )
    for _ in range(2):
        found, expected = (net.allreduce_many(gradients)[0] for net in (joined, alone))
        for name in "abc":
            np.testing.assert_array_equal(found[name], expected[name])
    assert joined.ledger.collectives(0) < alone.ledger.collectives(0)


def test_a_spike_adds_no_more_to_the_residual_than_the_norm() -> None:
    """What clipping after the exchange cannot do: of a spike in many elements, most of it waits in the residual."""
    spike = numbers((10_000,), 1) * np.float32(1000)
    bounded, free = (Loopback("topk", world_size=1, density=0.01, **clip) for clip in ({"local_clip_norm": 1.0}, {}))
    for net in (bounded, free):
        net.allreduce([spike], "w")
    assert np.linalg.norm(bounded.residual("w", 0)) <= 1.0 < 1e4 < np.linalg.norm(free.residual("w", 0))


def test_a_step_with_an_inf_is_undone_under_clipping() -> None:
    net = Loopback("topk", world_size=1, density=0.1, local_clip_norm=1.0, min_elements=1)
    net.allreduce([numbers((50,), 1)], "w")
    before = net.residual("w", 0).copy()
    spoilt = numbers((50,), 2)
    spoilt[3] = np.inf
    assert not np.isfinite(net.allreduce([spoilt], "w")[0]).all()
    np.testing.assert_array_equal(net.residual("w", 0), before)


@pytest.mark.parametrize("id", hvdcompress.available())
def test_clipping_without_feedback_is_refused(id: str) -> None:
    with pytest.raises(ValueError, match="local_clip_norm needs feedback"):
        hvdcompress.get(id, local_clip_norm=1.0, feedback="none")
    for bad in (0.0, -1.0, float("inf"), True):
        with pytest.raises(ValueError, match="local_clip_norm"):
            hvdcompress.get(id, local_clip_norm=bad, feedback="plain")
