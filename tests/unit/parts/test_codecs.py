"""Number formats of values: names, bytes, extremes and damaged bytes."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
import pytest

from hvdcompress.loopback import Loopback
from hvdcompress.ops.numpy import ops
from hvdcompress.parts.codecs import codec
from hvdcompress.parts.levels import FORMATS, LevelCodec
from hvdcompress.parts.quantize import StochasticCodec
from hvdcompress.parts.rangefloat import RangeFloatCodec
from hvdcompress.parts.wire import WireError
from hvdcompress.testing import numbers
from tests.unit.parts.test_quantize import MAX, read_back

#: codec, bytes of its scales for 1009 values, and bits of a value
CODECS: list[tuple[Any, int, int]] = [
    (codec("fp32"), 0, 32),
    (codec("fp16"), 0, 16),
    (codec("bf16"), 0, 16),
    (StochasticCodec(2, 16, "l2"), 4 * 64, 2),
    (StochasticCodec(3, 1), 4 * 1009, 3),
    (StochasticCodec(8, 512), 4 * 2, 8),
    (RangeFloatCodec(10), 9, 10),
    (RangeFloatCodec(7, 3), 8, 7),
    *((LevelCodec(name, 256), 0 if name == "natural" else 4 * 4, FORMATS[name].bits) for name in FORMATS),
]


@pytest.mark.parametrize(
    "name,expected",
    [
        ("qsgd4", StochasticCodec(bits=4, bucket=512, norm="max")),
        ("int8", LevelCodec("int8", 256, "nearest")),
        ("natural", LevelCodec("natural", rounding="stochastic")),
        ("rangefloat16", RangeFloatCodec(16)),
        ("rangefloat4m1", RangeFloatCodec(4, 1)),
    ],
)
def test_names_of_values(name: str, expected: Any) -> None:
    assert codec(name) == expected


def test_codes_in_the_header_differ() -> None:
    names = (*FORMATS, "fp32", "fp16", "bf16", "qsgd4", "rangefloat8")
    assert len({codec(name).code for name in names}) == len(names) == 12


@pytest.mark.parametrize("made,scales,bits", CODECS)
def test_number_of_bytes(made: Any, scales: int, bits: int) -> None:
    assert made.num_bytes(1009) == scales + ceil(1009 * bits / 8)
    for n in (0, 1, 1009):
        read_back(numbers((n,), n), made)


@pytest.mark.parametrize("made", [StochasticCodec(2, 64), RangeFloatCodec(8), *(LevelCodec(name) for name in FORMATS)])
@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-40, 0.1, -1e37, MAX])
def test_equal_elements_are_exact(made: Any, value: float) -> None:
    found = read_back(np.full(100, value, np.float32), made)
    assert np.isfinite(found).all()
    approximate = made in (LevelCodec("natural"), RangeFloatCodec(8)) or (made == LevelCodec("dynamic8") and value < 0)
    if not approximate:
        np.testing.assert_array_equal(found, np.float32(value))


@pytest.mark.parametrize("made", [made for made, *_ in CODECS[3:]], ids=str)
def test_damaged_bytes_are_refused_or_read_as_finite(made: Any) -> None:
    size = made.num_bytes(100)
    for length in (0, size - 1, size + 1):
        with pytest.raises(WireError, match=r"bytes of .*, expected"):
            made.decode(np.zeros(length, np.uint8), 100, ops)
    damaged = np.random.default_rng(0).integers(0, 256, (50, size)).astype(np.uint8)
    for buffer in (*damaged, np.full(size, 255, np.uint8)):
        assert np.isfinite(made.decode(buffer, 100, ops)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_error_of_a_sparse_method_stays_in_the_residual(name: str) -> None:
    net = Loopback("topk", world_size=2, values=name, min_elements=1)
    given = [numbers((40, 30), rank) for rank in range(2)]
    out = net.allreduce(given, "w", op="sum")[0]
    np.testing.assert_allclose(out + sum(net.residual("w", rank) for rank in range(2)), sum(given), atol=1e-4)
