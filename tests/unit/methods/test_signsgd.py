"""EF-signSGD: signs, mean magnitude, residual (Karimireddy et al. 2019, arXiv 1901.09847)."""

from __future__ import annotations

import math

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.testing import Trial, numbers
from tests.oracles.signsgd import Oracle
from tests.unit.methods.quantizers import assert_nothing_is_lost


def run_beside_oracle(world_size: int = 3, n: int = 57, steps: int = 25) -> None:
    """Compare up to float32 rounding. It flips no sign, as with this data no p is near 0."""
    net, oracle = Loopback("signsgd", world_size=world_size, min_elements=1), Oracle(world_size, n)
    for step in range(steps):
        gradients = [numbers((n,), rank, step) for rank in range(world_size)]
        total = oracle.step([g.astype(np.float64) for g in gradients])
        np.testing.assert_allclose(net.allreduce(gradients, "w", op="sum")[0], total, rtol=1e-4, atol=1e-4)
        for rank in range(world_size):
            np.testing.assert_allclose(net.residual("w", rank), oracle.memory[rank], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("world_size,n", [(1, 40), (2, 1), (3, 57), (5, 101)])
def test_beside_an_independent_oracle(world_size: int, n: int) -> None:
    run_beside_oracle(world_size, n)


def test_zeros_are_sent_as_plus_and_taken_back() -> None:
    net = Loopback("signsgd", world_size=1, min_elements=1)
    out = net.allreduce([np.float32([4, 0, -0.0, -2])], "w")[0]
    assert out.tolist() == [1.5, 1.5, 1.5, -1.5]
    assert net.residual("w", 0).tolist() == [2.5, -1.5, -1.5, -0.5]


def test_a_vector_of_zeros_stays_zero() -> None:
    net = Loopback("signsgd", world_size=2, min_elements=1)
    for _ in range(3):
        assert not net.allreduce([np.zeros(9, np.float32)] * 2, "w")[0].any()
        assert not net.residual("w", 1).any()


@pytest.mark.parametrize("kind", ["normal", "heavy", "constant", "sparse"])
def test_it_is_a_contraction(kind: str) -> None:
    """In the paper's words a φ(p)-approximate compressor: ‖C(p) − p‖² = (1 − φ(p))·‖p‖² with φ(p) = ‖p‖₁²/(n·‖p‖₂²)."""
    p = numbers((500,), 7, kind=kind)
    net = Loopback("signsgd", world_size=1, min_elements=1)
    error = np.square(net.allreduce([p], "w")[0].astype(np.float64) - p).sum()
    wide = p.astype(np.float64)
    phi = np.abs(wide).sum() ** 2 / (len(p) * (wide**2).sum())
    np.testing.assert_allclose(error, (1 - phi) * (wide**2).sum(), rtol=1e-4, atol=1e-6)


def test_the_magnitude_is_summed_in_float64() -> None:
    """A float32 sum of many equal numbers would stop growing, or overflow."""
    for value in (0.1, 1e37, 1e-42):
        g = np.full(300_000, value, np.float32)
        out = Loopback("signsgd", min_elements=1, world_size=1).allreduce([g], "w")[0]
        np.testing.assert_array_equal(out, g)


def run_residual_stays_small(steps: int = 200) -> None:
    """With error feedback, the sum of what was sent stays at a bounded distance from the sum of the gradients."""
    net, sent, given = Loopback("signsgd", world_size=2, min_elements=1), 0.0, 0.0
    g = [np.float32([10, 1, -0.1, 0.01]), np.float32([8, -1, -0.3, 0.01])]
    for _ in range(steps):
        sent, given = sent + net.allreduce(g, "w")[0], given + np.mean(g, axis=0)
    np.testing.assert_allclose(sent / steps, given / steps, atol=25 / steps)


def test_what_is_sent_follows_what_was_given() -> None:
    run_residual_stays_small()


def test_without_feedback_it_is_biased() -> None:
    net = Loopback("signsgd", world_size=1, feedback="none", min_elements=1)
    out = [net.allreduce([np.float32([10, 1])], "w")[0] for _ in range(5)]
    assert np.mean(out, 0).tolist() == [5.5, 5.5]


@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000, 100_003])
def test_one_bit_a_value(n: int) -> None:
    for world_size in (1, 3):
        net = Trial(hvdcompress.get("signsgd"), world_size)
        net.allreduce([numbers((n,), rank) for rank in range(world_size)], "w")
        assert net.ledger.bytes_sent(0) == 24 + 4 + math.ceil(n / 8) == len(net.log[0].sent[0])
        net = Trial(hvdcompress.get("signsgd", route="scatter"), world_size)
        net.allreduce([numbers((n,), rank) for rank in range(world_size)], "w")
        assert net.ledger.bytes_sent(0) == (world_size + 1) * (4 + math.ceil(math.ceil(n / world_size) / 8))


def test_the_payload_is_signs_and_the_mean_magnitude() -> None:
    net = Trial(hvdcompress.get("signsgd"), 1)
    net.allreduce([np.float32([1, -2, 3, -4, 5, 6, 7, 8, -9])], "w")
    payload = net.log[0].sent[0]
    assert np.frombuffer(payload[24:28], "<f4").tolist() == [5.0]
    assert payload[28:] == bytes([0b00001010, 0b1])


@pytest.mark.parametrize("route", ["gather", "scatter"])
def test_nothing_is_lost(route: str) -> None:
    assert_nothing_is_lost("signsgd", 1e-4, route=route)
