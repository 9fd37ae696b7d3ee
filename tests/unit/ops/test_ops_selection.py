"""The ops of ``selection.py``: choose elements by magnitude."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.vectors import Sparse
from tests.unit.ops.comparing import MAX, TINY, Put, call, chosen, get, vector


def thirds(n: int) -> list[int]:
    """Sizes that add up to n, of which some may be 0."""
    return [n // 3, n // 2 - n // 3, n - n // 2]


def offsets(x: np.ndarray, chunk: int) -> np.ndarray:
    """Offsets of the greatest in each chunk, in each of three parts; the last one beyond its part's end."""
    parts = np.split(x, np.cumsum(thirds(x.size))[:-1])
    found = np.concatenate([reference.chunk_argmax(part, chunk) for part in parts])
    found[-1:] = chunk - 1
    return found


def largest(share: int, o: Any, put: Any, x: np.ndarray, r: np.ndarray) -> Any:
    """Of all, of none, and of some."""
    near, k = Sparse(put(chosen(x)), put(x[chosen(x)])), -(-x.size // (4 * share))
    found, least = o.largest_of([near, near, near], [k, 0, -(-k // 2)], [0, x.size, 2 * x.size + 3])
    return tuple(found), least


# -- compared to the bit, by test_ops.py --------------------------------------------------------------------------


for share in (1, 2, 10, 100):
    call("top_k")(lambda o, put, x, r, d=share: o.top_k(put(x), -(-x.size // d)))
    call("top_k_parts")(lambda o, put, x, r, d=share: o.top_k_parts(put(x), [x.size // d + 1, 1, 9], thirds(x.size)))
    call("largest_of")(partial(largest, share))
    call("kth_magnitude")(lambda o, put, x, r, d=share: o.kth_magnitude(put(x), -(-x.size // d)))
    call("chunk_argmax")(lambda o, put, x, r, c=share: o.chunk_argmax(put(x), c))
    call("chunk_positions")(
        lambda o, put, x, r, c=share: o.chunk_positions(put(reference.chunk_argmax(x, c)), c, (x.size,))
    )
    call("chunk_positions")(lambda o, put, x, r, c=share: o.chunk_positions(put(offsets(x, c)), c, thirds(x.size)))
for level in (0.0, TINY, 0.1, 1.0, MAX, np.inf):
    t = np.float32(level)
    call("count_above")(lambda o, put, x, r, t=t: o.count_above(put(x), t))
    for room in (1, 5, 10**6):
        call("first_above")(lambda o, put, x, r, t=t, c=room: o.first_above(put(x), t, c))
        call("first_equal")(lambda o, put, x, r, t=t, c=room: o.first_equal(put(x), t, c))


# -- large vectors, and the definition ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "heavy", "constant", "ties"])
def test_selection_where_a_sample_decides(native: Any, kind: str) -> None:
    x = vector(kind, 300_007)  # large enough for the compiled top_k to look at a sample only
    sampled = np.arange(x.size) % 5 == 0
    too_low, too_high = np.where(sampled, 1e-3 * x, x), np.where(sampled, x, 1e-3 * x)
    rows = np.where(np.arange(x.size) // 64 % 50 == 7, x, np.float32(0))  # as an embedding's gradient
    for array in (x, too_low.astype(np.float32), too_high.astype(np.float32), rows):
        for k in (1, 30, 3_000, 200_000):
            assert get(native.top_k(Put(native)(array), k)) == get(reference.top_k(array, k))


@pytest.mark.parametrize("k", [1, 7, 31])
def test_kth_magnitude_by_sorting(backend: Any, k: int) -> None:
    for kind in ("normal", "ties", "constant"):
        x = vector(kind, 31)
        assert backend.kth_magnitude(Put(backend)(x), k) == sorted(np.abs(x).tolist())[-k]
