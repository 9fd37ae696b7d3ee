"""Codes in Triton: random numbers, stochastic rounding, signs (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from hvdcompress.ops.shared import filled, level_edges
from hvdcompress.ops.torch import TorchOps, signed
from hvdcompress.ops.triton._kernels import codes as kernels
from hvdcompress.ops.triton._kernels.launching import BLOCK, blocks, launch
from hvdcompress.ops.triton.tensors import INDICES, empty, plain, plain_bytes
from hvdcompress.ops.vectors import Array, Codes, NumpyArray

MAX_BITS = 9  #: bits per index that the kernel looks up
MAX_WIDTH = 56  #: bits per integer: the kernel holds an integer and up to 7 bits before it in 64 bits
ROWS = BLOCK // 8  # rows per program; a row is eight elements, whose codes fill whole bytes


def bucket_constant(bucket: int, norms: Array, n: int) -> int:
    """Return the bucket size for a kernel, or 0 if there is only one bucket, so that the kernel need not divide.

    Raises:
        IndexError: there are fewer norms than buckets.
    """
    if len(norms) * bucket < n:
        raise IndexError(f"{len(norms)} norms are too few for {n} elements in buckets of {bucket}")
    return 0 if bucket >= n else bucket


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


class CodeOps(TorchOps):
    """Stochastic rounding, levels, signs."""

    def uniform(self, key: NumpyArray, count: int, like: Array, start: int = 0) -> Array:
        out = empty(count, torch.float32, like)
        launch(kernels.uniform, blocks(count), like, out, signed(int(key[0])), start, count, BLOCK=BLOCK)
        return out

    def quantize(
        self, x: Array, norms: Array, bucket: int, bits: int, key: NumpyArray, out: Array | None = None
    ) -> Array:
        n = len(x)
        codes = empty(-(-n * bits // 8), torch.uint8, x) if out is None else out
        if not plain(x) or not plain(norms) or not plain_bytes(codes):
            return super().quantize(x, norms, bucket, bits, key, out)
        given = x, norms, codes, signed(int(key[0])), n, len(codes)
        launch(kernels.quantize, blocks(n), x, *given, BUCKET=bucket_constant(bucket, norms, n), BITS=bits, ROWS=ROWS)
        return codes

    def encode_levels(
        self,
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
        if bits > 8 or not plain(x) or not plain(norms) or not plain_bytes(codes):
            return super().encode_levels(x, norms, bucket, levels, bits, key, out)
        given = x, norms, *_tables(levels.tobytes(), bits, key is None, x.device)
        seed = 0 if key is None else signed(int(key[0]))
        constants = {"BUCKET": bucket_constant(bucket, norms, n), "BITS": bits, "RANDOM": key is not None}
        launch(kernels.encode, blocks(n), x, *given, codes, seed, n, len(codes), **constants, ROWS=ROWS)
        return codes

    def _look_up(self, x: Codes) -> Array:
        count = x.start + x.size
        if x.bits > MAX_BITS or not plain_bytes(x.codes) or not plain(x.norms) or not count:
            return super()._look_up(x)
        out = empty(count, torch.float32, x.codes)
        table = _table(x.table.tobytes(), x.bits, x.codes.device)
        constants = {"BUCKET": bucket_constant(x.bucket, x.norms, count), "BITS": x.bits, "BLOCK": BLOCK}
        launch(kernels.decode, blocks(count), out, x.codes, x.norms, table, out, count, len(x.codes), **constants)
        return out[x.start :]

    def pack_bits(self, values: Array, width: int) -> Array:
        if not 0 < width <= MAX_WIDTH or values.dtype not in INDICES or not plain(values, dtype=values.dtype):
            return super().pack_bits(values, width)
        out = empty(-(-len(values) * width // 8), torch.uint8, values)
        given = values, out, len(values), len(out)
        launch(kernels.pack_bits, blocks(len(out)), values, *given, WIDTH=width, BLOCK=BLOCK)
        return out
