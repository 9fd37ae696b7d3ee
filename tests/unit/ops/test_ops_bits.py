"""The ops of ``bits.py``: numbers of a few bits, and bitmaps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcompress.ops import numpy as reference
from tests.unit.ops.comparing import Put, call, chosen, get, host, numbers

# -- compared to the bit, by test_ops.py --------------------------------------------------------------------------


for width in (0, 1, 7, 8, 13, 31):
    call("pack_bits")(lambda o, put, x, r, w=width: o.pack_bits(put(numbers(x, w)), w))
    call("pack_bits")(lambda o, put, x, r, w=width: o.pack_bits(put(numbers(x, w).astype(np.int32)), w))
    call("unpack_bits")(
        lambda o, put, x, r, w=width: o.unpack_bits(put(reference.pack_bits(numbers(x, w), w)), w, x.size)
    )
for missing in (0, 1, 9):
    call("find_bits")(lambda o, put, x, r, m=missing: o.find_bits(put(x.view(np.uint8)), max(32 * x.size - m, 0)))
call("find_bits")(lambda o, put, x, r: o.find_bits(put(np.r_[x.view(np.uint8), np.uint8(255)]), 32 * x.size + 20))
call("set_bits")(lambda o, put, x, r: o.set_bits(put(chosen(x)), x.size))
call("set_bits")(lambda o, put, x, r: o.set_bits(put(chosen(x).astype(np.int64)), x.size + 5))

for low in (0, 1, 7, 31):
    call("elias_fano")(lambda o, put, x, r, w=low: o.elias_fano(put(chosen(x)), w, 2 * x.size + 9))
    for short in (0, 1):

        @call("from_elias_fano")
        def _(o, put, x, r, w=low, short=short):
            lows, highs = reference.elias_fano(chosen(x).astype(np.int64), w, 2 * x.size + 9)
            return o.from_elias_fano(put(lows[short:]), put(highs[: highs.size - short]), w, 2 * x.size + 9)


# -- damaged payloads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("width", [1, 7, 8, 13, 56])
def test_zeros_follow_a_buffer_that_is_too_short(backend: Any, width: int, length: int) -> None:
    """numpy's ``unpackbits`` of an empty buffer would return memory that nobody has written."""
    put, count = Put(backend), 100
    whole = np.zeros(-(-count * width // 8), np.uint8)
    whole[:length] = 0b10110101
    for _ in range(5):
        stale = np.full(count * width, 0xFF, np.uint8)  # what a new array of this size may find in its memory
        del stale
        found = backend.unpack_bits(put(whole[:length]), width, count)
        assert get(found) == get(reference.unpack_bits(whole, width, count))
        assert host(found).any() == (length > 0)
        set_ones = host(backend.find_bits(put(whole[:length]), count * width))
        assert set_ones.tolist() == np.flatnonzero(np.unpackbits(whole[:length], bitorder="little")).tolist()
        signs = host(backend.unpack_signs(put(whole[:length]), put(np.float32([2])), count * width))
        assert np.flatnonzero(signs < 0).tolist() == set_ones[set_ones < count * width].tolist()
    for bits in (2, 5, 8):  # the levels of quantize
        found = backend.dequantize(put(whole[:length]), put(np.float32([2])), count, bits, count)
        longer = np.concatenate([whole, np.zeros(count, np.uint8)])
        assert get(found) == get(reference.dequantize(longer, np.float32([2]), count, bits, count))
