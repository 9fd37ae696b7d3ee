"""Codes in Triton: random numbers, stochastic rounding, signs (see :class:`hvdcompress.ops.spec.Ops`)."""

from __future__ import annotations

import torch

from hvdcompress.ops import torch as general
from hvdcompress.ops.triton._kernels import codes as kernels
from hvdcompress.ops.triton._kernels.launching import BLOCK, blocks, launch
from hvdcompress.ops.triton.tensors import empty, plain, plain_bytes
from hvdcompress.ops.vectors import Array, NumpyArray

ROWS = BLOCK // 8  # rows per program; a row is eight elements, whose codes fill whole bytes


def uniform(key: NumpyArray, count: int, like: Array, start: int = 0) -> Array:
    out = empty(count, torch.float32, like)
    launch(kernels.uniform, blocks(count), like, out, word(key), start, count, BLOCK=BLOCK)
    return out


def quantize(x: Array, norms: Array, bucket: int, bits: int, key: NumpyArray, out: Array | None = None) -> Array:
    n = len(x)
    codes = empty(-(-n * bits // 8), torch.uint8, x) if out is None else out
    if not plain(x) or not plain(norms) or not plain_bytes(codes):
        return general.quantize(x, norms, bucket, bits, key, out)
    given = x, norms, codes, word(key), n, len(codes)
    launch(kernels.quantize, blocks(n), x, *given, BUCKET=bucket_constant(bucket, norms, n), BITS=bits, ROWS=ROWS)
    return codes


def quantize_max(x: Array, bucket: int, bits: int, key: NumpyArray, out: Array | None = None) -> tuple[Array, Array]:
    norms = general.bucket_norms(x, bucket, "max")
    return norms, quantize(x, norms, bucket, bits, key, out)


def dequantize(buffer: Array, norms: Array, bucket: int, bits: int, count: int) -> Array:
    if not plain_bytes(buffer) or not plain(norms) or not count:
        return general.dequantize(buffer, norms, bucket, bits, count)
    out = empty(count, torch.float32, buffer)
    constants = {"BUCKET": bucket_constant(bucket, norms, count), "BITS": bits, "ADD": False, "ROWS": ROWS}
    launch(kernels.dequantize, blocks(count), buffer, buffer, norms, out, count, len(buffer), **constants)
    return out


def word(key: NumpyArray) -> int:
    """Return the int32 with the bits of a key, so that all keys have one type."""
    word = int(key[0])
    return word - (word >> 31 << 32)


def bucket_constant(bucket: int, norms: Array, n: int) -> int:
    """Return the bucket size for a kernel, or 0 if there is only one bucket, so that the kernel need not divide.

    Raises:
        IndexError: there are fewer norms than buckets.
    """
    if len(norms) * bucket < n:
        raise IndexError(f"{len(norms)} norms are too few for {n} elements in buckets of {bucket}")
    return 0 if bucket >= n else bucket


def pack_signs(x: Array) -> Array:
    if not plain(x):
        return general.pack_signs(x)
    out = empty(-(-len(x) // 8), torch.uint8, x)
    launch(kernels.pack_signs, blocks(len(x)), x, x, out, len(x), len(out), ROWS=ROWS)
    return out


def unpack_signs(buffer: Array, scale: Array, count: int) -> Array:
    if not plain_bytes(buffer) or not plain(scale) or not count:
        return general.unpack_signs(buffer, scale, count)
    out = empty(count, torch.float32, buffer)
    launch(kernels.unpack_signs, blocks(count), buffer, buffer, scale, out, count, len(buffer), BLOCK=BLOCK)
    return out
