"""Blockwise quantization, natural compression and 1-bit SGD with two means."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress import testing
from hvdcompress.loopback import Loopback
from hvdcompress.testing import numbers
from tests.unit.methods.comparing import assert_errors_average_out


@pytest.mark.parametrize("backend", testing.backends())
@pytest.mark.parametrize(
    ("id", "settings"),
    [
        ("blockwise", {"values": "int4", "block": 32}),
        ("blockwise", {"values": "int4", "block": 32, "rotation": True}),
        ("natural", {"feedback": "plain", "route": "scatter"}),
        ("onebit", {"route": "scatter"}),
        ("qsgd", {"route": "scatter", "feedback": "plain"}),
        ("signsgd", {"route": "scatter"}),
    ],
)
def test_sum_beyond_float32_does_not_stay_in_the_residual(id: str, settings: dict[str, Any], backend: str) -> None:
    """Gradients near the largest float32, whose sum is Inf, leave finite results and residuals in later steps."""
    net = Loopback(id, 2, min_elements=1, ops=testing.backends()[backend], **settings)
    for step, value in enumerate((1.0, 3e38, 1.0, 1.0, 1.0)):
        with np.errstate(over="ignore"):
            out = net.allreduce([np.full(1024, value, np.float32)] * 2, name="w")[0]
        assert np.isfinite(net.residual("w", 0)).all(), step
        assert step == 1 or np.isfinite(out).all(), step


@pytest.mark.parametrize(
    "id,settings",
    [
        ("natural", {}),
        ("blockwise", {"values": "int4", "rounding": "stochastic", "feedback": "none", "route": "gather"}),
    ],
)
def test_errors_of_ranks_average_out(id: str, settings: dict[str, Any]) -> None:
    assert_errors_average_out(id, **settings)


@pytest.mark.parametrize("values,unbiased", [("dynamic8", False), ("fp8_e4m3", True)])
def test_format_without_the_level_minus_one_is_biased(values: str, unbiased: bool) -> None:
    method = hvdcompress.get_method("blockwise", values=values, rounding="stochastic", feedback="none")
    assert method.unbiased is unbiased


def test_rotation_needs_the_route_scatter() -> None:
    with pytest.raises(ValueError, match="rotation has no effect with route 'gather'; it needs route 'scatter'"):
        hvdcompress.get_method("blockwise", rotation=True, route="gather")
    with pytest.raises(ValueError, match="power of two"):
        hvdcompress.get_method("blockwise", block=100)


@pytest.mark.parametrize("kind", ["normal", "heavy", "constant", "sparse"])
def test_onebit_sends_the_mean_of_each_sign(kind: Any) -> None:
    """For given signs the two means have the smallest squared error."""
    x = numbers((500,), 7, kind=kind)
    out = Loopback("onebit", world_size=1, min_elements=1).allreduce([x], "w")[0]
    for of_sign in (x >= 0, x < 0):
        if of_sign.any():
            np.testing.assert_allclose(out[of_sign], x[of_sign].mean(dtype=np.float64), rtol=1e-5)


def test_equal_gradients_on_levels_are_exact() -> None:
    """With equal gradients on all ranks, and levels that hold them, the two quantizations are exact."""
    g = np.float32([7, -3, 2, 0] * 300)
    out = Loopback("blockwise", world_size=4, values="int4", min_elements=1).allreduce([g] * 4, "w")[0]
    np.testing.assert_allclose(out, g, rtol=1e-6)
