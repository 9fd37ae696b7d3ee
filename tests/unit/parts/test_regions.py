"""The regions of a tensor that ranks own."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcompress.parts.regions import SHARES, bounds
from hvdcompress.testing import numbers


@pytest.mark.parametrize("n,world_size", [(0, 3), (1, 4), (5, 8), (1000, 3), (1000, 100), (2**33, 7)])
def test_regions_cover_the_tensor(n: int, world_size: int) -> None:
    for edges in (np.zeros(SHARES - 1, np.float32), np.sort(numbers((SHARES - 1,), 1)) / 4 + np.float32(0.5)):
        found = bounds(np.clip(edges, 0, 1), n, world_size)
        assert found[0] == 0 and found[-1] == n and len(found) == world_size + 1
        assert sorted(found) == found


def test_regions_are_equal_before_anything_is_known() -> None:
    assert bounds(np.zeros(SHARES - 1, np.float32), 1000, 4) == [0, 250, 500, 750, 1000]
