"""Blockwise quantization, natural compression and 1-bit SGD with two means."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress import testing
from hvdcompress.loopback import Loopback
from hvdcompress.testing import Trial, numbers
from tests.unit.methods.quantizers import assert_errors_average_out, assert_nothing_is_lost

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("blockwise", {"values": "int4", "block": 32}),
    ("blockwise", {"values": "int4", "block": 32, "route": "gather"}),
    ("blockwise", {"values": "int4", "block": 32, "rotation": True}),
    ("natural", {"feedback": "plain", "route": "scatter"}),
    ("onebit", {}),
    ("onebit", {"route": "scatter"}),
]


@pytest.mark.parametrize(("id", "settings"), SETTINGS)
def test_nothing_is_lost(id: str, settings: dict[str, Any]) -> None:
    """The shares add up, the error of the second encoding included."""
    assert_nothing_is_lost(id, 1e-4, **settings)


@pytest.mark.parametrize("backend", testing.backends())
@pytest.mark.parametrize(
    ("id", "settings"),
    [
        *(
            (id, settings)
            for id, settings in SETTINGS
            if settings.get("route", "scatter") == "scatter" and id != "onebit"
        ),
        ("onebit", {"route": "scatter"}),
        ("qsgd", {"route": "scatter", "feedback": "plain"}),
        ("signsgd", {"route": "scatter"}),
    ],
)
def test_a_sum_beyond_float32_does_not_stay_in_the_residual(id: str, settings: dict[str, Any], backend: str) -> None:
    """Gradients near the largest float32, whose sum is Inf, leave finite results and residuals in later steps."""
    net = Loopback(id, 2, min_elements=1, ops=testing.backends()[backend], **settings)
    for step, value in enumerate((1.0, 3e38, 1.0, 1.0, 1.0)):
        with np.errstate(over="ignore"):
            out = net.allreduce([np.full(1024, value, np.float32)] * 2, name="w")[0]
        assert np.isfinite(net.residual("w", 0)).all(), step
        assert step == 1 or np.isfinite(out).all(), step


def test_errors_of_ranks_average_out() -> None:
    assert_errors_average_out("natural")
    assert_errors_average_out("blockwise", values="int4", rounding="stochastic", feedback="none", route="gather")


@pytest.mark.parametrize("n", [1, 257, 1000])
@pytest.mark.parametrize("world_size", [1, 3])
def test_bytes_by_the_formula(n: int, world_size: int) -> None:
    def sent(id: str, **settings: Any) -> int:
        net = Trial(hvdcompress.get(id, **settings), world_size)
        net.allreduce([numbers((n,), rank) for rank in range(world_size)], "w")
        return net.ledger.bytes_sent(0)

    def of_block(c: int) -> int:
        return 4 * math.ceil(c / 256) + math.ceil(c / 2)

    shard = math.ceil(n / world_size)
    assert sent("blockwise", values="int4") == (world_size + 1) * of_block(shard)
    padded = math.ceil(256 * math.ceil(n / 256) / world_size)
    assert sent("blockwise", values="int4", rotation=True) == (world_size + 1) * of_block(padded)
    assert sent("blockwise", values="int4", route="gather") == 24 + of_block(n)
    assert sent("natural") == 24 + math.ceil(9 * n / 8)
    assert sent("onebit", route="scatter") == (world_size + 1) * (8 + math.ceil(shard / 8))


def test_a_format_without_the_level_minus_one_is_biased() -> None:
    for values, unbiased in (("dynamic8", False), ("fp8_e4m3", True)):
        method = hvdcompress.get("blockwise", values=values, rounding="stochastic", feedback="none")
        assert method.unbiased is unbiased


def test_rotation_needs_the_route_scatter() -> None:
    with pytest.raises(ValueError, match='rotation needs route "scatter"'):
        hvdcompress.get("blockwise", rotation=True, route="gather")
    with pytest.raises(ValueError, match="power of two"):
        hvdcompress.get("blockwise", block=100)


@pytest.mark.parametrize("kind", ["normal", "heavy", "constant", "sparse", "shifted"])
def test_two_means_err_no_more_than_one(kind: Any) -> None:
    """For given signs the two means have the smallest squared error; signsgd's magnitude is another choice."""
    x = numbers((500,), 7, kind=kind)
    out = {id: Loopback(id, world_size=1, min_elements=1).allreduce([x], "w")[0] for id in ("onebit", "signsgd")}
    errors = {id: np.square(found.astype(np.float64) - x).sum() for id, found in out.items()}
    assert errors["onebit"] <= errors["signsgd"] * (1 + 1e-6) + 1e-12
    for chosen in (x >= 0, x < 0):
        if chosen.any():
            np.testing.assert_allclose(out["onebit"][chosen], x[chosen].mean(dtype=np.float64), rtol=1e-5)


def test_equal_gradients_on_levels_are_exact() -> None:
    """With equal gradients on all ranks, and levels that hold them, the two shots are exact."""
    g = np.float32([7, -3, 2, 0] * 300)
    out = Loopback("blockwise", world_size=4, values="int4", min_elements=1).allreduce([g] * 4, "w")[0]
    np.testing.assert_allclose(out, g, rtol=1e-6)
