"""Randomized Hadamard transform: it spreads large values over their block, before values are rounded to few levels.

Each element gets a random sign, then each block of B = 2^b elements is multiplied by the orthonormal
Hadamard matrix H::

    y = H·(signs ⊙ x),    H[i, j] = (−1)^popcount(i & j) / √B,    x = signs ⊙ (H·y)

A block's largest magnitude, which is the scale of its levels, becomes about √(2·ln(2B)/B)·‖x‖, whatever the values are
(Ailon & Chazelle 2009). SDP4Bit (arXiv 2410.15526) and THC (NSDI 2024) round gradients after it. The signs are equal on
all ranks and change from step to step, so that a sum over ranks can be transformed back.

The transform takes b passes of additions. They are the same on all array backends, to the bit.
"""

from __future__ import annotations

import numpy as np

from hvdcompress.method import Array, Context
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import seed


def padded_size(n: int, block: int) -> int:
    """Return n, rounded up to a multiple of ``block``."""
    return -(-n // block) * block


def rotate(x: Array, block: int, ctx: Context, ops: Ops) -> Array:
    """Return the transform [padded_size(n, block)] of x [n], followed by zeros up to whole blocks."""
    missing = padded_size(len(x), block) - len(x)
    x = ops.concat([x, ops.zeros(missing, "float32", like=x)]) if missing else x
    return ops.hadamard(x * signs(len(x), ctx, x, ops), block)


def rotate_back(y: Array, n: int, block: int, ctx: Context, ops: Ops) -> Array:
    """Undo :func:`rotate`: return x [n]."""
    return (ops.hadamard(y, block) * signs(len(y), ctx, y, ops))[:n]


def signs(n: int, ctx: Context, like: Array, ops: Ops) -> Array:
    """Return random signs [n], equal on all ranks."""
    one = ops.asarray(np.ones(1, np.float32), like)
    return ops.unpack_signs(ops.pack_signs(ops.uniform(seed.shared_key(ctx), n, like) - 0.5), one, n)
