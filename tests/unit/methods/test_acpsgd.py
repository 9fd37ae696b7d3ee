"""ACP-SGD: one factor of a low-rank gradient per step (Zhang et al. 2023, arXiv 2306.08881)."""

from __future__ import annotations

import numpy as np
import pytest

import hvdcompress
from hvdcompress import ops
from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec
from hvdcompress.ops import numpy as reference
from hvdcompress.ops.vectors import Outer
from hvdcompress.parts import seed
from hvdcompress.testing import numbers
from tests.oracles.acpsgd import Oracle

SHAPE = (12, 30)
LARGE = (600, 700)  #: for which a rank's own part is removed in the pass that makes it


def first_q(name: str, columns: int, rank: int) -> np.ndarray:
    ctx = Context(0, 1, 0, TensorSpec(name, (1, columns)), 0)
    return (seed.uniform(seed.shared_key(ctx), rank * columns) - 0.5).reshape(rank, columns).T.astype(np.float64)


@pytest.mark.parametrize(
    ("world_size", "shape", "rank"),
    [(3, SHAPE, 2), (2, SHAPE, 1), (1, SHAPE, 4), (2, (8, 3, 5, 5), 2)] + [(2, LARGE, rank) for rank in (3, 4, 6, 8)],
)
def test_it_is_the_papers_algorithm(world_size, shape, rank):
    net = Loopback("acpsgd", world_size=world_size, matrix_rank=rank, min_elements=1)
    rows = shape[0]
    oracle = Oracle(world_size, first_q("w", int(np.prod(shape[1:])), rank))
    for step in range(8):
        gradients = [numbers(shape, 99) + numbers(shape, each, step) for each in range(world_size)]
        mean = oracle.step([g.reshape(rows, -1).astype(np.float64) for g in gradients])
        out = net.allreduce(gradients, "w")[0]
        scale = max(np.abs(g).max() for g in gradients) + np.abs(oracle.memory[0]).max()
        np.testing.assert_allclose(out.reshape(rows, -1), mean, atol=3e-4 * scale)
        for each in range(world_size):
            np.testing.assert_allclose(
                net.residual("w", each).reshape(rows, -1), oracle.memory[each], atol=3e-4 * scale
            )


def test_bytes_take_turns():
    net = Loopback("acpsgd", world_size=2, matrix_rank=2, min_elements=1)
    sent = []
    for step in range(4):
        before = net.ledger.bytes_sent(rank=0)
        net.allreduce([numbers(SHAPE, each, step) for each in range(2)], "w")
        sent.append(net.ledger.bytes_sent(rank=0) - before)
    assert sent == [2 * 12 * 4, 2 * 30 * 4] * 2
    method = hvdcompress.get("acpsgd", matrix_rank=2)
    assert [method.num_bytes(TensorSpec("w", SHAPE), 2, phase) for phase in (0, 1)] == sent[:2]
    assert [method.piggyback(TensorSpec("w", SHAPE), phase, {}) for phase in (0, 1)] == [24, 60]


def test_after_a_trigger_rows_are_sent():
    net = Loopback("acpsgd", world_size=2, matrix_rank=2, min_elements=1)

    def step(number):
        before = net.ledger.bytes_sent(rank=0)
        net.allreduce([numbers(SHAPE, each, number) for each in range(2)], "w")
        return net.ledger.bytes_sent(rank=0) - before

    assert step(0) < step(1)
    net.trigger()
    step(2)  # in which the ranks agree
    assert step(3) == 2 * 12 * 4


def test_it_converges_to_the_best_approximation():
    net = Loopback("acpsgd", world_size=2, matrix_rank=2, min_elements=1, feedback="none")
    left, right = numbers((40, 2), 1), numbers((2, 50), 2)
    gradient = left @ right + 0.01 * numbers((40, 50), 3)
    best = np.linalg.svd(gradient, compute_uv=False)[2:]
    for _ in range(10):
        out = net.allreduce([gradient, gradient], "w")[0]
    assert np.linalg.norm(out - gradient) < 1.01 * np.linalg.norm(best)


@pytest.mark.parametrize("values", ["fp32", "fp16", "qsgd8"])
def test_finite_in_finite_out(values):
    net = Loopback("acpsgd", world_size=2, matrix_rank=2, min_elements=1, values=values)
    for _ in range(3):
        out = net.allreduce([np.full(SHAPE, 1e37, np.float32)] * 2, "w")[0]
        assert np.isfinite(out).all()


def test_a_gradient_of_zero_does_not_end_it():
    net = Loopback("acpsgd", world_size=2, matrix_rank=2, min_elements=1)
    for _ in range(3):
        net.allreduce([np.zeros(SHAPE, np.float32)] * 2, "w")
    gradient = numbers((12, 2), 1) @ numbers((2, 30), 2)
    for _ in range(6):
        out = net.allreduce([gradient, gradient], "w")[0]
    assert np.linalg.norm(out - gradient) < np.linalg.norm(gradient)


@pytest.mark.parametrize("rank", [1, 3, 4, 5, 8])
def test_what_is_removed_is_the_part_that_was_found(rank):
    """The compiled pass removes a's part; the reference leaves that to the method."""
    from hvdcompress.ops.scan import Product, Scan

    gradient, residual = numbers(LARGE, 1).ravel(), numbers(LARGE, 2).ravel()
    a = reference.orthonormalise(numbers((rank, LARGE[1]), 3).ravel(), rank) * np.float32(0.125)
    out, left = np.empty_like(gradient), np.empty_like(gradient)
    found = ops.fast.accumulate(gradient, residual, 0.5, left, Scan(product=Product(a, rank, 64.0)))
    plain = reference.accumulate(gradient, residual, 0.5, out, Scan(product=Product(a, rank, 64.0)))
    assert (found.removed, plain.removed) == (True, False)
    np.testing.assert_allclose(found.product, plain.product, atol=1e-4)
    reference.subtract(out, Outer(plain.product, a, rank, 64.0), 1.0)
    np.testing.assert_allclose(left, out, atol=1e-4)
    gradient[7] = np.inf
    assert ops.fast.accumulate(gradient, residual, 0.5, left, Scan(product=Product(a, rank, 64.0))).finite is False
