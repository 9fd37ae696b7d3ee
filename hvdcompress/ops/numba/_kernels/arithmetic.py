"""The loops of ``numba/arithmetic.py``. Arguments: float32 vectors; indices as int64."""

# mypy: disable-error-code="assignment"
# (In a kernel a variable takes the widest of its types; Python's rule is the first.)

from __future__ import annotations

import numpy as np

from hvdcompress.ops.numba._kernels.compiling import LANES, compiled


@compiled
def accumulate(gradient, residual, scale, out):
    for i in range(out.size):
        out[i] = scale * gradient[i] + residual[i]


@compiled
def accumulate_moments(gradient, residual, scale, out, total, squares):
    for start in range(0, out.size, LANES):
        g, r, o = gradient[start : start + LANES], residual[start : start + LANES], out[start : start + LANES]
        for i in range(o.size):
            value = scale * g[i] + r[i]
            o[i] = value
            wide = np.float64(value)
            total[i] += wide
            squares[i] += wide * wide


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
    for j in range(index.size):
        i = index[j]
        if i < 0 or i >= out.size:  # never write out of bounds, whatever came over the wire
            raise IndexError("an index is outside of the tensor")
        out[i] += factor * values[j]
