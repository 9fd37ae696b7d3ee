"""The ops of ``levels.py``: values in units of a norm, rounded to a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcompress.ops import numpy as reference
from tests.unit.ops.comparing import call, changed, key, vector
from tests.unit.ops.test_ops_codes import damaged

KEY = key(5)
TABLES = {  # bits per index, levels
    "ternary": (2, np.float32([-1, 0, 1])),
    "uneven": (3, np.float32([-0.5, -0.1, 0, 0.25, 0.3, 1])),
    "full": (8, np.linspace(-1, 1, 256, dtype=np.float32)),
    "powers": (9, np.float32([*-(2.0 ** np.arange(127, -127, -1)), 0, *2.0 ** np.arange(-126, 128)])),
}


# -- compared to the bit, by test_ops.py --------------------------------------------------------------------------


def both(name: str, bucket: int, random: bool, o: Any, put: Any, x: np.ndarray, r: np.ndarray) -> Any:
    """Codes of x, in a new array and in one that is there; with norms of buckets, and with arbitrary ones."""
    bits, levels = TABLES[name]
    rest = bucket, levels, bits, KEY if random else None
    there = np.full(-(-x.size * bits // 8), 7, np.uint8)
    norms = reference.bucket_norms(x, bucket, "max")
    onto = changed(o, put, there, lambda out: o.encode_levels(put(x), put(norms), *rest, out))
    return onto, o.encode_levels(put(x), put(norms), *rest), o.encode_levels(put(x), put(np.abs(r)), *rest)


for name, (bits, levels) in TABLES.items():
    for bucket in (1, 3, 512, 1 << 62):
        for random in (False, True):
            call("encode_levels")(
                lambda o, put, x, r, n=name, b=bucket, at_random=random: both(n, b, at_random, o, put, x, r)
            )
        call("decode_levels")(
            lambda o, put, x, r, b=bucket, w=bits, table=levels: o.decode_levels(
                put(x.view(np.uint8)), put(damaged(x, 32 * x.size)), b, table, w, 32 * x.size // w
            )
        )


# -- by definition ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_the_nearest_level_is_taken(name: str) -> None:
    bits, levels = TABLES[name]
    x, one = vector("normal", 1000), np.ones(1, np.float32)
    found = reference.decode_levels(
        reference.encode_levels(x, one, 1 << 62, levels, bits), one, 1 << 62, levels, bits, 1000
    )
    nearest = np.abs(levels.astype(np.float64) - x[:, None]).min(axis=1)
    np.testing.assert_allclose(np.abs(found.astype(np.float64) - x), nearest, rtol=1e-6)


@pytest.mark.parametrize("name", TABLES)
def test_at_random_the_mean_is_x(name: str) -> None:
    """One of the two levels next to x, so often that the mean is x; beyond the table, its end."""
    bits, levels = TABLES[name]
    x, one = np.float32([-0.45, -0.05, 0.0, 0.27, 0.3, 0.9, 1.5e38]), np.ones(1, np.float32)
    trials = np.array(
        [
            reference.decode_levels(
                reference.encode_levels(x, one, 1 << 62, levels, bits, key(t)), one, 1 << 62, levels, bits, 7
            )
            for t in range(4000)
        ],
        np.float64,
    )
    inside = x.clip(levels[0], levels[-1])
    at = np.searchsorted(levels, inside, side="right").clip(1, len(levels) - 1)
    gap = levels[at].astype(np.float64) - levels[at - 1]
    assert (np.abs(trials.mean(axis=0) - inside) <= 5 * gap / 2 / np.sqrt(4000)).all()
    assert (np.abs(trials - inside) <= gap * (1 + 1e-6)).all()
    assert (
        np.isin(inside, levels).any() and (trials[:, np.isin(inside, levels)] == inside[np.isin(inside, levels)]).all()
    )
