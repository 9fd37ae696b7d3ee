"""Kernels of ``numba/arithmetic.py``. Vectors are float32, indices int32 or int64."""

# mypy: disable-error-code="assignment"
# (Numba gives a variable the widest of its types; mypy gives it the type of the first assignment.)

from __future__ import annotations

import numpy as np
from numba import carray

from hvdcompress.ops.numba._kernels import flags
from hvdcompress.ops.numba._kernels.compiling import BLOCK, MAGNITUDE, NEAR, compiled
from hvdcompress.ops.numba._kernels.memory import RUNS, check_indices, floats_at, runs_of, stream
from hvdcompress.ops.numba._kernels.selection import first_of

WRITTEN = 1 << 12  #: elements of the output to which the shares of all ranks are added before they are written


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

    The indices consist of several ascending runs, usually one per rank. For one block of the output at a time, the
    kernel adds the entries of all runs in their order, and then writes the block past the cache, which takes half of
    the time. Unsorted indices form many runs; beyond RUNS of them the kernel adds run by run to the output.
    """
    check_indices(index, bounds[-1])
    cursors, ends = runs_of(index)
    block = np.zeros(WRITTEN, np.float32)
    for part in range(outs.size):
        size = bounds[part + 1] - bounds[part]
        out = carray(floats_at(outs[part]), (size,))
        step = WRITTEN if ends.size <= RUNS else max(size, 1)
        for first in range(0, size, step):
            last = min(first + step, size)
            sums = block[: last - first] if step == WRITTEN else out[first:last]
            sums[:] = 0
            for run in range(ends.size):
                stop = cursors[run]
                while stop < ends[run] and index[stop] < bounds[part] + last:
                    stop += 1
                begin = bounds[part] + first
                add_from(sums, begin, index[cursors[run] : stop], values[cursors[run] : stop], factor)
                cursors[run] = stop
            if step == WRITTEN:
                stream(outs[part] + 4 * first, sums)


@compiled
def scaled(x, factor, limit, out):
    for i in range(x.size):
        value = x[i] * factor
        value = limit if value > limit else value
        out[i] = -limit if value < -limit else value
