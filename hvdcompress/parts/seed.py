"""Randomness: an integer hash, the same bits in every backend. Global generators are never touched.

Two streams. *Shared*: keyed by (seed, step, parameter), for what ranks must agree on, such as random-k's
indices. *Private*: the same and the rank, for stochastic rounding; otherwise the ranks' errors are equal
and do not average out. Keys are made on the host; so is what few random numbers methods hand over. Where each
element needs one, ``ops.uniform`` makes them, by the same hash, where the tensor lives.
"""

from __future__ import annotations

import zlib

import numpy as np

from hvdcompress.method import Context
from hvdcompress.ops import numpy as reference
from hvdcompress.ops.shared import mix

_ROUNDS = 4  # Luby & Rackoff: four Feistel rounds give a permutation that passes for a random one


def _key(*words: int) -> np.ndarray:
    """32-bit hash of some whole numbers, in their order."""
    key = np.zeros(1, np.uint32)
    for word in words:
        for half in (word & 0xFFFFFFFF, word >> 32 & 0xFFFFFFFF):
            key = mix(key * np.uint32(31) + np.uint32(half) + np.uint32(0x9E3779B9))
    return key


def shared_key(ctx: Context) -> np.ndarray:
    """Key [1] uint32 of the stream that all ranks share for this tensor at this step."""
    return _key(ctx.seed, ctx.step, zlib.crc32(ctx.spec.name.encode()))


def private_key(ctx: Context, stream: int = 0) -> np.ndarray:
    """Key [1] uint32 of one of this rank's own streams for this tensor at this step."""
    return _key(ctx.seed, ctx.step, zlib.crc32(ctx.spec.name.encode()), ctx.rank + 1, stream)


def uniform(key: np.ndarray, count: int) -> np.ndarray:
    """[count] float32 in [0, 1), multiples of 2^-24, from a stream's key: ``ops.uniform`` on the host."""
    return reference.uniform(key, count, like=key)


def distinct_indices(key: np.ndarray, k: int, n: int) -> np.ndarray:
    """k distinct indices below n, ascending [k] int64: the first k of a random permutation of 0…n−1.

    The permutation is a Feistel network over the least power of four ≥ n; an image beyond n is fed
    through again until it falls inside ("cycle walking", Black & Rogaway 2002), so the cost goes with
    k and not with n, and nothing passes through float32, which cannot tell indices above 2^24 apart.
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
