"""Random numbers from an integer hash, bit-identical in every backend. Global generators are never used.

There are two kinds of streams. *Shared* streams are keyed by (seed, step, parameter name) and serve choices that must
be equal on all ranks, such as random-k's indices. *Private* streams are keyed by the rank, too, for stochastic
rounding: with equal random numbers, the errors of the ranks would be equal and would not average out.

Keys and a few random numbers are computed on the host. Random numbers per element come from ``ops.uniform``, which
evaluates the same hash on the tensor's device.
"""

from __future__ import annotations

import zlib

import numpy as np

from hvdcompress import ops
from hvdcompress.method import Context
from hvdcompress.ops.numpy import ops as reference
from hvdcompress.ops.shared import MIX_FACTORS

_MASK = 0xFFFFFFFF


def _key(*words: int) -> np.ndarray:
    """Hash a sequence of integers to uint32 [1]."""
    key = 0
    for word in words:
        for half in (word & _MASK, word >> 32 & _MASK):
            key = _mix(key * 31 + half + 0x9E3779B9 & _MASK)
    return np.array([key], np.uint32)


def _mix(x: int) -> int:
    """Apply ``mix`` to one number in plain Python, because NumPy needs microseconds per operation on scalars."""
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
    """Return float32 [count] in [0, 1), multiples of 2^-24, for a key. It is ``ops.uniform`` on the host."""
    return reference.uniform(key, count, like=key)


def distinct_indices(key: np.ndarray, k: int, n: int) -> np.ndarray:
    """Draw k distinct indices below n, ascending [k]: the first k of a random permutation.

    Indices never pass through float32, which cannot represent all integers above 2^24.
    """
    return ops.fast.distinct_indices(key, k, n)
