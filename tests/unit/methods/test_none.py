"""none: the dense sum, the baseline of every other method."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcompress.loopback import Loopback
from hvdcompress.testing import numbers


@pytest.mark.parametrize("settings", [{}, {"feedback": "lowpass", "beta": 0.25}])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_is_the_plain_sum(world_size: int, settings: dict[str, object]) -> None:
    """With feedback, too: all is sent, and the residual stays zero."""
    net = Loopback("none", world_size=world_size, **settings)
    for step in range(3):
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


def test_float64_in_a_bucket_is_summed_in_float64() -> None:
    """Small tensors in one bucket must not lose digits."""
    net = Loopback("topk", world_size=2, bucket_elements=100)
    one = {"a": np.full(3, 1 + 2.0**-40), "b": np.full(4, 1 + 2.0**-41)}
    out = net.allreduce([one, one])[0]
    assert (out["a"] == 1 + 2.0**-40).all() and (out["b"] == 1 + 2.0**-41).all()


def test_float16_is_summed_in_float32() -> None:
    """65504 + 65504 overflows float16, and 2048 + 1 is lost in it; the average does neither."""
    net = Loopback("none", world_size=3)
    out = net.allreduce([np.float16([65504, 2048]), np.float16([65504, 1]), np.float16([65504, 1])], "w")[0]
    assert out.dtype == np.float16 and out[0] == 65504 and out[1] == np.float16(2050 / 3)
