"""Payloads: a wire header, the packed indices of a sparse one, the coded values.

Index codings, chosen by size (all of a length known from n and k, so that payloads keep one length and
Horovod's response cache stays warm):

=========== ====================================== =========================================
int32       32·k bits                              indices as they are (int64 from 2^31 elements)
elias_fano  k·(l + 1) + ⌊n/2^l⌋ + 1 bits            l = ⌊log2(n/k)⌋: about 2 + log2(n/k) bits each
bitmap      n bits                                 only where all k indices differ; best from 1/4 on
=========== ====================================== =========================================

Elias-Fano (Elias 1974; Fano 1971) writes the l low bits of each index as they are, and the high parts,
which ascend, in unary: bit (high_i + i) is set.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from hvdcompress.method import Array, Context, Sparse, Values
from hvdcompress.parts import wire
from hvdcompress.parts.codecs import codec

Coding = Literal["int32", "elias_fano", "bitmap"]
CODE: dict[str, int] = {"int32": 0, "elias_fano": 1, "bitmap": 2}


def aligned(num_bytes: int) -> int:
    """Rounded up to 4, so that every section can be viewed in place."""
    return -(-num_bytes // 4) * 4


def low_bits(k: int, n: int) -> int:
    """Elias-Fano's l = ⌊log2(n/k)⌋."""
    return max((n // k).bit_length() - 1, 0) if k else 0


def index_num_bytes(coding: Coding, k: int, n: int) -> int:
    """Bytes of k indices below n, padded to a multiple of 4."""
    if coding == "int32":
        return k * (4 if n < 2**31 else 8)
    if coding == "bitmap":
        return aligned(-(-n // 8))
    low = low_bits(k, n)
    return aligned(-(-k * low // 8)) + aligned(-(-(k + (n >> low) + 1) // 8))


def best_coding(k: int, n: int, distinct: bool = True) -> Coding:
    """The shortest coding of k ascending indices below n; a bitmap needs them distinct."""
    codings: tuple[Coding, ...] = ("elias_fano", "int32", "bitmap")
    return min(codings if distinct else codings[:2], key=lambda coding: index_num_bytes(coding, k, n))


def num_bytes(k: int, n: int, values: Values, distinct: bool = True, per: int = 1) -> int:
    """Bytes of a sparse payload of k entries of n places, ``per`` values each: header, indices, values."""
    coding = best_coding(k, n, distinct)
    return wire.NUM_BYTES + index_num_bytes(coding, k, n) + aligned(codec(values).num_bytes(per * k))


def padded(x: Array, ops: Any) -> Array:
    """uint8 with zeros up to a multiple of 4."""
    missing = aligned(len(x)) - len(x)
    return ops.concat([x, ops.zeros(missing, "uint8", like=x)]) if missing else x


def encode_index(index: Array, coding: Coding, n: int, ops: Any) -> Array:
    """Ascending indices [k] -> uint8."""
    k = len(index)
    if coding == "int32":
        return ops.to_bytes(index)
    if coding == "bitmap":
        return padded(ops.set_bits(index, n), ops)
    low = low_bits(k, n)
    lows = ops.pack_bits(index & ((1 << low) - 1), low)
    highs = ops.set_bits(index // (1 << low) + ops.index_range(k, like=index), k + (n >> low) + 1)
    return ops.concat([padded(lows, ops), padded(highs, ops)])


def decode_index(buffer: Array, coding: Coding, k: int, n: int, ops: Any) -> Array:
    """The inverse of :func:`encode_index`.

    Raises:
        WireError: the bytes do not hold k indices below n.
    """
    if coding == "int32":
        index = ops.from_bytes(buffer, ops.index_dtype(n))
    elif coding == "bitmap":
        index = ops.find_bits(buffer, n)
    else:
        low = low_bits(k, n)
        edge = aligned(-(-k * low // 8))
        positions = ops.find_bits(buffer[edge:], k + (n >> low) + 1)
        if len(positions) != k:
            raise wire.WireError(f"{len(positions)} indices instead of {k}: the payload was damaged")
        high = positions - ops.index_range(k, like=positions)
        index = high * (1 << low) + ops.unpack_bits(buffer[:edge], low, k)
    if len(index) != k:
        raise wire.WireError(f"{len(index)} indices instead of {k}: the payload was damaged")
    if k and not ops.all_below(index, n):
        raise wire.WireError(f"an index is outside of the tensor's {n} elements: the payload was damaged")
    return index


def _header(method: str, coding: Coding, values: Values, k: int, n: int, distinct: bool, per: int) -> wire.Header:
    return wire.Header(method, CODE[coding], codec(values).code, n, k, num_bytes(k, n, values, distinct, per))


def encode(
    chosen: Sparse,
    places: int,
    values: Values,
    method: str,
    ctx: Context,
    ops: Any,
    distinct: bool = True,
    per: int = 1,
) -> Array:
    """Ascending ``chosen.index`` [k] < places and ``chosen.values`` [per·k] -> a payload, uint8."""
    k = len(chosen.index)
    coding = best_coding(k, places, distinct)
    header = wire.pack(_header(method, coding, values, k, places, distinct, per))
    return ops.concat(
        [
            ops.asarray(np.frombuffer(header, np.uint8), like=chosen.values),
            encode_index(chosen.index, coding, places, ops),
            padded(codec(values).encode(chosen.values, ctx, ops), ops),
        ]
    )


def decode(
    payload: Array, k: int, places: int, values: Values, method: str, ops: Any, distinct: bool = True, per: int = 1
) -> Sparse:
    """The inverse of :func:`encode`, for k entries.

    Raises:
        WireError: the bytes are no such payload.
    """
    coding = best_coding(k, places, distinct)
    header = _header(method, coding, values, k, places, distinct, per)
    wire.check(ops.head_bytes(payload, wire.NUM_BYTES), len(payload), header)
    edge = wire.NUM_BYTES + index_num_bytes(coding, k, places)
    index = decode_index(payload[wire.NUM_BYTES : edge], coding, k, places, ops)
    width = codec(values).num_bytes(per * k)
    return Sparse(index, codec(values).decode(payload[edge : edge + width], per * k, ops))
