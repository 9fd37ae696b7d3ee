"""Helpers of the tests of methods: reference implementations, sizes of payloads, and errors of quantizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec
from hvdcompress.parts import seed
from hvdcompress.testing import numbers


def assert_matches_oracle(
    net: Loopback,
    oracle: Any,
    shape: tuple[int, ...],
    *,
    steps: int = 15,
    kinds: Sequence[Any] = ("normal",),
    tolerance: float = 1e-6,
    exact_residuals: bool = False,
) -> None:
    """Compare sums and residuals with those of a reference implementation in every step.

    Args:
        net: the network.
        oracle: an object with ``step(gradients)``, which returns the sum, and ``memory``, the residuals of all ranks.
        shape: shape of the gradients.
        steps: number of steps.
        kinds: kinds of test data, used in turn.
        tolerance: relative tolerance; the absolute one is relative to the largest element.
        exact_residuals: whether residuals must be equal to the bit.
    """
    for step in range(steps):
        gradients = [numbers(shape, rank, step, kind=kinds[step % len(kinds)]) for rank in range(net.world_size)]
        expected = oracle.step(gradients)
        out = net.allreduce(gradients, "w", op="sum")[0].reshape(expected.shape)
        largest = max(np.abs(x).max() for x in (expected, *oracle.memory, *gradients))
        close = {"rtol": tolerance, "atol": tolerance * largest, "err_msg": f"step {step}"}
        np.testing.assert_allclose(out, expected, **close)
        for rank, memory in enumerate(oracle.memory):
            residual = net.residual("w", rank).reshape(memory.shape)
            if exact_residuals:
                np.testing.assert_array_equal(residual, memory, f"step {step}, rank {rank}")
            else:
                np.testing.assert_allclose(residual, memory, **close)


def assert_errors_average_out(id: str, **settings: Any) -> None:
    """With equal gradients on p ranks and private streams, the error of the mean has 1/p of one rank's energy."""
    world_size = 16
    g = numbers((512,), 4)
    energy = []
    for p in (1, world_size):
        net = Loopback(id, world_size=p, min_elements=1, **settings)
        energy.append(np.mean([np.square(net.allreduce([g] * p, "w")[0] - g).sum() for _ in range(40)]))
    assert 0.8 / world_size < energy[1] / energy[0] < 1.25 / world_size


def assert_unbiased(net: Loopback, gradients: list[np.ndarray], expected: np.ndarray, steps: int) -> None:
    """The mean over the steps approaches ``expected`` as 1/√steps, which a bias would prevent."""
    outs = np.array([net.allreduce(gradients, "w")[0] for _ in range(steps)], np.float64)
    error = np.square(outs.mean(0) - expected).sum()
    assert error < 1.5 * outs.var(0).sum() / steps


def first_q(columns: int, rank: int, name: str = "w") -> np.ndarray:
    """Return the first Q [columns × rank] of PowerSGD and ACP-SGD, in float64."""
    key = seed.shared_key(Context(0, 1, 0, TensorSpec(name, (1, columns)), 0))
    return (seed.uniform(key, rank * columns) - 0.5).reshape(rank, columns).T.astype(np.float64)
