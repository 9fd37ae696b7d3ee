"""The wire format: a header typed by hand; bytes that are not a payload raise ``WireError`` and nothing else."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdcompress
from hvdcompress.method import Context, Method, Sparse, TensorSpec, Workspace
from hvdcompress.ops import numpy as ops
from hvdcompress.parts import pack, wire
from hvdcompress.parts.wire import Header, WireError

METHODS = [
    hvdcompress.get("topk", density=0.05),
    hvdcompress.get("topk", density=0.4),  # a bitmap
    hvdcompress.get("topk", density=0.05, values="fp16"),
    hvdcompress.get("gaussiank", density=0.05, values="bf16"),
    hvdcompress.get("gaussiank", density=0.9),
]
headers = st.builds(
    Header,
    method=st.sampled_from(["topk", "gaussiank", "x", "a third party's"]),
    index_code=st.integers(0, 15),
    value_code=st.integers(0, 15),
    elements=st.integers(0, 2**64 - 1),
    entries=st.integers(0, 2**32 - 1),
    length=st.integers(24, 2**32 - 1),
)


def crc16(data: bytes) -> int:
    """CRC-16/XMODEM: polynomial 0x1021, start 0, bit by bit."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc


def test_crc_is_xmodem() -> None:
    assert crc16(b"123456789") == 0x31C3  # the catalogue's check value
    header = wire.pack(Header("topk", 1, 0, 100, 5, 64))
    assert int.from_bytes(header[6:8], "little") == crc16(header[:6] + header[8:])


def test_header_bytes() -> None:
    """magic, version, codes, method's hash, CRC, elements, entries, length: little-endian, 24 bytes."""
    header = wire.pack(
        Header("topk", index_code=2, value_code=1, elements=0x0102030405, entries=0x0A0B, length=0xC0FFEE)
    )
    body = "4843" + "01" + "21" + wire.method_code("topk").to_bytes(2, "little").hex()
    counts = "0504030201000000" + "0b0a0000" + "eeffc000"
    crc = crc16(bytes.fromhex(body + counts))
    assert header.hex() == body + crc.to_bytes(2, "little").hex() + counts
    assert len(header) == wire.NUM_BYTES == 24


def test_golden_header() -> None:
    """Recorded from a payload of version 1. If these bytes change, the format needs a new version."""
    assert wire.pack(Header("topk", 1, 0, 1000, 10, 92)).hex() == GOLDEN


GOLDEN = "484301108a6eab27e8030000000000000a0000005c000000"


def test_method_ids_have_different_codes() -> None:
    ids = hvdcompress.available()
    assert len({wire.method_code(id) for id in ids}) == len(ids)


@given(headers)
def test_header_round_trip(header: Header) -> None:
    packed = wire.pack(header)
    assert wire.length(packed) == header.length
    wire.check(packed, header.length, header)


@given(headers, headers)
def test_another_header_is_refused(one: Header, other: Header) -> None:
    if one != other:
        with pytest.raises(WireError):
            wire.check(wire.pack(one), one.length, other)


@given(headers, st.integers(0, 24 * 8 - 1))
def test_a_flipped_bit_in_the_header_is_noticed(header: Header, bit: int) -> None:
    damaged = bytearray(wire.pack(header))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        wire.check(bytes(damaged), header.length, header)
    with pytest.raises(WireError):
        wire.length(bytes(damaged))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_header_or_an_error(data: bytes) -> None:
    with suppress(WireError):
        assert wire.length(data) >= 24


@pytest.mark.parametrize(
    "data,words",
    [
        (b"", "at least 24 bytes"),
        (b"HC" + bytes(10), "at least 24 bytes"),
        (b"XY" + bytes(22), "starts with"),
        (b"HC\x07" + bytes(21), "version 1"),
        (b"HC\x01" + bytes(21), "checksum"),
    ],
)
def test_errors_say_what_is_wrong(data: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        wire.length(data)


def test_version_error_says_which_side_to_update() -> None:
    newer = bytearray(wire.pack(Header("topk", 0, 0, 1, 1, 32)))
    newer[2] = 2
    with pytest.raises(WireError, match="update"):
        wire.length(bytes(newer))


# -- payloads one after another ---------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6))
def test_split_finds_payloads_of_uneven_length(extra: list[int]) -> None:
    buffer = b"".join(wire.pack(Header("topk", 0, 0, 9, n, 24 + n)) + bytes(n) for n in extra)
    assert wire.split(buffer, len(extra)) == [24 + n for n in extra]
    for wrong in (buffer[:-1], buffer + b"x", buffer + buffer[:24]):
        with pytest.raises(WireError):
            wire.split(wrong, len(extra))


@given(st.binary(max_size=200), st.integers(1, 5))
def test_split_of_any_bytes(data: bytes, world_size: int) -> None:
    with suppress(WireError):
        assert sum(wire.split(data, world_size)) == len(data)


# -- whole payloads: fuzzed -------------------------------------------------------------------------------


def context(n: int) -> Context:
    return Context(0, 2, 0, TensorSpec("w", (n,)))


def payload_of(method: Method, n: int, key: int) -> np.ndarray:
    x = np.random.default_rng(key).normal(size=n).astype(np.float32)
    return method.encode(x, {}, context(n), Workspace(ops))


def decodes_or_raises(method: Method, data: bytes, n: int) -> bool:
    """Decode bytes: any bytes give a vector that fits the tensor, or a WireError."""
    try:
        share = method.decode(np.frombuffer(data, np.uint8), context(n), Workspace(ops))
    except WireError:
        return False
    index, values = np.asarray(share.index), np.asarray(share.values)
    assert len(index) == len(values) <= n
    assert ((index >= 0) & (index < n)).all()
    return True


@pytest.mark.parametrize("method", METHODS, ids=str)
@settings(max_examples=150)
@given(data=st.data())
def test_damaged_payloads(method: Method, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 300), "n")
    good = payload_of(method, n, n).tobytes()
    assert decodes_or_raises(method, good, n)
    damage = data.draw(st.sampled_from(["cut", "flip", "overwrite", "append", "resize"]), "damage")
    bad = bytearray(good)
    if damage == "cut":
        bad = bad[: data.draw(st.integers(0, len(bad) - 1))]
    elif damage == "flip":
        for bit in data.draw(st.lists(st.integers(0, 8 * len(bad) - 1), min_size=1, max_size=20)):
            bad[bit // 8] ^= 1 << bit % 8
    elif damage == "overwrite":  # after the header, where there is no checksum
        body = data.draw(st.binary(min_size=len(bad) - 24, max_size=len(bad) - 24))
        bad[24:] = body
    elif damage == "append":
        bad += data.draw(st.binary(min_size=1, max_size=40))
    else:
        n = data.draw(st.integers(0, 400).filter(lambda other: other != n))
        if len(bad) == method.num_bytes(TensorSpec("w", (n,)), 2):
            return
    if decodes_or_raises(method, bytes(bad), n):
        assert damage in ("flip", "overwrite")


@pytest.mark.parametrize("method", METHODS, ids=str)
@given(data=st.binary(max_size=300), n=st.integers(0, 400))
def test_random_bytes(method: Method, data: bytes, n: int) -> None:
    decodes_or_raises(method, data, n)


def test_payload_of_another_method_or_tensor_is_refused() -> None:
    topk, gaussiank = hvdcompress.get("topk", density=0.1), hvdcompress.get("gaussiank", density=0.1)
    with pytest.raises(WireError, match="another method than 'topk'"):
        topk.decode(
            np.r_[gaussiank.encode(np.ones(40, np.float32), {}, context(40), Workspace(ops))],
            context(40),
            Workspace(ops),
        )
    with pytest.raises(WireError, match="40 elements, this one has 41"):
        topk.decode(topk.encode(np.ones(40, np.float32), {}, context(40), Workspace(ops)), context(41), Workspace(ops))


def test_a_header_that_claims_much_allocates_nothing() -> None:
    """A header with a correct checksum that claims 4 billion entries is refused before memory is allocated."""
    method = hvdcompress.get("topk", density=0.1)
    lies = [
        Header("topk", code, 0, elements, entries, length)
        for code in (0, 1, 2)
        for elements in (40, 2**40)
        for entries in (4, 2**32 - 1)
        for length in (2**32 - 1, 24 + 64)
    ]
    tracemalloc.start()
    for lie in lies:
        data = np.frombuffer(wire.pack(lie) + bytes(64), np.uint8)
        with pytest.raises(WireError):
            method.decode(data, context(40), Workspace(ops))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("coding", ["int32", "elias_fano", "bitmap"])
@given(st.data())
def test_index_codings_round_trip(coding: pack.Coding, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 2000))
    chosen = data.draw(st.lists(st.integers(0, n - 1), max_size=60, unique=coding == "bitmap"))
    index = np.sort(np.array(chosen, np.int32))
    buffer = pack.encode_index(index, coding, n, ops)
    assert len(buffer) == pack.index_num_bytes(coding, len(index), n)
    np.testing.assert_array_equal(pack.decode_index(buffer, coding, len(index), n, ops), index)


@given(st.integers(1, 3000), st.floats(0.001, 1))
def test_elias_fano_is_near_its_bound(n: int, density: float) -> None:
    """k·(2 + log2(n/k)) bits, and never more than one bit per index above it."""
    k = max(1, int(n * density))
    bits = 8 * pack.index_num_bytes("elias_fano", k, n)
    assert bits <= k * (2 + np.log2(n / k)) + k + 3 * 32


def test_elias_fano_bytes_by_hand() -> None:
    """n = 16, indices 1, 6, 7: l = ⌊log2(16/3)⌋ = 2, low bits 01 10 11, high 0, 1, 1 -> bits 0, 2, 3."""
    buffer = pack.encode_index(np.int32([1, 6, 7]), "elias_fano", 16, ops)
    assert buffer.tobytes().hex() == "39000000" + "0d000000"


def test_int64_indices_beyond_two_to_the_31() -> None:
    n = 2**31 + 10
    index = np.array([0, 2**31 + 9], np.int64)
    for coding in ("int32", "elias_fano"):
        buffer = pack.encode_index(index, coding, n, ops) if coding == "int32" else None
        if buffer is not None:
            np.testing.assert_array_equal(pack.decode_index(buffer, coding, 2, n, ops), index)
    assert pack.index_num_bytes("int32", 2, n) == 16


def test_sparse_payload_round_trip_beyond_two_to_the_24() -> None:
    """Indices above 2^24 are exact: nothing passes through float32."""
    n = 2**24 + 5
    index = np.array([0, 2**24 - 1, 2**24, 2**24 + 1, n - 1], np.int32)
    packing = pack.Packing("topk", "fp32", n)
    payload = pack.encode(Sparse(index, np.arange(5, dtype=np.float32)), packing, context(n), Workspace(ops))
    share = pack.decode(payload, 5, packing, ops)
    np.testing.assert_array_equal(share.index, index)
