"""Kernels of ``triton/levels.py``."""

import triton
import triton.language as tl

from hvdcompress.ops.triton._kernels.codes import drawn, norms_at, store_packed
from hvdcompress.ops.triton._kernels.parts import finite_norm, indices


@triton.jit
def found(x, norms, edges, levels, key, at, inside, BUCKET: tl.constexpr, BITS: tl.constexpr, RANDOM: tl.constexpr):
    """Return the index of each element's level, which is the number of edges below it; 0 where ``inside`` is false.

    ``edges``: [2^BITS], the middles between levels; with RANDOM, the largest numbers below each level but the first.
    ``levels``: [2^BITS + 1]. Edges and levels have Inf after the last one.
    """
    norm = norms_at(norms, at, inside, BUCKET)
    share = tl.math.div_rn(tl.load(x + at, inside, 0.0), tl.where(norm > 0, norm, 1.0))
    code = (at * 0).to(tl.int32)
    for bit in tl.static_range(BITS):
        edge = tl.load(edges + code + ((1 << (BITS - 1 - bit)) - 1))
        code += (edge < share).to(tl.int32) << (BITS - 1 - bit)
    if RANDOM:
        low = tl.load(levels + code)
        gap = tl.load(levels + code + 1) - low  # Inf above the last level
        code += (drawn(at, key) < tl.math.div_rn(share - low, gap)).to(tl.int32)
    return tl.where(inside, code, 0)


@triton.jit(do_not_specialize=["key"])
def find(
    x,
    norms,
    edges,
    levels,
    out,
    key,
    n,
    BUCKET: tl.constexpr,
    BITS: tl.constexpr,
    RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = indices(BLOCK)
    tl.store(out + at, found(x, norms, edges, levels, key, at, at < n, BUCKET, BITS, RANDOM), at < n)


@triton.jit(do_not_specialize=["key"])
def encode(
    x,
    norms,
    edges,
    levels,
    out,
    key,
    n,
    num_bytes,
    BUCKET: tl.constexpr,
    BITS: tl.constexpr,
    RANDOM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Pack the indices. A row of a program's tile is eight of them, which fill BITS bytes."""
    row = indices(ROWS)
    lane = tl.arange(0, 8)
    at = row[:, None] * 8 + lane[None, :]
    code = found(x, norms, edges, levels, key, at, at < n, BUCKET, BITS, RANDOM).to(tl.int64)
    store_packed(out, code, row, num_bytes, BITS)


@triton.jit
def decode(buffer, norms, levels, out, n, num_bytes, BUCKET: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Set out = level·norm. ``levels``: [2^BITS]. An index of at most 9 bits has bits in at most two bytes."""
    at = indices(BLOCK)
    first = at * BITS // 8
    inside = at < n
    word = tl.load(buffer + first, inside & (first < num_bytes), 0).to(tl.int32)
    word |= tl.load(buffer + first + 1, inside & (first + 1 < num_bytes), 0).to(tl.int32) << 8
    code = (word >> (at * BITS % 8).to(tl.int32)) & ((1 << BITS) - 1)
    value = tl.load(levels + code) * finite_norm(norms_at(norms, at, inside, BUCKET))
    tl.store(out + at, value, inside)
