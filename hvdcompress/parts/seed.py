"""Random numbers from an integer hash, with the same bits in every backend. Global generators are never used.

There are two kinds of streams. *Shared* streams are keyed by (seed, step, parameter) and serve what all ranks must
agree on, such as random-k's indices. *Private* streams are keyed by the rank too, for stochastic rounding: with equal
numbers, the ranks' errors would be equal and would not average out.

Keys, and random numbers in small amounts, are computed on the host. Random numbers per element come from
``ops.uniform``, the same hash on the tensor's device.
"""

from __future__ import annotations

import zlib

import numpy as np

from hvdcompress import ops
from hvdcompress.method import Context
from hvdcompress.ops import numpy as reference
from hvdcompress.ops.shared import MIX_FACTORS

_MASK = 0xFFFFFFFF


def _key(*words: int) -> np.ndarray:
    """Hash integers, in order, to 32 bits."""
    key = 0
    for word in words:
        for half in (word & _MASK, word >> 32 & _MASK):
            key = _mix(key * 31 + half + 0x9E3779B9 & _MASK)
    return np.array([key], np.uint32)


def _mix(x: int) -> int:
    """``mix`` of one number: numpy takes microseconds for each of its operations."""
    x = (x ^ x >> 16) * MIX_FACTORS[0] & _MASK
    x = (x ^ x >> 13) * MIX_FACTORS[1] & _MASK
    return x ^ x >> 16


def shared_key(ctx: Context) -> np.ndarray:
    """Return the key, uint32 [1], of the stream that all ranks share for this tensor and step."""
    return _key(ctx.seed, ctx.step, zlib.crc32(ctx.spec.name.encode()))


def private_key(ctx: Context, stream: int = 0) -> np.ndarray:
    """Return the key, uint32 [1], of one of this rank's private streams for this tensor and step."""
    return _key(ctx.seed, ctx.step, zlib.crc32(ctx.spec.name.encode()), ctx.rank + 1, stream)


def uniform(key: np.ndarray, count: int) -> np.ndarray:
    """Return float32 [count] in [0, 1), multiples of 2^-24, from a stream's key: ``ops.uniform`` on the host."""
    return reference.uniform(key, count, like=key)


def distinct_indices(key: np.ndarray, k: int, n: int) -> np.ndarray:
    """Draw k distinct indices below n, ascending [k]: the first k of a random permutation, from a stream's key.

    No index passes through float32, which cannot represent all integers above 2^24.
    """
    return ops.fast.distinct_indices(key, k, n)
