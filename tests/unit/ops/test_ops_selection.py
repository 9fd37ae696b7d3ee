"""Tests of ``selection.py`` in the backends; ``test_ops.py`` compares its ops with the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcompress.ops.numpy import ops as reference
from tests.unit.ops.comparing import Put, get
from tests.unit.ops.inputs import vector


@pytest.mark.parametrize("kind", ["heavy", "constant", "ties"])
@pytest.mark.parametrize("representative", ["random", "too low", "too high", "rows"])
def test_top_k_where_a_sample_estimates_the_threshold(native: Any, kind: str, representative: str) -> None:
    """The vector is large enough for the compiled ``top_k`` to look at a sample first."""
    x = vector(kind, 300_007)
    place = np.arange(x.size)
    if representative == "rows":  # as the gradient of an embedding
        x[place // 64 % 50 != 7] = 0
    elif representative != "random":  # the sample has every fifth element
        x[(place % 5 == 0) == (representative == "too low")] *= np.float32(1e-3)
    for k in (1, 3_000, 200_000):
        assert get(native.top_k(Put(native)(x), k)) == get(reference.top_k(x, k))
