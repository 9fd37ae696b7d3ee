"""One rank's side: loss scales and stages."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcompress.loopback import Loopback


def grads(step: int, world: int = 2) -> list[np.ndarray]:
    return [np.random.default_rng([step, rank]).normal(size=2000).astype(np.float32) for rank in range(world)]


@pytest.mark.parametrize("method", ["none", "fp16", "topk", "scalecom", "gaussiank", "randomk"])
@pytest.mark.parametrize("settings", [{}, {"warmup": {"steps": 2}}])
def test_a_changing_loss_scale_changes_nothing(method: str, settings: dict) -> None:
    """Scales that are powers of two: exact, in dense stages and compressed ones."""
    scale = [1.0]
    plain = Loopback(method, world=2, **settings)
    scaled = Loopback(method, world=2, loss_scale=lambda: scale[0], **settings)
    for step, scale[0] in enumerate([1.0, 4.0, 1024.0, 2.0, 512.0]):  # noqa: B007
        want = plain.allreduce(grads(step), name="w")[1]
        got = scaled.allreduce([g * np.float32(scale[0]) for g in grads(step)], name="w")[1]
        np.testing.assert_array_equal(got / np.float32(scale[0]), want, err_msg=f"step {step}")


def test_stages_follow_each_other() -> None:
    net = Loopback("topk", world=2, warmup={"steps": 2}, schedule={"density": {"steps": {3: 0.1}}}, density=0.01)
    dense = Loopback("none", world=2)
    kept = []
    for step in range(5):
        got = net.allreduce(grads(step), name="w")[0]
        kept.append(np.count_nonzero(got))
        if step < 2:
            np.testing.assert_array_equal(got, dense.allreduce(grads(step), name="w")[0])
            assert not net.residual("w", rank=0).any()
    assert kept[0] == kept[1] == 2000
    assert 20 <= kept[2] <= 40
    assert 200 <= kept[3] <= 400 and 200 <= kept[4] <= 400
