"""EF-signSGD: signs, mean magnitude, residual (Karimireddy et al. 2019, arXiv 1901.09847)."""

from __future__ import annotations

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.testing import Trial
from tests.oracles.signsgd import Oracle
from tests.unit.methods.comparing import assert_matches_oracle


@pytest.mark.parametrize("world_size,n", [(1, 40), (2, 1), (3, 57), (5, 101)])
def test_matches_the_oracle(world_size: int, n: int) -> None:
    """Rounding flips no sign, as with this data no p is near 0."""
    net = Loopback("signsgd", world_size=world_size, min_elements=1)
    assert_matches_oracle(net, Oracle(world_size, n), (n,), tolerance=2e-5)


def test_zeros_are_sent_as_plus_and_corrected_by_the_residual() -> None:
    net = Loopback("signsgd", world_size=1, min_elements=1)
    out = net.allreduce([np.float32([4, 0, -0.0, -2])], "w")[0]
    assert out.tolist() == [1.5, 1.5, 1.5, -1.5]
    assert net.residual("w", 0).tolist() == [2.5, -1.5, -1.5, -0.5]


@pytest.mark.parametrize("value", [0.1, 1e37, 1e-42])
def test_magnitudes_are_summed_in_float64(value: float) -> None:
    """A float32 sum of many equal numbers would stop growing, or overflow."""
    g = np.full(300_000, value, np.float32)
    np.testing.assert_array_equal(Loopback("signsgd", min_elements=1, world_size=1).allreduce([g], "w")[0], g)


def test_payload_has_the_mean_magnitude_and_the_signs() -> None:
    net = Trial(hvdcompress.get_method("signsgd"), 1)
    net.allreduce([np.float32([1, -2, 3, -4, 5, 6, 7, 8, -9])], "w")
    payload = net.log[0].sent[0]
    assert np.frombuffer(payload[24:28], "<f4").tolist() == [5.0]
    assert payload[28:] == bytes([0b00001010, 0b1])
