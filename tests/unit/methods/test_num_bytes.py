"""``num_bytes`` of every method, by the formula in its documentation.

The conformance suite checks that exactly so many bytes are sent.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest

import hvdcompress
from hvdcompress.method import TensorSpec


def words(bits: float) -> int:
    """Return the bytes of the 32-bit words that hold so many bits."""
    return 4 * ceil(bits / 32)


def index(n: int, k: int, bitmap: bool = True) -> int:
    """Return the bytes of k indices below n, in the shortest coding: int32, Elias-Fano or a bitmap."""
    low = (n // k).bit_length() - 1
    elias_fano = words(k * low) + words(k + (n >> low) + 1)
    return min(4 * k, elias_fano, *([words(n)] if bitmap else []))


def quantized(n: int, bits: int, bucket: int) -> int:
    """Return the bytes of n values: one float32 per bucket, and the codes."""
    return 4 * ceil(n / bucket) + ceil(n * bits / 8)


def range_floats(n: int, bits: int) -> int:
    """Return the bytes of n range floats: the range, and the codes."""
    return words(8 * (9 + ceil(n * bits / 8)))


HEADER = 24
SPARSE = [
    ("topk", {"density": 0.001}, 100_000, 2, HEADER + index(100_000, 100) + 4 * 100),
    ("topk", {"density": 0.3, "values": "bf16"}, 4096, 2, HEADER + index(4096, 1228) + 2 * 1228),
    ("topk", {"density": 1.0}, 4096, 2, HEADER + 4096 // 8 + 4 * 4096),
    ("topk", {"density": 0.1}, 10, 2, HEADER + 4 + 4),
    ("gtopk", {"density": 0.3}, 4096, 1, HEADER + index(4096, 1228) + 4 * 1228),
    ("gtopk", {"density": 0.3}, 4096, 2, 2 * (HEADER + index(4096, 1228) + 4 * 1228)),
    ("gtopk", {"density": 0.3, "values": "fp16"}, 4096, 9, 2 * (HEADER + index(4096, 1228) + 2 * 1228)),
    ("dgc", {"density": 0.3}, (4096, 1), 2, HEADER + index(4096, 1228) + 4 * 1228),
    ("dgc", {"density": 0.3, "select": "sampled"}, (4096, 1), 2, HEADER + index(4096, 1637, False) + 4 * 1637),
    ("gaussiank", {"density": 0.01}, 5000, 2, HEADER + index(5000, 66, False) + 4 * 66),
    ("redsync", {"density": 0.01}, 5000, 2, HEADER + index(5000, 100, False) + 4 * 100),
    ("redsync", {"density": 0.01, "select": "paper"}, 5000, 2, HEADER + index(5000, 100, False) + 4 * 100),
    ("redsync", {"density": 0.01, "select": "trimmed"}, 5000, 2, HEADER + index(5000, 50) + 4 * 50),
    ("scalecom", {"density": 0.01}, 2000, 1, index(2000, 20) + 4 * 20),
    ("scalecom", {"density": 0.01, "values": "fp16"}, 2000, 256, index(2000, 20) + 2 * 20),
    ("scalecom", {"density": 1.0, "select": "chunk"}, 2000, 2, 4 * 2000),
    ("scalecom", {"density": 0.1, "select": "chunk"}, 2000, 2, words(4 * 200) + 4 * 200),
    ("scalecom", {"density": 1 / 128, "select": "chunk"}, 2000, 2, words(7 * 16) + 4 * 16),
    ("scalecom", {"density": 0.001, "select": "chunk"}, 20_001, 2, words(10 * 21) + 4 * 21),
    ("randomk", {"density": 0.1}, 1000, 3, 4 * 100),
    ("randomk", {"density": 0.1, "values": "fp16"}, 1000, 3, 2 * 100),
    ("randomk", {"density": 0.1, "values": "bf16"}, 1000, 3, 2 * 102 + 2 * 34),
    ("arctopk", {"density": 0.3, "row": 64, "sketch": 2}, 4100, 1, 4 * 2 * 64 + 4 * (64 * 19 + 4)),
    ("arctopk", {"density": 0.3, "row": 64, "sketch": 1, "values": "fp16"}, 4100, 64, 4 * 64 + 2 * (64 * 19 + 4)),
]
DENSE = [
    ("none", {}, 100, 4, 4 * 100),
    ("fp16", {}, 101, 3, 2 * 101),
    ("bf16", {}, 10, 1, 2 * 10 + 2 * 10),
    ("bf16", {}, 10, 3, 2 * 4 * 3 + 2 * 4),
    ("bf16", {}, 0, 5, 0),
    ("qsgd", {"bits": 2}, 1009, 5, HEADER + quantized(1009, 2, 512)),
    ("qsgd", {"bits": 8, "bucket": 100, "route": "scatter"}, 4096, 5, 6 * quantized(820, 8, 100)),
    ("terngrad", {}, 1000, 1, 4 + 4 * ceil(1000 / 16)),  # fields of 2 bits
    ("terngrad", {}, 1000, 3, 4 + 4 * ceil(1000 / 10)),
    ("terngrad", {}, 1000, 4, 4 + 4 * ceil(1000 / 8)),
    ("terngrad", {}, 1000, 8, 4 + 4 * ceil(1000 / 6)),
    ("terngrad", {}, 1000, 64, 4 + 4 * ceil(1000 / 4)),  # fields of 8 bits
    ("terngrad", {"route": "gather"}, 7, 3, HEADER + 4 + 2),
    ("terngrad", {"route": "scatter"}, 1000, 3, 4 * (4 + ceil(334 / 4))),
    ("signsgd", {}, 1001, 3, HEADER + 4 + 126),
    ("signsgd", {"route": "scatter"}, 1000, 3, 4 * (4 + ceil(334 / 8))),
    ("blockwise", {"values": "int4"}, 1000, 3, 4 * quantized(334, 4, 256)),
    ("blockwise", {"values": "int4", "rotation": True}, 1000, 3, 4 * quantized(342, 4, 256)),
    ("blockwise", {"values": "int4", "route": "gather"}, 1000, 3, HEADER + quantized(1000, 4, 256)),
    ("natural", {}, 1000, 3, HEADER + ceil(9 * 1000 / 8)),
    ("onebit", {"route": "scatter"}, 1000, 3, 4 * (8 + ceil(334 / 8))),
    ("powersgd", {"matrix_rank": 3}, (40, 50), 1, 4 * 3 * (40 + 50)),
    ("powersgd", {"matrix_rank": 3, "values": "fp16"}, (40, 50), 64, 2 * 3 * (40 + 50)),
    ("acpsgd", {"matrix_rank": 2}, (12, 30), 2, 4 * 2 * 12),  # and 4·2·30 in the next step
]
FREQUENCIES = [
    ("fft", {"density": 0.15}, 1 << 20, 2, HEADER + index(2049 << 8, 78681) + range_floats(2 * 78681, 10)),
    ("fft", {"density": 0.5}, 5000, 2, HEADER + index(2502, 1251) + range_floats(2 * 1251, 10)),
    ("fft", {"density": 1.0, "values": "rangefloat16"}, 1, 2, HEADER + 4 + range_floats(2, 16)),
    ("fft", {"density": 0.1, "block": 0, "values": "fp32"}, 1009, 2, HEADER + index(505, 50) + 4 * 100),
]


@pytest.mark.parametrize("id,options,shape,world_size,expected", SPARSE + DENSE + FREQUENCIES)
def test_num_bytes(id: str, options: dict[str, Any], shape: Any, world_size: int, expected: int) -> None:
    spec = TensorSpec("w", shape if isinstance(shape, tuple) else (shape,))
    assert hvdcompress.get_method(id, **options).num_bytes(spec, world_size) == expected
