"""bf16: rounded to nearest even, summed in float32, by scatter-reduce."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcompress.loopback import Loopback
from hvdcompress.testing import numbers


def bfloat16(value: float) -> float:
    """Round a float32 to bfloat16, to nearest even, with Python's integers. Finite values stay finite."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    sign, magnitude = bits & 0x80000000, bits & 0x7FFFFFFF
    quotient, rest = divmod(magnitude, 0x10000)
    if rest > 0x8000 or (rest == 0x8000 and quotient % 2):
        quotient += 1
    quotient = min(quotient, 0x7F7F)
    return struct.unpack("<f", struct.pack("<I", sign | quotient << 16))[0]


def rounded(x: np.ndarray) -> np.ndarray:
    return np.array([bfloat16(float(value)) for value in x], np.float32)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_rounding_equals_integer_arithmetic(values: list[float]) -> None:
    x = np.array(values, np.float32)
    np.testing.assert_array_equal(Loopback("bf16", world_size=1, min_elements=1).allreduce([x])[0], rounded(x))


def test_ties_go_to_even() -> None:
    x = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000, 0x00008000, 0x7F7FFFFF], np.uint32).view(np.float32)
    out = Loopback("bf16", world_size=1, min_elements=1).allreduce([x])[0].view(np.uint32)
    assert out.tolist() == [0x3F800000, 0x3F820000, 0x3F810000, 0xBF800000, 0, 0x7F7F0000]


def test_rounding_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    x = np.concatenate([numbers((2000,), 1), numbers((2000,), 2, kind="mixed"), numbers((500,), 3, kind="huge")])
    expected = torch.from_numpy(x).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(Loopback("bf16", world_size=1).allreduce([x])[0], expected)


@pytest.mark.parametrize("world_size,n", [(2, 1), (3, 41), (5, 2)])
def test_sums_in_float32_and_rounds_once(world_size: int, n: int) -> None:
    net = Loopback("bf16", world_size=world_size, min_elements=1)
    gradients = [numbers((n,), rank) for rank in range(world_size)]
    total = np.sum([rounded(gradient) for gradient in gradients], axis=0, dtype=np.float32)
    np.testing.assert_array_equal(net.allreduce(gradients, "w", op="sum")[0], rounded(total))
