"""Levels in Triton: values in units of a norm, rounded to a table (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from hvdcompress.ops import torch as general
from hvdcompress.ops.shared import filled, level_edges
from hvdcompress.ops.triton._kernels import levels as kernels
from hvdcompress.ops.triton._kernels.launching import BLOCK, blocks, launch
from hvdcompress.ops.triton.bits import pack_bits
from hvdcompress.ops.triton.codes import ROWS, bucket_constant, word
from hvdcompress.ops.triton.tensors import empty, plain, plain_bytes
from hvdcompress.ops.vectors import Array, NumpyArray

MAX_BITS = 9  #: bits per index of the kernels


def encode_levels(
    x: Array,
    norms: Array,
    bucket: int,
    levels: NumpyArray,
    bits: int,
    key: NumpyArray | None = None,
    out: Array | None = None,
) -> Array:
    n = len(x)
    codes = empty(-(-n * bits // 8), torch.uint8, x) if out is None else out
    if bits > MAX_BITS or not plain(x) or not plain(norms) or not plain_bytes(codes):
        return general.encode_levels(x, norms, bucket, levels, bits, key, out)
    given = x, norms, *_tables(levels.tobytes(), bits, key is None, x.device)
    seed = 0 if key is None else word(key)
    constants = {"BUCKET": bucket_constant(bucket, norms, n), "BITS": bits, "RANDOM": key is not None}
    if bits <= 8:
        launch(kernels.encode, blocks(n), x, *given, codes, seed, n, len(codes), **constants, ROWS=ROWS)
        return codes
    indices = empty(n, torch.int32, x)
    launch(kernels.find, blocks(n), x, *given, indices, seed, n, **constants, BLOCK=BLOCK)
    packed = pack_bits(indices, bits)
    return packed if out is None else out.copy_(packed)


def decode_levels(buffer: Array, norms: Array, bucket: int, levels: NumpyArray, bits: int, count: int) -> Array:
    if bits > MAX_BITS or not plain_bytes(buffer) or not plain(norms) or not count:
        return general.decode_levels(buffer, norms, bucket, levels, bits, count)
    out = empty(count, torch.float32, buffer)
    table = _table(levels.tobytes(), bits, buffer.device)
    constants = {"BUCKET": bucket_constant(bucket, norms, count), "BITS": bits, "BLOCK": BLOCK}
    launch(kernels.decode, blocks(count), buffer, buffer, norms, table, out, count, len(buffer), **constants)
    return out


@lru_cache
def _tables(levels: bytes, bits: int, nearest: bool, device: torch.device) -> tuple[Array, Array]:
    """Return ``edges`` and ``levels`` of ``kernels.encode`` for a table of levels, float32 as bytes."""
    table = np.frombuffer(levels, np.float32)
    edges = filled(level_edges(table, nearest), 1 << bits)
    return torch.from_numpy(edges).to(device), torch.from_numpy(filled(table, (1 << bits) + 1)).to(device)


@lru_cache
def _table(levels: bytes, bits: int, device: torch.device) -> Array:
    """Return ``levels`` of ``kernels.decode`` for a table of levels, float32 as bytes."""
    table = np.frombuffer(levels, np.float32)
    return torch.from_numpy(filled(table, 1 << bits, table[-1])).to(device)
