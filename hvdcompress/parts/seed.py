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

from hvdcompress.method import Context
from hvdcompress.ops import numpy as reference
from hvdcompress.ops.shared import MIX_FACTORS, mix

_MASK = 0xFFFFFFFF
_ROUNDS = 4  # four Feistel rounds make a pseudorandom permutation (Luby & Rackoff 1988)


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
    """Draw k distinct indices: the first k of a random permutation of 0 … n − 1.

    The permutation is a Feistel network over the least power of four ≥ n. Images beyond n − 1 are permuted again until
    they are in range ("cycle walking", Black & Rogaway 2002). The cost is therefore proportional to k, not n. No index
    passes through float32, which cannot represent all integers above 2^24.

    Args:
        key: the key of a stream, uint32 [1].
        k: number of indices, at most n.
        n: number of elements.

    Returns:
        The indices, int64 [k], ascending.
    """
    half = max((n - 1).bit_length() + 1, 2) // 2
    mask = np.uint32((1 << half) - 1)

    def permute(x: np.ndarray) -> np.ndarray:
        left, right = (x >> half).astype(np.uint32), (x & int(mask)).astype(np.uint32)
        for number in range(_ROUNDS):
            round_key = mix(key + np.uint32(number))
            left, right = right, left ^ mix(right * np.uint32(0x9E3779B1) ^ round_key) & mask
        return left.astype(np.int64) << half | right.astype(np.int64)

    index = permute(np.arange(k, dtype=np.int64))
    while (outside := index >= n).any():
        index[outside] = permute(index[outside])
    return np.sort(index)
