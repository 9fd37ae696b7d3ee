"""Sparse payloads: a wire header, encoded indices, encoded values.

The shortest of three index codings is chosen. Their lengths depend only on n and k, so payloads have a constant length,
and entries in Horovod's response cache remain valid:

=========== ====================================== =========================================
int32       32·k bits                              plain indices (int64 from n = 2^31)
elias_fano  k·(l + 1) + ⌊n/2^l⌋ + 1 bits            l = ⌊log2(n/k)⌋: about 2 + log2(n/k) bits per index
bitmap      n bits                                 distinct indices only; shortest from k = n/4
=========== ====================================== =========================================

Elias-Fano (Elias 1974; Fano 1971) stores the l low bits of each index, and the ascending high parts in unary: bit
high_i + i is set for the i-th index.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from hvdcompress.method import Array, Context, Sparse, Values, Workspace
from hvdcompress.ops.shared import index_dtype
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import wire
from hvdcompress.parts.codecs import codec_of_parts
from hvdcompress.parts.sums import Codec, concatenate_into

Coding = Literal["int32", "elias_fano", "bitmap"]
CODE: dict[str, int] = {"int32": 0, "elias_fano": 1, "bitmap": 2}


class Packing(NamedTuple):
    """Format of the sparse payloads of a method for a tensor. The length also depends on k.

    Attributes:
        method: id of the method.
        values: name of the number format.
        positions: number of positions that indices refer to.
        distinct: whether the indices are distinct.
        per: number of values per entry.
        counts: Of a bucket of several tensors, the entries of each; empty if they are not known or there is one tensor.
    """

    method: str
    values: Values
    positions: int
    distinct: bool = True
    per: int = 1
    counts: tuple[int, ...] = ()

    @property
    def codec(self) -> Codec:
        """The codec of the values."""
        return codec_of_parts(self.values, self.counts)


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of 4, so that every section of a payload can be viewed without a copy."""
    return -(-num_bytes // 4) * 4


def low_bits(k: int, n: int) -> int:
    """Return the number of low bits in Elias-Fano coding, l = ⌊log2(n/k)⌋."""
    return max((n // k).bit_length() - 1, 0) if k else 0


def index_num_bytes(coding: Coding, k: int, n: int) -> int:
    """Return the bytes of k encoded indices below n, a multiple of 4."""
    if coding == "int32":
        return k * (4 if n < 2**31 else 8)
    if coding == "bitmap":
        return aligned(-(-n // 8))
    low = low_bits(k, n)
    return aligned(-(-k * low // 8)) + aligned(-(-(k + (n >> low) + 1) // 8))


@lru_cache(4096)
def best_coding(k: int, n: int, distinct: bool = True) -> Coding:
    """Return the shortest coding of k ascending indices below n. A bitmap requires distinct indices."""
    codings: tuple[Coding, ...] = ("elias_fano", "int32", "bitmap")
    return min(codings if distinct else codings[:2], key=lambda coding: index_num_bytes(coding, k, n))


def num_bytes(k: int, packing: Packing) -> int:
    """Return the bytes of a sparse payload of k entries: header, indices and values."""
    coding = best_coding(k, packing.positions, packing.distinct)
    width = packing.codec.num_bytes(packing.per * k)
    return wire.NUM_BYTES + index_num_bytes(coding, k, packing.positions) + aligned(width)


def padded(x: Array, ops: Ops) -> Array:
    """Append zero bytes, up to a multiple of 4."""
    missing = aligned(len(x)) - len(x)
    return ops.concat([x, ops.zeros(missing, "uint8", like=x)]) if missing else x


def encode_index(index: Array, coding: Coding, n: int, ops: Ops, out: Array | None = None) -> Array:
    """Encode ascending indices.

    Args:
        index: indices [k] below n, int32 or int64.
        coding: the index coding.
        n: number of positions.
        ops: the array backend.
        out: uint8 array that receives the result; by default a new array.

    Returns:
        uint8 [index_num_bytes(coding, k, n)].
    """
    k = len(index)
    if coding == "int32":
        return concatenate_into([ops.to_bytes(index)], out, ops)
    if coding == "bitmap":
        return concatenate_into([padded(ops.set_bits(index, n), ops)], out, ops)
    low = low_bits(k, n)
    lows, highs = ops.elias_fano(index, low, k + (n >> low) + 1)
    return concatenate_into([padded(lows, ops), padded(highs, ops)], out, ops)


def decode_index(buffer: Array, coding: Coding, k: int, n: int, ops: Ops) -> Array:
    """Decode indices: the inverse of :func:`encode_index`.

    Args:
        buffer: uint8 [index_num_bytes(coding, k, n)].
        coding: the index coding.
        k: number of indices.
        n: number of positions.
        ops: the array backend.

    Returns:
        Indices [k], ascending, int32 or int64.

    Raises:
        WireError: the bytes do not contain k indices below n.
    """
    if coding == "int32":
        index = ops.from_bytes(buffer, index_dtype(n))
    elif coding == "bitmap":
        index = ops.find_bits(buffer, n)
    else:
        low = low_bits(k, n)
        edge = aligned(-(-k * low // 8))
        index = ops.from_elias_fano(buffer[:edge], buffer[edge:], low, k + (n >> low) + 1)
    # Damaged bytes can decode to fewer indices, or to indices outside of the tensor; both would corrupt the result
    if len(index) != k:
        raise wire.WireError(f"payload damaged: it has {len(index)} indices, expected {k}")
    if k and not ops.all_below(index, n):
        raise wire.WireError(f"payload damaged: an index is outside the tensor's {n} elements")
    return index


@lru_cache(4096)
def _header(k: int, packing: Packing) -> wire.Header:
    coding = best_coding(k, packing.positions, packing.distinct)
    return wire.Header(packing.method, CODE[coding], packing.codec.code, packing.positions, k, num_bytes(k, packing))


def encode(chosen: Sparse, packing: Packing, ctx: Context, work: Workspace, keep: bool = True) -> Array:
    """Encode a sparse payload.

    Args:
        chosen: ascending indices [k] below ``packing.positions``, and values, float32 [per·k].
        packing: format of the payload.
        ctx: rank, step, tensor and seed, which select the random stream.
        work: buffers, scan results and counters of this exchange, and the array ops.
        keep: whether to write it into a buffer that the tensor's next payload reuses.

    Returns:
        The payload, uint8 [num_bytes(k, packing)].
    """
    ops = work.ops
    k = len(chosen.index)
    coding = best_coding(k, packing.positions, packing.distinct)
    header = _header(k, packing)
    # Every section is written directly into the payload, which is a reused buffer: no concatenation
    new = work.buffer if keep else lambda name, n, dtype, like: ops.zeros(n, dtype, like)
    payload = new("payload", header.length, "uint8", chosen.values)
    numbers = packing.codec
    width = numbers.num_bytes(packing.per * k)
    stop = header.length
    edge = stop - aligned(width)
    ops.concat([ops.asarray(np.frombuffer(wire.pack(header), np.uint8), like=payload)], payload[: wire.NUM_BYTES])
    encode_index(chosen.index, coding, packing.positions, ops, payload[wire.NUM_BYTES : edge])
    numbers.encode(chosen.values, ctx, work, out=payload[edge : edge + width])
    # The padding must be zero, because payloads have to be reproducible byte by byte
    if edge + width < stop:
        payload[edge + width :] = 0
    return payload


def decode(payload: Array, k: int | None, packing: Packing, ops: Ops) -> Sparse:
    """Decode a sparse payload: the inverse of :func:`encode`.

    Args:
        payload: the bytes, uint8.
        k: number of entries; None if only the header tells it.
        packing: format of the payload.
        ops: the array backend.

    Returns:
        Indices [k], ascending, and values, float32 [per·k].

    Raises:
        WireError: the bytes are not a valid payload of this format.
    """
    head = ops.head_bytes(payload, wire.NUM_BYTES)
    k = wire.entries(head, packing.positions) if k is None else k
    coding = best_coding(k, packing.positions, packing.distinct)
    # The header implies the lengths of all sections, so the slices below are valid after this check
    wire.check(head, len(payload), _header(k, packing))
    edge = wire.NUM_BYTES + index_num_bytes(coding, k, packing.positions)
    index = decode_index(payload[wire.NUM_BYTES : edge], coding, k, packing.positions, ops)
    numbers = packing.codec
    count = packing.per * k
    width = numbers.num_bytes(count)
    return Sparse(index, numbers.decode(payload[edge : edge + width], count, ops))
