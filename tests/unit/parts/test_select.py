"""Selection: the number k, and the number of elements above a searched threshold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hvdcompress.parts.select import num_kept
from tests.unit.methods.distributions import assert_largest_are_sent, distributions, sent_of

#: method, options, and the least and largest number of elements that it sends, in units of k/3
LIMITS = [("gaussiank", {}, 2, 4), ("dgc", {"select": "sampled"}, 2, 4), ("redsync", {}, 3, 6)]


@pytest.mark.parametrize(
    "n,density,k", [(100, 0.29, 29), (1000, 0.001, 1), (10, 0.01, 1), (7, 1.0, 7), (199, 0.01, 1), (200, 0.01, 2)]
)
def test_num_kept_is_the_floor_of_the_decimal_number(n: int, density: float, k: int) -> None:
    """k = min(n, max(1, ⌊n·density⌋)): 0.29·100 is 29, although it is 28.999999999999996 in floating point."""
    assert num_kept(density, n) == k


@pytest.mark.parametrize("method,options,least,most", LIMITS)
@pytest.mark.parametrize("density", [0.001, 0.5])
@pytest.mark.parametrize("name", distributions())
def test_number_sent_is_near_k_on_any_distribution(
    name: str, density: float, method: str, options: dict[str, str], least: int, most: int
) -> None:
    u = distributions()[name].astype(np.float32)
    k = num_kept(density, len(u))
    out = sent_of(u, density, method, **options)
    assert least * k <= 3 * np.count_nonzero(out) <= most * k
    assert_largest_are_sent(u, out)


@pytest.mark.parametrize("method,options,least,most", LIMITS)
@given(
    u=hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    density=st.sampled_from([0.02, 0.1, 0.3, 0.75, 1.0]),
)
def test_number_sent_is_near_k_for_any_floats(
    method: str, options: dict[str, str], least: int, most: int, u: np.ndarray, density: float
) -> None:
    k = num_kept(density, len(u))
    out = sent_of(u, density, method, **options)
    count, nonzero = np.count_nonzero(out), np.count_nonzero(u)
    assert 3 * count <= most * k
    assert 3 * count >= least * k or count == nonzero, f"{count} of {nonzero} non-zero sent, k = {k}"
    assert_largest_are_sent(u, out)


@pytest.mark.parametrize("method,options,least,most", LIMITS)
@pytest.mark.parametrize("nonzero", [0, 1, 66, 67, 99, 100, 133, 134, 200, 201, 5000])
def test_fewer_are_sent_only_if_fewer_are_non_zero(
    nonzero: int, method: str, options: dict[str, str], least: int, most: int
) -> None:
    u = np.zeros(10_000, np.float32)
    u[np.linspace(0, 9_999, nonzero, dtype=int)] = 20 + np.arange(nonzero) % 7
    count = np.count_nonzero(sent_of(u, 0.01, method, **options))  # k = 100
    assert least * 100 <= 3 * count <= most * 100 if 3 * nonzero >= least * 100 else count == nonzero
