"""The wire format: the header, payloads one after another, and bytes that are not a payload."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdcompress
from hvdcompress.method import Context, Method, TensorSpec, Workspace
from hvdcompress.ops.numpy import ops
from hvdcompress.parts import wire
from hvdcompress.parts.wire import Header, WireError

headers = st.builds(
    Header,
    method=st.sampled_from(["topk", "gaussiank", "x", "a third party's"]),
    index_code=st.integers(0, 15),
    value_code=st.integers(0, 15),
    elements=st.integers(0, 2**64 - 1),
    entries=st.integers(0, 2**32 - 1),
    length=st.integers(24, 2**32 - 1),
)


@pytest.mark.parametrize(
    "header,expected",
    [
        (Header("topk", 1, 0, 1000, 10, 92), "48430110 8a6e ab27 e803000000000000 0a000000 5c000000"),
        (Header("topk", 2, 1, 0x0102030405, 0x0A0B, 0xC0FFEE), "48430121 8a6e f95f 0504030201000000 0b0a0000 eeffc000"),
    ],
)
def test_header_bytes(header: Header, expected: str) -> None:
    """Magic, version, codes; hash of the method, CRC-16/XMODEM, elements, entries and length, in little-endian order.

    If these bytes change, the format needs a new version.
    """
    assert wire.pack(header) == bytes.fromhex(expected)


def test_method_ids_have_different_codes() -> None:
    ids = hvdcompress.available()
    assert len({wire.method_code(id) for id in ids}) == len(ids)


@given(headers, headers)
def test_header_round_trip(header: Header, other: Header) -> None:
    packed = wire.pack(header)
    assert wire.length(packed) == header.length
    wire.check(packed, header.length, header)
    if other != header:
        with pytest.raises(WireError):
            wire.check(packed, header.length, other)


@given(headers, st.integers(0, 24 * 8 - 1))
def test_flipped_bit_in_the_header_is_an_error(header: Header, bit: int) -> None:
    damaged = bytearray(wire.pack(header))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        wire.check(bytes(damaged), header.length, header)
    with pytest.raises(WireError):
        wire.length(bytes(damaged))


@pytest.mark.parametrize(
    "data,words",
    [
        (b"", "at least 24 bytes"),
        (b"HC" + bytes(10), "at least 24 bytes"),
        (b"XY" + bytes(22), "starts with"),
        (b"HC\x07" + bytes(21), "version 1.*update"),
        (b"HC\x01" + bytes(21), "checksum"),
    ],
)
def test_errors_say_what_is_wrong(data: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        wire.length(data)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6))
def test_split_finds_payloads_of_different_lengths(extra: list[int]) -> None:
    buffer = b"".join(wire.pack(Header("topk", 0, 0, 9, n, 24 + n)) + bytes(n) for n in extra)
    assert wire.split(buffer, len(extra)) == [24 + n for n in extra]
    for wrong in (buffer[:-1], buffer + b"x", buffer + buffer[:24]):
        with pytest.raises(WireError):
            wire.split(wrong, len(extra))


# -- whole payloads -------------------------------------------------------------------------------


def context(n: int) -> Context:
    return Context(0, 2, 0, TensorSpec("w", (n,)))


def payload_of(method: Method, n: int) -> bytes:
    x = np.random.default_rng(n).normal(size=n).astype(np.float32)
    return method.encode(x, {}, context(n), Workspace(ops)).tobytes()


def decode(method: Method, payload: bytes, n: int) -> None:
    method.decode(np.frombuffer(payload, np.uint8), context(n), Workspace(ops))


def test_payload_of_another_method_or_tensor_is_refused() -> None:
    topk, gaussiank = hvdcompress.get_method("topk", density=0.1), hvdcompress.get_method("gaussiank", density=0.1)
    with pytest.raises(WireError, match="another method than 'topk'"):
        decode(topk, payload_of(gaussiank, 40), 40)
    with pytest.raises(WireError, match="40 elements, this one has 41"):
        decode(topk, payload_of(topk, 40), 41)


@pytest.mark.parametrize("code", [0, 1, 2])
@pytest.mark.parametrize("elements,entries,length", [(40, 2**32 - 1, 2**32 - 1), (2**40, 4, 88), (40, 2**32 - 1, 88)])
def test_header_with_wrong_counts_allocates_nothing(code: int, elements: int, entries: int, length: int) -> None:
    """A header with a correct checksum that claims 4 billion entries is refused before memory is allocated."""
    method = hvdcompress.get_method("topk", density=0.1)
    data = wire.pack(Header("topk", code, 0, elements, entries, length)) + bytes(64)
    tracemalloc.start()
    with pytest.raises(WireError):
        decode(method, data, 40)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
