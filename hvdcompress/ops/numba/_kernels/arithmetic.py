"""The loops of ``numba/arithmetic.py``. Arguments: float32 vectors; indices as int64."""

# mypy: disable-error-code="assignment"
# (In a kernel a variable takes the widest of its types; Python's rule is the first.)

from __future__ import annotations

import numpy as np
from numba import carray

from hvdcompress.ops.numba._kernels import flags
from hvdcompress.ops.numba._kernels.compiling import BLOCK, FOUR, MAGNITUDE, NEAR, SPAN, compiled
from hvdcompress.ops.numba._kernels.memory import RUNS, check_places, floats_at, runs_of
from hvdcompress.ops.numba._kernels.selection import first_of
from hvdcompress.ops.numba._kernels.statistics import add_moments, fold
from hvdcompress.ops.shared import PIECE

WRITTEN = 1 << 14  #: elements of a result that stay in a cache while all ranks' shares are added to them


@compiled
def accumulate(gradient, residual, scale, out):
    """Returns the greatest magnitude's bits."""
    most = np.int32(0)
    for start in range(0, out.size, BLOCK):
        g, r, o = gradient[start : start + BLOCK], residual[start : start + BLOCK], out[start : start + BLOCK]
        for i in range(o.size):
            value = np.float32(scale * g[i] + r[i])
            o[i] = value
            most = max(most, value.view(np.int32) & MAGNITUDE)
    return most


@compiled
def accumulate_above(gradient, residual, scale, out, low, index, values):
    """Returns the greatest magnitude's bits, and how many magnitudes above ``low`` were noted, as far as there is room.

    ``index`` and ``values`` receive them.
    """
    found, most, flag = 0, np.int32(0), np.zeros(NEAR, np.int8)
    for start in range(0, out.size, NEAR):
        g, r, o = gradient[start : start + NEAR], residual[start : start + NEAR], out[start : start + NEAR]
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
    """As ``accumulate_above`` for each gradient, of which the addresses are given, and its span of the other vectors.

    ``starts`` [parts + 1] says where a part's room in ``index`` and ``values`` is; where it has none, none are noted.
    ``most`` and ``counts`` receive what is found.
    """
    for part in range(len(gradients)):
        start, stop = spans[part]
        gradient = carray(floats_at(gradients[part]), (stop - start,))
        r, o, first, last = residual[start:stop], out[start:stop], starts[part], starts[part + 1]
        if first == last:
            most[part], counts[part] = accumulate(gradient, r, scales[part], o), 0
        else:
            low, i, v = lows[part], index[first:last], values[first:last]
            most[part], counts[part] = accumulate_above(gradient, r, scales[part], o, low, i, v)


@compiled
def accumulate_velocity(gradient, residual, scale, out, low, index, values, old, new, momentum):
    """As ``accumulate_above``, of velocity + residual."""
    found, most, flag = 0, np.int32(0), np.zeros(NEAR, np.int8)
    for start in range(0, out.size, NEAR):
        g, r, o = gradient[start : start + NEAR], residual[start : start + NEAR], out[start : start + NEAR]
        u, v = old[start : start + NEAR], new[start : start + NEAR]
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
    """As ``accumulate_above``; ``totals`` and ``squared`` [·, LANES] receive sums of x and of x², a row for SPAN x."""
    # the loop of accumulate_above again: as a function of both it took 5 to 15 % longer
    found, most, flag = 0, np.int32(0), np.zeros(FOUR, np.int8)
    for start in range(0, out.size, FOUR):
        stop = start + FOUR
        g, r, o = gradient[start:stop], residual[start:stop], out[start:stop]
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
    """``sums``: of the magnitudes of each piece."""
    wide, flag = np.zeros(PIECE), np.zeros(PIECE, np.int8)
    for piece in range(sums.size):
        start, stop = piece * PIECE, (piece + 1) * PIECE
        g, r, o = gradient[start:stop], residual[start:stop], out[start:stop]
        if o.size < PIECE:
            wide[:], flag[:] = 0.0, 0
        for i in range(o.size):
            value = np.float32(scale * g[i] + r[i])
            o[i] = value
            wide[i] = abs(np.float64(value))
            flag[i] = np.int8(value < np.float32(0))
        sums[piece] = fold(wide)
        flags.pack(flag, signs[start // 8 : stop // 8])


@compiled
def accumulate_argmax(gradient, residual, scale, out, chunk, offset):
    """Returns the greatest magnitude's bits."""
    greatest = np.int32(0)
    for j in range(offset.size):
        start, stop = j * chunk, min((j + 1) * chunk, out.size)
        g, r, o = gradient[start:stop], residual[start:stop], out[start:stop]
        most = np.int32(0)
        for i in range(o.size):
            value = np.float32(scale * g[i] + r[i])
            o[i] = value
            most = max(most, value.view(np.int32) & MAGNITUDE)
        offset[j] = first_of(o, most)
        greatest = max(greatest, most)
    return greatest


@compiled
def blend(x, residual, beta, rest):
    for i in range(x.size):
        x[i] = beta * x[i] + rest * residual[i]


@compiled
def subtract(x, own, factor):
    for i in range(x.size):
        x[i] -= factor * own[i]


@compiled
def add_at(out, index, values, factor):
    check_places(index, out.size)
    for j in range(index.size):
        out[np.uint64(index[j])] += factor * values[j]


@compiled
def add_from(out, start, index, values, factor):
    """As ``add_at`` of a vector's part that begins at ``start``; the indices are known to be inside."""
    for j in range(index.size):
        out[np.uint64(np.int64(index[j]) - start)] += factor * values[j]


@compiled
def write_runs(outs, bounds, index, values, factor):
    """As ``add_at``, for a vector in parts: their addresses, and where they begin and end.

    The indices are several runs, each of which ascends, end to end: in a block of the vector that fits into a cache,
    all runs are added, one after the other, before the next block. Indices in any order are many runs.
    """
    check_places(index, bounds[-1])
    places, ends = runs_of(index)
    for part in range(outs.size):
        size = bounds[part + 1] - bounds[part]
        out = carray(floats_at(outs[part]), (size,))
        step = WRITTEN if ends.size <= RUNS else max(size, 1)
        for first in range(0, size, step):
            last = min(first + step, size)
            out[first:last] = np.float32(0)
            for run in range(ends.size):
                stop = places[run]
                while stop < ends[run] and index[stop] < bounds[part] + last:
                    stop += 1
                add_from(out, bounds[part], index[places[run] : stop], values[places[run] : stop], factor)
                places[run] = stop


@compiled
def zero_at(x, index, values):
    check_places(index, x.size)
    for j in range(index.size):
        if values[j] != 0:
            x[np.uint64(index[j])] = np.float32(0)


@compiled
def merge(a_index, a_values, b_index, b_values, index, values):
    """Returns the number of entries, or -1 if the indices do not ascend. The outputs have room for one more."""
    i, j, found = 0, 0, 0
    last = np.int64(-1)
    while i < a_index.size or j < b_index.size:
        left = a_index[i] if i < a_index.size else np.int64(0x7FFFFFFFFFFFFFFF)
        right = b_index[j] if j < b_index.size else np.int64(0x7FFFFFFFFFFFFFFF)
        here = min(left, right)
        if here <= last:
            return -1
        value = np.float32(0)  # + 0 turns -0 into 0, as in the reference
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
