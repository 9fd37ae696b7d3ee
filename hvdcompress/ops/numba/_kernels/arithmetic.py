"""Kernels of ``numba/arithmetic.py``. Vectors are float32, indices int32 or int64."""

# mypy: disable-error-code="assignment"
# (Numba gives a variable the widest of its types; mypy gives it the type of the first assignment.)

from __future__ import annotations

import numpy as np
from numba import carray

from hvdcompress.ops.numba._kernels import flags
from hvdcompress.ops.numba._kernels.compiling import BLOCK, FOUR, MAGNITUDE, NEAR, SPAN, compiled
from hvdcompress.ops.numba._kernels.memory import RUNS, check_indices, floats_at, runs_of
from hvdcompress.ops.numba._kernels.selection import first_of
from hvdcompress.ops.numba._kernels.statistics import add_moments, fold
from hvdcompress.ops.shared import PIECE

WRITTEN = 1 << 14  #: elements of the output that stay in the cache while the shares of all ranks are added to them


@compiled
def accumulate(gradient, residual, scale, out):
    """Set out = scale·gradient + residual. Return the bits of the largest magnitude."""
    most = np.int32(0)
    for start in range(0, out.size, BLOCK):
        g = gradient[start : start + BLOCK]
        r = residual[start : start + BLOCK]
        o = out[start : start + BLOCK]
        for i in range(o.size):
            value = np.float32(scale * g[i] + r[i])
            o[i] = value
            most = max(most, value.view(np.int32) & MAGNITUDE)
    return most


@compiled
def accumulate_above(gradient, residual, scale, out, low, index, values):
    """Accumulate, and collect the elements whose magnitudes have bits above ``low``.

    ``index`` and ``values`` receive the elements, as many as there is room for. Return the bits of the largest
    magnitude, and the number of collected elements.
    """
    found = 0
    most = np.int32(0)
    flag = np.zeros(NEAR, np.int8)
    for start in range(0, out.size, NEAR):
        g = gradient[start : start + NEAR]
        r = residual[start : start + NEAR]
        o = out[start : start + NEAR]
        if o.size < NEAR:
            flag[:] = 0
        for i in range(o.size):
            value = np.float32(scale * g[i] + r[i])
            o[i] = value
            magnitude = value.view(np.int32) & MAGNITUDE
            most = max(most, magnitude)
            flag[i] = np.int8(magnitude > low)
        found = flags.note(flag, o, start, index, values, found)
    return most, found


@compiled
def accumulate_parts(gradients, residual, scales, out, spans, lows, starts, index, values, most, counts):
    """Call ``accumulate_above`` for each gradient, given by its address, and its span of the other vectors.

    Part i may write to ``index`` and ``values`` from starts[i] to starts[i + 1]; ``starts`` is [parts + 1]. If that is
    empty, no elements are collected. ``most`` and ``counts`` [parts] receive the results of ``accumulate_above``.
    """
    for part in range(len(gradients)):
        start, stop = spans[part]
        gradient = carray(floats_at(gradients[part]), (stop - start,))
        r = residual[start:stop]
        o = out[start:stop]
        first = starts[part]
        last = starts[part + 1]
        if first == last:
            most[part] = accumulate(gradient, r, scales[part], o)
            counts[part] = 0
        else:
            low = lows[part]
            i = index[first:last]
            v = values[first:last]
            most[part], counts[part] = accumulate_above(gradient, r, scales[part], o, low, i, v)


@compiled
def accumulate_velocity(gradient, residual, scale, out, low, index, values, old, new, momentum):
    """Set new = momentum·old + scale·gradient, then do as ``accumulate_above`` for out = new + residual."""
    found = 0
    most = np.int32(0)
    flag = np.zeros(NEAR, np.int8)
    for start in range(0, out.size, NEAR):
        g = gradient[start : start + NEAR]
        r = residual[start : start + NEAR]
        o = out[start : start + NEAR]
        u = old[start : start + NEAR]
        v = new[start : start + NEAR]
        if o.size < NEAR:
            flag[:] = 0
        for i in range(o.size):
            speed = np.float32(momentum * u[i] + scale * g[i])
            v[i] = speed
            value = np.float32(speed + r[i])
            o[i] = value
            magnitude = value.view(np.int32) & MAGNITUDE
            most = max(most, magnitude)
            flag[i] = np.int8(magnitude > low)
        found = flags.note(flag, o, start, index, values, found)
    return most, found


@compiled
def accumulate_moments(gradient, residual, scale, out, low, index, values, totals, squared):
    """As ``accumulate_above``; also add Σx and Σx² to ``totals`` and ``squared`` [spans, LANES], one row per SPAN."""
    # This repeats the loop of accumulate_above: a function that both called took 5 to 15 % longer.
    found = 0
    most = np.int32(0)
    flag = np.zeros(FOUR, np.int8)
    for start in range(0, out.size, FOUR):
        stop = start + FOUR
        g = gradient[start:stop]
        r = residual[start:stop]
        o = out[start:stop]
        if o.size < flag.size:
            flag[:] = 0
        for i in range(o.size):
            value = np.float32(scale * g[i] + r[i])
            o[i] = value
            magnitude = value.view(np.int32) & MAGNITUDE
            most = max(most, magnitude)
            flag[i] = np.int8(magnitude > low)
        add_moments(o, totals[start // SPAN], squared[start // SPAN])
        found = flags.note(flag, o, start, index, values, found)
    return most, found


@compiled
def accumulate_signs(gradient, residual, scale, out, sums, signs):
    """Accumulate; ``sums`` receives Σ|x| of each piece, ``signs`` one bit per element, set if x < 0."""
    wide = np.zeros(PIECE)
    flag = np.zeros(PIECE, np.int8)
    for piece in range(sums.size):
        start, stop = piece * PIECE, (piece + 1) * PIECE
        g = gradient[start:stop]
        r = residual[start:stop]
        o = out[start:stop]
        if o.size < PIECE:
            wide[:] = 0.0
            flag[:] = 0
        for i in range(o.size):
            value = np.float32(scale * g[i] + r[i])
            o[i] = value
            wide[i] = abs(np.float64(value))
            flag[i] = np.int8(value < np.float32(0))
        sums[piece] = fold(wide)
        flags.pack(flag, signs[start // 8 : stop // 8])


@compiled
def accumulate_argmax(gradient, residual, scale, out, chunk, offset):
    """Accumulate; ``offset`` receives each chunk's offset of the largest magnitude.

    Return the bits of the largest magnitude of all chunks.
    """
    greatest = np.int32(0)
    for j in range(offset.size):
        start, stop = j * chunk, min((j + 1) * chunk, out.size)
        g = gradient[start:stop]
        r = residual[start:stop]
        o = out[start:stop]
        most = np.int32(0)
        for i in range(o.size):
            value = np.float32(scale * g[i] + r[i])
            o[i] = value
            most = max(most, value.view(np.int32) & MAGNITUDE)
        offset[j] = first_of(o, most)
        greatest = max(greatest, most)
    return greatest


@compiled
def subtract(x, own, factor):
    for i in range(x.size):
        x[i] -= factor * own[i]


@compiled
def add_at(out, index, values, factor):
    check_indices(index, out.size)
    for j in range(index.size):
        out[np.uint64(index[j])] += factor * values[j]


@compiled
def add_from(out, start, index, values, factor):
    """As ``add_at``, where ``out`` begins at index ``start`` of the vector. The indices have been checked."""
    for j in range(index.size):
        out[np.uint64(np.int64(index[j]) - start)] += factor * values[j]


@compiled
def write_runs(outs, bounds, index, values, factor):
    """Write a sparse vector to several outputs: their addresses ``outs``, their ``bounds`` in the vector [parts + 1].

    The indices consist of several ascending runs, usually one per rank. For one block of the output at a time, which
    stays in the cache, the kernel adds the entries of all runs in their order. Unsorted indices form many runs; beyond
    RUNS of them the kernel adds run by run.
    """
    check_indices(index, bounds[-1])
    cursors, ends = runs_of(index)
    for part in range(outs.size):
        size = bounds[part + 1] - bounds[part]
        out = carray(floats_at(outs[part]), (size,))
        step = WRITTEN if ends.size <= RUNS else max(size, 1)
        for first in range(0, size, step):
            last = min(first + step, size)
            out[first:last] = np.float32(0)
            for run in range(ends.size):
                stop = cursors[run]
                while stop < ends[run] and index[stop] < bounds[part] + last:
                    stop += 1
                add_from(out, bounds[part], index[cursors[run] : stop], values[cursors[run] : stop], factor)
                cursors[run] = stop


@compiled
def merge(a_index, a_values, b_index, b_values, index, values):
    """Merge two sparse vectors. Return the number of entries, or -1 if the indices of an input do not ascend."""
    i = 0
    j = 0
    found = 0
    last = np.int64(-1)
    while i < a_index.size or j < b_index.size:
        left = a_index[i] if i < a_index.size else np.int64(0x7FFFFFFFFFFFFFFF)
        right = b_index[j] if j < b_index.size else np.int64(0x7FFFFFFFFFFFFFFF)
        here = min(left, right)
        if here <= last:
            return -1
        value = np.float32(0)  # 0 + (−0) is 0, as in the reference
        if left == here:
            value += a_values[i]
            i += 1
        if right == here:
            value += b_values[j]
            j += 1
        index[found], values[found] = here, value
        found += 1
        last = here
    return found


@compiled
def scaled(x, factor, limit, out):
    for i in range(x.size):
        value = x[i] * factor
        value = limit if value > limit else value
        out[i] = -limit if value < -limit else value
