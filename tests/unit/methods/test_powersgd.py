"""PowerSGD: low-rank gradients by a warm-started power iteration (Vogels et al. 2019, arXiv 1905.13727)."""

from __future__ import annotations

import numpy as np
import pytest

import hvdcompress
from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec
from hvdcompress.parts import seed
from hvdcompress.testing import Trial, numbers
from tests.oracles.powersgd import Oracle

SHAPE = (12, 30)


def first_q(name: str, columns: int, rank: int, plan_seed: int = 0) -> np.ndarray:
    ctx = Context(0, 1, 0, TensorSpec(name, (1, columns)), plan_seed)
    return (seed.uniform(seed.shared_key(ctx), rank * columns) - 0.5).reshape(rank, columns).T.astype(np.float64)


def run_beside_oracle(
    world_size: int = 3, shape: tuple[int, ...] = SHAPE, rank: int = 2, steps: int = 12, feedback: str = "plain"
) -> None:
    """Compare library and oracle."""
    net = Loopback("powersgd", world_size=world_size, matrix_rank=rank, feedback=feedback, min_elements=1)
    rows = shape[0]
    oracle = Oracle(world_size, first_q("w", int(np.prod(shape[1:])), rank), feedback == "plain")
    for step in range(steps):
        gradients = [numbers(shape, 99) + numbers(shape, rank, step) for rank in range(world_size)]
        mean = oracle.step([g.reshape(rows, -1).astype(np.float64) for g in gradients])
        out = net.allreduce(gradients, "w")[0]
        scale = max(np.abs(g).max() for g in gradients) + np.abs(oracle.memory[0]).max()
        np.testing.assert_allclose(out.reshape(rows, -1), mean, atol=3e-4 * scale)
        for r in range(world_size if feedback == "plain" else 0):
            kept = net.residual("w", r).reshape(rows, -1)
            np.testing.assert_allclose(kept, oracle.memory[r], atol=3e-4 * scale)


@pytest.mark.parametrize("feedback", ["plain", "none"])
@pytest.mark.parametrize(
    "world_size,shape,rank",
    [(1, SHAPE, 1), (2, SHAPE, 2), (3, (30, 12), 3), (5, (8, 3, 5), 2), (4, (16, 3, 3, 3), 4), (2, (4, 200), 1)],
)
def test_beside_an_independent_oracle(world_size: int, shape: tuple[int, ...], rank: int, feedback: str) -> None:
    run_beside_oracle(world_size, shape, rank, feedback=feedback)


def low_rank(rank: int, shape: tuple[int, int], key: int = 0, scale: float = 1.0) -> np.ndarray:
    left, right = numbers((shape[0], rank), key, 1), numbers((rank, shape[1]), key, 2)
    return np.float32(scale) * (left @ right)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e30])
def test_gradients_of_the_rank_come_through_exactly(rank: int, scale: float) -> None:
    net = Loopback("powersgd", world_size=3, matrix_rank=3, min_elements=1)
    gradient = low_rank(rank, SHAPE, scale=scale)
    for step in range(5):
        out = net.allreduce([np.float32(factor) * gradient for factor in (0.5, 1, 1.5)], "w")[0]
        np.testing.assert_allclose(out, gradient * (1 if step == 0 else out.mean() / gradient.mean()), rtol=1e-3,
                                   atol=1e-4 * np.abs(gradient).max())  # fmt: skip
        if step == 0:
            np.testing.assert_allclose(out, gradient, atol=1e-5 * np.abs(gradient).max())


def test_error_contracts_to_the_best_approximation() -> None:
    """Warm start is a power iteration: with the same M in every step, the error falls to the SVD's and never below."""
    m = low_rank(2, SHAPE) + np.float32(0.5) * numbers(SHAPE, 5)
    for rank in (1, 2, 3):
        best = np.sqrt((np.linalg.svd(m.astype(np.float64), compute_uv=False)[rank:] ** 2).sum())
        net = Loopback("powersgd", world_size=2, matrix_rank=rank, feedback="none", min_elements=1)
        errors = [float(np.linalg.norm(net.allreduce([m, m], "w")[0] - m.astype(np.float64))) for _ in range(40)]
        assert min(errors) >= best * (1 - 1e-6)
        assert errors[-1] <= best * 1.01
        assert all(b <= a * (1 + 1e-5) for a, b in zip(errors, errors[1:], strict=False))


def test_without_a_warm_start_the_error_would_stay() -> None:
    """A fresh network each step: the error is that of one random projection."""
    m = low_rank(1, SHAPE) + np.float32(0.5) * numbers(SHAPE, 5)
    warm = Loopback("powersgd", world_size=1, matrix_rank=1, feedback="none", min_elements=1)
    errors = [np.linalg.norm(warm.allreduce([m], "w")[0] - m) for _ in range(20)]
    assert errors[-1] < 0.99 * errors[0]


def test_feedback_brings_what_was_left_out() -> None:
    """On a constant gradient the mean result tends to it as 1/T."""
    m, gaps, total = numbers(SHAPE, 3), [], np.zeros(SHAPE)
    net = Loopback("powersgd", world_size=2, matrix_rank=1, min_elements=1)
    for step in range(1, 161):
        total += net.allreduce([m, m], "w")[0]
        gaps.append(np.linalg.norm(total / step - m) / np.linalg.norm(m))
    assert gaps[159] < 0.35 * gaps[39] and gaps[159] < 0.15


def test_own_share_is_the_mean_approximation() -> None:
    """As in the authors' code: every rank keeps x − M̂, so Σ residuals = Σ x − p·M̂."""
    net = Trial(hvdcompress.get("powersgd"), 3)
    gradients = [numbers(SHAPE, rank) for rank in range(3)]
    out = net.allreduce(gradients, "w")[0]
    for rank in range(3):
        np.testing.assert_allclose(net.residual("w", rank), gradients[rank] - out, atol=1e-6)


@pytest.mark.parametrize("values,width", [("fp32", 4), ("fp16", 2)])
def test_bytes_are_constant_in_the_number_of_workers(values: str, width: int) -> None:
    for world_size in (1, 2, 7, 64):
        net = Trial(hvdcompress.get("powersgd", matrix_rank=3, values=values), world_size)
        outs = net.allreduce([numbers((40, 50), rank) for rank in range(world_size)])
        assert len({out.tobytes() for out in outs}) == 1
        assert net.ledger.bytes_sent(0) == width * 3 * (40 + 50)
        assert [(c.collective, c.lengths[0]) for c in net.log] == [("AllReduce", 120), ("AllReduce", 150)]


def test_what_it_suits() -> None:
    method = hvdcompress.get("powersgd", matrix_rank=2)
    assert not method.suits(TensorSpec("b", (1000,))) and not method.suits(TensorSpec("s", ()))
    assert not method.suits(TensorSpec("e", (0, 5))) and not method.suits(TensorSpec("e", (5, 0)))
    assert not method.suits(TensorSpec("w", (4, 4)))  # 2·8 values are no fewer than 16
    assert method.suits(TensorSpec("w", (4, 5))) and not method.suits(TensorSpec("w", (2, 1000)))
    assert method.matrix(TensorSpec("c", (64, 32, 3, 3))) == (64, 288)
    assert method.matrix(TensorSpec("c", (3, 3, 32, 64), layout="hwio")) == (288, 64)
    net = Loopback("powersgd", world_size=2, min_elements=1)
    grads = [numbers((50,), rank) for rank in range(2)]
    np.testing.assert_array_equal(net.allreduce(grads, "b", op="sum")[0], grads[0] + grads[1])
    assert net.ledger.bytes_sent(0) == 200


def test_first_q_is_random_shared_and_different_for_each_tensor() -> None:
    m, outs = numbers(SHAPE, 3), []
    for name, plan_seed in (("a", 0), ("b", 0), ("a", 1), ("a", 0)):
        net = Loopback("powersgd", world_size=2, matrix_rank=1, feedback="none", seed=plan_seed, min_elements=1)
        outs.append(net.allreduce([m, m], name)[0])
    assert np.array_equal(outs[0], outs[3])
    assert not np.allclose(outs[0], outs[1]) and not np.allclose(outs[0], outs[2])


def test_a_gradient_of_zero_does_not_end_it() -> None:
    """Q = Mᵀ·P̂ is then zero, and would stay zero."""
    net, m = Loopback("powersgd", world_size=2, matrix_rank=2, feedback="none", min_elements=1), low_rank(2, SHAPE)
    for gradient in (m, 0 * m, 0 * m):
        out = net.allreduce([gradient, gradient], "w")[0]
    assert not out.any()
    np.testing.assert_allclose(net.allreduce([m, m], "w")[0], m, atol=1e-4 * np.abs(m).max())


def test_zero_columns_and_rows_are_harmless() -> None:
    m = low_rank(1, SHAPE)
    m[3], m[:, 5:20] = 0, 0
    net = Loopback("powersgd", world_size=2, matrix_rank=4, min_elements=1)
    for _ in range(4):
        out = net.allreduce([m, 0 * m], "w", op="sum")[0]
        assert np.isfinite(out).all() and not out[3].any() and not out[:, 5:20].any()
    np.testing.assert_allclose(out, m, atol=1e-4 * np.abs(m).max())


@pytest.mark.parametrize("rank", [1, 2])  # with two columns, one may hide an overflow of the other
@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "rangefloat8"])
def test_finite_in_finite_out(values: str, rank: int) -> None:
    """All elements are 1e37: plain sums of 3000 products would overflow."""
    net = Loopback("powersgd", world_size=3, matrix_rank=rank, values=values, min_elements=1)
    for step in range(5):  # the second time Q points along the first gradient
        gradients = [np.full((6, 3000), 1e37, np.float32)] * 3
        if step > 2:
            gradients = [numbers((6, 3000), worker, step, kind="huge") for worker in range(3)]
        out = net.allreduce(gradients, "w", op="sum")[0]
        assert np.isfinite(out).all() and np.isfinite(net.residual("w", 0)).all()
        if values == "fp32" and step < 2:
            np.testing.assert_allclose(out, 3e37, rtol=1e-5)
    if values == "fp16":
        assert net.ledger.counters(0)["saturated"] > 0


def test_half_precision_has_the_numbers_at_their_own_size() -> None:
    """Scaled down as for other formats, gradients of 1e-4 would be below fp16's smallest number."""
    m = low_rank(1, (64, 1024), scale=1e-4)
    for values in ("fp16", "bf16"):
        out = Loopback("powersgd", world_size=8, matrix_rank=1, values=values).allreduce([m] * 8, "w")[0]
        assert np.linalg.norm(out - m) < 0.02 * np.linalg.norm(m)


@pytest.mark.parametrize("values", ["fp16", "bf16", "rangefloat8"])
def test_lossy_factors_are_the_same_on_all_ranks_and_nothing_is_lost(values: str) -> None:
    net, sent, given = Trial(hvdcompress.get("powersgd", values=values), 3), np.zeros(SHAPE), np.zeros(SHAPE)
    for step in range(10):
        gradients = [numbers(SHAPE, rank, step) for rank in range(3)]
        given += np.sum(gradients, axis=0)
        sent += net.allreduce(gradients, "w", op="sum")[0]
        assert len({worker.states["w"].slots["q"].tobytes() for worker in net.ranks}) == 1
    kept = np.sum([net.residual("w", rank) for rank in range(3)], axis=0)
    np.testing.assert_allclose(sent + kept, given, atol=1e-4)


def test_q_is_in_the_checkpoint() -> None:
    net, resumed, cold = [Trial(hvdcompress.get("powersgd"), 2) for _ in range(3)]
    for step in range(4):
        net.allreduce([numbers(SHAPE, rank, step) for rank in range(2)], "w")
    saved = net.saved()
    assert saved[0]["merge"]["w"] == {"residual": "sum", "q": "keep"}
    resumed.restore(saved, [TensorSpec("w", SHAPE)])
    for one in saved:
        one["state"]["w"]["q"] = 0 * one["state"]["w"]["q"]
    cold.restore(saved, [TensorSpec("w", SHAPE)])
    last = [numbers(SHAPE, rank, 9) for rank in range(2)]
    outs = [one.allreduce(last, "w")[0] for one in (net, resumed, cold)]
    assert np.array_equal(outs[0], outs[1]) and not np.allclose(outs[0], outs[2])


@pytest.mark.parametrize("bad", [{"matrix_rank": 0}, {"matrix_rank": True}, {"values": "fp8"}])
def test_bad_settings_are_named(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        hvdcompress.get("powersgd", **bad)
