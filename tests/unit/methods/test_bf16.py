"""bf16: rounded to nearest even, summed in float32, by scatter-reduce."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdcompress.loopback import Loopback
from hvdcompress.testing import Trial, numbers


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
    assert [hex(bits) for bits in out] == [
        "0x3f800000",
        "0x3f820000",
        "0x3f810000",
        "0xbf800000",
        "0x0",
        "0x7f7f0000",
    ]


def test_rounding_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    x = np.concatenate([numbers((2000,), 1), numbers((2000,), 2, kind="mixed"), numbers((500,), 3, kind="huge")])
    expected = torch.from_numpy(x).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(Loopback("bf16", world_size=1).allreduce([x])[0], expected)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("n", [1, 2, 41])
def test_sums_in_float32_and_rounds_once(world_size: int, n: int) -> None:
    """Partial sums are float32, not bfloat16, in which 256 + 1 = 256."""
    net = Loopback("bf16", world_size=world_size, min_elements=1)
    for step in range(20):
        gradients = [numbers((n,), rank, step) for rank in range(world_size)]
        total = rounded(gradients[0])
        for gradient in gradients[1:]:
            total = total + rounded(gradient)
        np.testing.assert_array_equal(net.allreduce(gradients, "w", op="sum")[0], rounded(total))


def test_small_addends_are_not_lost() -> None:
    """A sum in bfloat16 would lose eight addends of 1 one by one: 256 + 1 = 256."""
    net = Loopback("bf16", world_size=9, min_elements=1)
    gradients = [np.float32([256])] + [np.float32([1])] * 8
    assert net.allreduce(gradients, op="sum")[0][0] == 264


@pytest.mark.parametrize("world_size,n", [(1, 10), (2, 10), (3, 10), (4, 1), (5, 0)])
def test_bytes_are_those_of_a_scatter_reduce(world_size: int, n: int) -> None:
    net = Trial(Loopback("bf16", world_size=world_size).plan.program.main, world_size)
    net.allreduce([np.ones(n, np.float32)] * world_size)
    shard = -(-n // world_size)
    assert [(c.collective, c.num_bytes[0]) for c in net.log] == [
        ("AllToAll", 2 * shard * world_size),
        ("AllGather", 2 * shard),
    ]
