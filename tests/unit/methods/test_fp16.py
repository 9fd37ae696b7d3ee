"""fp16: cast, pre-scaled by the world so that no sum overflows."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcompress.loopback import Loopback
from hvdcompress.testing import numbers


@pytest.mark.parametrize("world_size", [1, 2, 3, 64, 256])
def test_average_is_the_value_or_the_largest_float16(world_size: int) -> None:
    """No sum overflows: all ranks have nearly the largest float16. Values beyond it saturate and are counted."""
    net = Loopback("fp16", world_size=world_size, min_elements=1)
    out = net.allreduce([np.float32([60000, 1, 1e9, -1e37, 70000])] * world_size, "w")[0]
    # each of the p − 1 additions rounds to 11 bits, and with equal addends all in one direction
    np.testing.assert_allclose(out, [60000, 1, 65504, -65504, 65504], rtol=2e-3 + world_size * 2.0**-13)
    assert net.ledger.counters(world_size - 1) == {"saturated": 3}


def test_opposite_extremes_cancel() -> None:
    net = Loopback("fp16", world_size=4, min_elements=1)
    gradients = [np.float32([3e38 * sign]) for sign in (1, -1, 1, -1)]
    assert net.allreduce(gradients, "w")[0][0] == 0


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rounds_as_numpys_float16(world_size: int) -> None:
    """For p a power of two the division is exact: the result is the float16 sum of the rounded gradients."""
    net = Loopback("fp16", world_size=world_size, min_elements=1)
    for step in range(5):
        gradients = [numbers((41,), rank, step) for rank in range(world_size)]
        expected = np.float16(gradients[0] / np.float32(world_size))
        for gradient in gradients[1:]:
            expected = expected + np.float16(gradient / np.float32(world_size))  # numpy adds float16 to float16
        np.testing.assert_array_equal(net.allreduce(gradients, "w")[0], expected.astype(np.float32))


def test_small_values_are_zero_without_feedback_and_add_up_with_it() -> None:
    """Values below about 6e-8·p round to zero."""
    net = Loopback("fp16", world_size=4, min_elements=1)
    out = net.allreduce([np.float32([5e-7, 1e-8])] * 4, "w")[0]
    assert out[0] > 0 and out[1] == 0
    kept = Loopback("fp16", world_size=4, min_elements=1, feedback="plain")
    total = np.zeros(1)
    for _ in range(100):
        total += kept.allreduce([np.float32([1e-8])] * 4, "w")[0]
    np.testing.assert_allclose(total + kept.residual("w", 0), 1e-6, rtol=1e-3)
    assert total[0] > 5e-7
