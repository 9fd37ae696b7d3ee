"""Codings of indices: bitmap, int32 and Elias-Fano."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcompress.ops.numpy import ops
from hvdcompress.parts import pack


@pytest.mark.parametrize("coding", ["int32", "elias_fano", "bitmap"])
@given(st.data())
def test_index_codings_round_trip(coding: pack.Coding, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 2000))
    chosen = data.draw(st.lists(st.integers(0, n - 1), max_size=60, unique=coding == "bitmap"))
    index = np.sort(np.array(chosen, np.int32))
    buffer = pack.encode_index(index, coding, n, ops)
    assert len(buffer) == pack.index_num_bytes(coding, len(index), n)
    np.testing.assert_array_equal(pack.decode_index(buffer, coding, len(index), n, ops), index)


def test_elias_fano_bytes_by_hand() -> None:
    """n = 16, indices 1, 6, 7: l = ⌊log2(16/3)⌋ = 2, low bits 01 10 11, high 0, 1, 1 -> bits 0, 2, 3."""
    buffer = pack.encode_index(np.int32([1, 6, 7]), "elias_fano", 16, ops)
    assert buffer.tobytes().hex() == "39000000" + "0d000000"


def test_indices_beyond_two_to_the_31_are_64_bit() -> None:
    n = 2**31 + 10
    index = np.array([0, 2**31 + 9], np.int64)
    buffer = pack.encode_index(index, "int32", n, ops)
    assert len(buffer) == pack.index_num_bytes("int32", 2, n) == 16
    np.testing.assert_array_equal(pack.decode_index(buffer, "int32", 2, n, ops), index)
