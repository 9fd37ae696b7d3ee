"""none: the dense sum, the baseline of every other method."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcompress.loopback import Loopback
from hvdcompress.testing import numbers


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_is_the_plain_sum(world_size: int) -> None:
    net = Loopback("none", world_size=world_size)
    for step in range(20):
        gradients = [numbers((3, 9), rank, step) for rank in range(world_size)]
        exact = np.sum(gradients, axis=0, dtype=np.float64)
        np.testing.assert_allclose(net.allreduce(gradients, "w", op="sum")[0], exact, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(net.allreduce(gradients, "w")[0], exact / world_size, rtol=1e-5, atol=1e-6)
    assert not net.residual("w", 0).any()


def test_float64_is_summed_in_float64() -> None:
    net = Loopback("none", world_size=3)
    gradients = [np.array([1 + 2.0**-40 * rank, 1e300]) for rank in range(3)]
    out = net.allreduce(gradients, "w", op="sum")[0]
    assert out[0] == 3 + 3 * 2.0**-40 and np.isclose(out[1], 3e300, rtol=1e-15)
    assert net.ledger.bytes_sent(0) == 16


def test_float64_in_a_bucket_is_summed_in_float64() -> None:
    """Joining small tensors must not lose digits."""
    net = Loopback("topk", world_size=2, bucket_elements=100)
    one = {"a": np.full(3, 1 + 2.0**-40), "b": np.full(4, 1 + 2.0**-41)}
    out = net.allreduce_many([one, one])[0]
    assert (out["a"] == 1 + 2.0**-40).all() and (out["b"] == 1 + 2.0**-41).all()


def test_float16_is_summed_in_float32() -> None:
    """65504 + 65504 overflows float16, and 2048 + 1 is lost in it; the average does neither."""
    net = Loopback("none", world_size=3)
    out = net.allreduce([np.float16([65504, 2048]), np.float16([65504, 1]), np.float16([65504, 1])], "w")[0]
    assert out.dtype == np.float16 and out[0] == 65504 and out[1] == np.float16(2050 / 3)


def test_bytes() -> None:
    net = Loopback("none", world_size=4)
    for name, dtype, num_bytes in [("a", np.float32, 4), ("b", np.float64, 8), ("c", np.float16, 4)]:
        before = net.ledger.bytes_sent(1)
        net.allreduce([np.ones(100, dtype)] * 4, name)
        assert net.ledger.bytes_sent(1) - before == 100 * num_bytes


@pytest.mark.parametrize("beta", [1.0, 0.25])
def test_with_feedback_all_is_sent_and_nothing_kept(beta: float) -> None:
    """With β < 1 the residual shrinks by 1 − β; a gradient that was sent entirely adds nothing to it."""
    net = Loopback("none", world_size=2, feedback="lowpass", beta=beta)
    for step in range(3):
        gradients = [numbers((10,), rank, step) for rank in range(2)]
        out = net.allreduce(gradients, "w", op="sum")[0]
        np.testing.assert_allclose(out, gradients[0] + gradients[1], rtol=1e-5, atol=1e-6)
        assert not net.residual("w", 0).any()
