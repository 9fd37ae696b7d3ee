"""tools/soak.py: what it takes for growth, and the page that is made of its figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import soak

WELL = {
    "method": "topk", "steps": 10_000, "equal": True, "slope": 3.0, "error": 1.0, "residual": 10.0,
    "residual_late": 10.0, "residual_slope": 1e-9, "residual_error": 1e-9, "own_slope": 0.0, "first": 1e-3,
    "last": 1e-3, "command": "python tools/soak.py",
}  # fmt: skip
ILL = {
    "ranks differ": {"equal": False},
    "memory grows": {"slope": 200.0},
    "the residual grows": {"residual_slope": 1e-3},
    "steps become slower": {"last": 2e-3},
}


@pytest.mark.parametrize("what", ILL)
def test_what_is_wrong_is_named(what: str) -> None:
    assert soak.wrong({**WELL, **ILL[what]}) == what
    assert what in soak.table([{**WELL, **ILL[what]}]).markdown()


def test_the_line_is_that_of_least_squares() -> None:
    x = np.arange(50.0)
    y = 3 * x + np.random.default_rng(0).normal(size=50)
    (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
    assert soak.line(x, y) == pytest.approx((slope, np.sqrt(covariance[0, 0])))


def test_a_few_steps_of_a_method() -> None:
    """Residuals that ranks keep of PowerSGD grow, what is still to come does not: by Alg. 2 they differ."""
    found: dict[str, Any] = soak.soak("powersgd", 900)
    assert found["equal"] and found["own_slope"] > 0.1 > 20 * abs(found["residual_slope"])
