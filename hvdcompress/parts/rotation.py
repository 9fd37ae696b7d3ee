"""Randomized Hadamard transform: it spreads large values over their block, before values are rounded to few levels.

The elements of each block of B = 2^b get random signs, then the block is multiplied by the orthonormal Hadamard
matrix H::

    y = H·(signs ⊙ x),    H[i, j] = (−1)^popcount(i & j) / √B,    x = signs ⊙ (H·y)

A block's largest magnitude, which is the scale of its levels, becomes about √(2·ln(2B)/B)·‖x‖, whatever the values are
(Ailon & Chazelle 2009). What is rounded is y/√B, of which no element exceeds the block's largest |x|. SDP4Bit (arXiv
2410.15526) and THC (NSDI 2024) round gradients after it. The signs are the same for all blocks and on all ranks, so
that a sum over ranks can be transformed back, and change from step to step.
"""

from __future__ import annotations

import numpy as np

from hvdcompress.method import Array, Context
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import signs_of
from hvdcompress.parts import seed


def padded_size(n: int, block: int) -> int:
    """Return n, rounded up to a multiple of ``block``."""
    return -(-n // block) * block


def rotate(x: Array, block: int, ctx: Context, ops: Ops) -> Array:
    """Return y/√B [padded_size(n, block)] of x [n], followed by zeros up to whole blocks."""
    missing = padded_size(len(x), block) - len(x)
    x = ops.concat([x, ops.zeros(missing, "float32", like=x)]) if missing else x
    return ops.hadamard(_signed(x, block**-0.5, block, ctx, ops), block)


def rotate_back(y: Array, n: int, block: int, ctx: Context, ops: Ops) -> Array:
    """Undo :func:`rotate`: return x [n]."""
    return _signed(ops.scaled(ops.hadamard(y, block), block**0.5), 1.0, block, ctx, ops)[:n]


def _signed(x: Array, factor: float, block: int, ctx: Context, ops: Ops) -> Array:
    """Return each block of x, times the same signs and a factor."""
    return (x.reshape(-1, block) * (signs(block, ctx, x, ops) * factor)).reshape(-1)


def signs(n: int, ctx: Context, like: Array, ops: Ops) -> Array:
    """Return random signs [n] of this step, equal on all ranks."""
    one = ops.asarray(np.ones(1, np.float32), like)
    return ops.dense(signs_of(ops.pack_signs(ops.uniform(seed.shared_key(ctx), n, like) - 0.5), one, n))
