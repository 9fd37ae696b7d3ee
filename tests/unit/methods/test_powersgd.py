"""PowerSGD: low-rank gradients by a warm-started power iteration (Vogels et al. 2019, arXiv 1905.13727)."""

from __future__ import annotations

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.method import TensorSpec
from hvdcompress.testing import Trial, numbers
from tests.oracles.powersgd import Oracle
from tests.unit.methods.comparing import assert_matches_oracle, first_q

SHAPE = (12, 30)


@pytest.mark.parametrize(
    "world_size,shape,rank,feedback",
    [
        (1, SHAPE, 1, "none"),
        (2, SHAPE, 2, "plain"),
        (3, (30, 12), 3, "plain"),
        (5, (8, 3, 5), 2, "none"),
        (4, (16, 3, 3, 3), 4, "plain"),
        (2, (4, 200), 1, "plain"),
    ],
)
def test_matches_the_oracle(world_size: int, shape: tuple[int, ...], rank: int, feedback: str) -> None:
    net = Loopback("powersgd", world_size=world_size, matrix_rank=rank, feedback=feedback, min_elements=1)
    oracle = Oracle(world_size, shape[0], first_q(int(np.prod(shape[1:])), rank), feedback == "plain")
    assert_matches_oracle(net, oracle, shape, steps=12, tolerance=1e-4)


def low_rank(rank: int, shape: tuple[int, int] = SHAPE) -> np.ndarray:
    return numbers((shape[0], rank), 0, 1) @ numbers((rank, shape[1]), 0, 2)


@pytest.mark.parametrize("rank,scale", [(1, 1.0), (3, 1.0), (2, 1e-20), (3, 1e30)])
def test_gradient_of_a_lower_rank_is_exact(rank: int, scale: float) -> None:
    net = Loopback("powersgd", world_size=3, matrix_rank=3, min_elements=1)
    gradient = np.float32(scale) * low_rank(rank)
    out = net.allreduce([np.float32(factor) * gradient for factor in (0.5, 1, 1.5)], "w")[0]
    np.testing.assert_allclose(out, gradient, atol=1e-5 * np.abs(gradient).max())


@pytest.mark.parametrize(
    "shape,suits",
    [
        ((1000,), False),
        ((), False),
        ((0, 5), False),
        ((5, 0), False),
        ((4, 4), False),  # 2·8 values are no fewer than 16
        ((4, 5), True),
        ((2, 1000), False),
    ],
)
def test_suitable_tensors(shape: tuple[int, ...], suits: bool) -> None:
    assert hvdcompress.get_method("powersgd", matrix_rank=2).suits(TensorSpec("w", shape)) == suits


def test_matrix_of_a_convolution() -> None:
    method = hvdcompress.get_method("powersgd")
    assert method.matrix(TensorSpec("c", (64, 32, 3, 3))) == (64, 288)
    assert method.matrix(TensorSpec("c", (3, 3, 32, 64), layout="hwio")) == (288, 64)


def test_first_q_depends_on_tensor_and_seed() -> None:
    m = numbers(SHAPE, 3)
    outs = []
    for name, seed in (("a", 0), ("b", 0), ("a", 1)):
        net = Loopback("powersgd", world_size=2, matrix_rank=1, feedback="none", seed=seed, min_elements=1)
        outs.append(net.allreduce([m, m], name)[0])
    assert not np.allclose(outs[0], outs[1]) and not np.allclose(outs[0], outs[2])


def test_recovers_from_a_gradient_of_zero() -> None:
    """Q = Mᵀ·P̂ is then zero, and would stay zero."""
    net, m = Loopback("powersgd", world_size=2, matrix_rank=2, feedback="none", min_elements=1), low_rank(2)
    for gradient in (m, 0 * m, 0 * m):
        out = net.allreduce([gradient, gradient], "w")[0]
    assert not out.any()
    np.testing.assert_allclose(net.allreduce([m, m], "w")[0], m, atol=1e-4 * np.abs(m).max())


def test_zero_columns_and_rows_stay_zero() -> None:
    m = low_rank(1)
    m[3] = 0
    m[:, 5:20] = 0
    net = Loopback("powersgd", world_size=2, matrix_rank=4, min_elements=1)
    for _ in range(4):
        out = net.allreduce([m, 0 * m], "w", op="sum")[0]
        assert np.isfinite(out).all() and not out[3].any() and not out[:, 5:20].any()
    np.testing.assert_allclose(out, m, atol=1e-4 * np.abs(m).max())


@pytest.mark.parametrize("id", ["powersgd", "acpsgd"])
@pytest.mark.parametrize("rank", [1, 2])  # with two columns, one may hide an overflow of the other
@pytest.mark.parametrize("values", ["fp32", "fp16", "rangefloat8"])
def test_huge_gradients_give_finite_results(values: str, rank: int, id: str) -> None:
    """All elements are 1e37: plain sums of 3000 products would overflow."""
    net = Loopback(id, world_size=3, matrix_rank=rank, values=values, min_elements=1)
    for step in range(5):  # the second time Q points along the first gradient
        gradients = [np.full((6, 3000), 1e37, np.float32)] * 3
        if step > 2:
            gradients = [numbers((6, 3000), worker, step, kind="huge") for worker in range(3)]
        out = net.allreduce(gradients, "w", op="sum")[0]
        assert np.isfinite(out).all() and np.isfinite(net.residual("w", 0)).all()
        if (id, values) == ("powersgd", "fp32") and step < 2:
            np.testing.assert_allclose(out, 3e37, rtol=1e-5)
    if values == "fp16":
        assert net.ledger.counters(0)["saturated"] > 0


@pytest.mark.parametrize("values", ["fp16", "bf16"])
def test_small_gradients_in_half_precision(values: str) -> None:
    """Scaled down as for other formats, gradients of 1e-4 would be below fp16's smallest number."""
    m = np.float32(1e-4) * low_rank(1, (64, 1024))
    out = Loopback("powersgd", world_size=8, matrix_rank=1, values=values).allreduce([m] * 8, "w")[0]
    assert np.linalg.norm(out - m) < 0.02 * np.linalg.norm(m)


def test_q_is_kept_when_the_world_changes() -> None:
    net = Trial(hvdcompress.get_method("powersgd"), 2)
    net.allreduce([numbers(SHAPE, rank) for rank in range(2)], "w")
    assert net.saved()[0]["merge"]["w"] == {"residual": "sum", "q": "keep"}
