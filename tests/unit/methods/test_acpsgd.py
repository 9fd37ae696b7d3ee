"""ACP-SGD: one factor of a low-rank gradient per step (Zhang et al. 2023, arXiv 2306.08881)."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcompress import ops
from hvdcompress.loopback import Loopback
from hvdcompress.ops.numpy import ops as reference
from hvdcompress.ops.scan import Product, Scan
from hvdcompress.ops.vectors import Outer
from hvdcompress.testing import numbers
from tests.oracles.acpsgd import Oracle
from tests.unit.methods.comparing import assert_matches_oracle, first_q

SHAPE = (12, 30)
LARGE = (600, 700)  #: for which a rank's own part is removed in the pass that makes it


@pytest.mark.parametrize(
    "world_size,shape,rank",
    [(3, SHAPE, 2), (2, SHAPE, 1), (1, SHAPE, 4), (2, (8, 3, 5, 5), 2), (2, LARGE, 3), (2, LARGE, 8)],
)
def test_matches_the_oracle(world_size: int, shape: tuple[int, ...], rank: int) -> None:
    net = Loopback("acpsgd", world_size=world_size, matrix_rank=rank, min_elements=1)
    oracle = Oracle(world_size, shape[0], first_q(int(np.prod(shape[1:])), rank))
    assert_matches_oracle(net, oracle, shape, steps=6, tolerance=1e-4)


def bytes_of_a_step(net: Loopback, step: int) -> int:
    before = net.ledger.bytes_sent(0)
    net.allreduce([numbers(SHAPE, rank, step) for rank in range(2)], "w")
    return net.ledger.bytes_sent(0) - before


def test_factors_are_sent_in_turns() -> None:
    net = Loopback("acpsgd", world_size=2, matrix_rank=2, min_elements=1)
    assert [bytes_of_a_step(net, step) for step in range(4)] == [2 * 12 * 4, 2 * 30 * 4] * 2


def test_rows_are_sent_after_a_trigger() -> None:
    net = Loopback("acpsgd", world_size=2, matrix_rank=2, min_elements=1)
    assert bytes_of_a_step(net, 0) < bytes_of_a_step(net, 1)
    net.trigger()
    bytes_of_a_step(net, 2)  # in which the ranks agree
    assert bytes_of_a_step(net, 3) == 2 * 12 * 4


def test_recovers_from_a_gradient_of_zero() -> None:
    net = Loopback("acpsgd", world_size=2, matrix_rank=2, min_elements=1)
    for _ in range(3):
        net.allreduce([np.zeros(SHAPE, np.float32)] * 2, "w")
    gradient = numbers((12, 2), 1) @ numbers((2, 30), 2)
    for _ in range(6):
        out = net.allreduce([gradient, gradient], "w")[0]
    assert np.linalg.norm(out - gradient) < np.linalg.norm(gradient)


@pytest.mark.parametrize("rank", [1, 3, 4, 5, 8])
def test_compiled_pass_removes_the_part_that_was_found(rank: int) -> None:
    """The compiled pass removes a's part; the reference leaves that to the method."""
    gradient, residual = numbers(LARGE, 1).ravel(), numbers(LARGE, 2).ravel()
    a = reference.orthonormalise(numbers((rank, LARGE[1]), 3).ravel(), rank) * np.float32(0.125)
    scan = Scan(product=Product(a, rank, 64.0))
    out, left = np.empty_like(gradient), np.empty_like(gradient)
    found = ops.fast.accumulate(gradient, residual, 0.5, left, scan)
    plain = reference.accumulate(gradient, residual, 0.5, out, scan)
    assert (found.removed, plain.removed) == (True, False)
    np.testing.assert_allclose(found.product, plain.product, atol=1e-4)
    reference.subtract(out, Outer(plain.product, a, rank, 64.0), 1.0)
    np.testing.assert_allclose(left, out, atol=1e-4)
    gradient[7] = np.inf
    assert ops.fast.accumulate(gradient, residual, 0.5, left, scan).finite is False
