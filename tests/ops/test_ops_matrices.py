"""The verbs of ``matrices.py``: layouts, products, orthonormal rows and principal components."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from comparing import MAX, Put, call, get, vector

from hvdcompress.ops import numpy as reference

# -- compared to the bit, by test_ops.py --------------------------------------------------------------------------


def tame(x: np.ndarray, rows: int = 3, most: int = 40) -> np.ndarray:
    """A few whole rows of numbers whose products are finite."""
    size = min(x.size, rows * most) // rows * rows
    return np.clip(x[:size], -1e18, 1e18)


call("permute")(lambda o, put, x, r: o.permute(put(x), (x.size, 1), (1, 0)))
call("permute")(lambda o, put, x, r: o.permute(put(tame(x, 12)), (2, tame(x, 12).size // 12, 3, 2), (2, 3, 1, 0)))
for count in (1, 2, 3):
    call("outer_sum")(lambda o, put, x, r, c=count: o.outer_sum(put(tame(x, c)), put(tame(r, c)), c))
    call("combine")(lambda o, put, x, r, c=count: o.combine(put(tame(r, 12)[: 4 * c]), put(tame(x, 4)), 4))
for verb in ("matmul", "matmul_transposed", "orthonormalise", "principal"):
    call(verb)(lambda o, put, x, r: None)  # to rounding only: below


# -- the definitions, in float64 ----------------------------------------------------------------------------------


def array(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("shape,axes", [((7,), (0,)), ((3, 5), (1, 0)), ((4, 3, 2, 5), (2, 3, 1, 0))])
def test_permute_moves_each_element(backend: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    x = vector("normal", int(np.prod(shape)))
    moved = np.asarray(backend.permute(Put(backend)(x), shape, axes)).reshape([shape[a] for a in axes])
    for place in np.ndindex(*shape):
        assert moved[tuple(place[a] for a in axes)] == x.reshape(shape)[place]


@pytest.mark.parametrize("rows,inner,columns", [(1, 1, 1), (1, 9, 4), (5, 1, 3), (17, 33, 2), (4, 300, 65)])
def test_products(backend: Any, rows: int, inner: int, columns: int) -> None:
    a, b = vector("normal", rows * inner, 1), vector("normal", inner * columns, 2)
    exact = a.reshape(rows, inner).astype(np.float64) @ b.reshape(inner, columns)
    turned = np.ascontiguousarray(b.reshape(inner, columns).T).ravel()
    put = Put(backend)
    for found in (
        backend.matmul(put(a), put(b), rows, columns),
        backend.matmul_transposed(put(a), put(turned), rows, columns),
    ):
        assert str(np.asarray(found).dtype) == "float32" and np.asarray(found).shape == (rows * columns,)
        np.testing.assert_allclose(array(found).reshape(rows, columns), exact, atol=1e-6 * inner)
    put.check()


def test_outer_sum_is_the_product(backend: Any) -> None:
    p, q = vector("normal", 3 * 20, 1), vector("normal", 3 * 31, 2)
    found = array(backend.outer_sum(Put(backend)(p), Put(backend)(q), 3)).reshape(20, 31)
    np.testing.assert_allclose(found, p.reshape(3, 20).T.astype(np.float64) @ q.reshape(3, 31), atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e-44, 1e37])
@pytest.mark.parametrize("rows,columns", [(1, 1), (1, 50), (2, 2), (5, 40), (30, 30), (20, 1000)])
def test_orthonormal_rows_of_the_same_span(backend: Any, rows: int, columns: int, scale: float) -> None:
    x = (vector("normal", rows * columns, 5) * np.float64(scale)).astype(np.float32)
    found = array(backend.orthonormalise(Put(backend)(x), rows)).reshape(rows, columns)
    if scale < 1e-40:  # of a denormal, a digit is left: whatever the rows are, they are of length 1 or 0
        assert np.isfinite(found).all()
        return
    np.testing.assert_allclose(found @ found.T, np.eye(rows), atol=1e-6)
    wide = x.reshape(rows, columns).astype(np.float64) / scale
    np.testing.assert_allclose(wide @ found.T @ found, wide, atol=1e-5)
    for number in range(rows):  # each in the span of those before it and its own: as Gram-Schmidt has it
        before = np.linalg.lstsq(wide[: number + 1].T, found[number], rcond=None)[0]
        np.testing.assert_allclose(before @ wide[: number + 1], found[number], atol=1e-5 * max(1, np.abs(before).max()))


def test_nearly_parallel_rows_are_orthogonal_nevertheless(backend: Any) -> None:
    """One pass of Gram-Schmidt would leave them at an angle of rounding / difference."""
    x = np.ones((3, 200), np.float64) + 1e-5 * vector("normal", 600).reshape(3, 200)
    found = array(backend.orthonormalise(Put(backend)(x.ravel()), 3)).reshape(3, 200)
    np.testing.assert_allclose(found @ found.T, np.eye(3), atol=1e-6)


def test_dependent_rows_are_zero_or_filled(backend: Any) -> None:
    a, b, fill = vector("normal", 40, 1), vector("normal", 40, 2), vector("normal", 160, 3)
    x = np.concatenate([a, 3 * a, 0 * a, a - b])
    put = Put(backend)
    found = array(backend.orthonormalise(put(x), 4)).reshape(4, 40)
    assert not found[1:3].any()
    np.testing.assert_allclose(found @ found.T, np.diag([1, 0, 0, 1]), atol=1e-6)
    filled = array(backend.orthonormalise(put(x), 4, fill=put(fill))).reshape(4, 40)
    np.testing.assert_allclose(filled @ filled.T, np.eye(4), atol=1e-6)
    np.testing.assert_allclose(filled[0], found[0], atol=1e-7)
    drawn = fill.reshape(4, 40)[1] - (fill.reshape(4, 40)[1] @ found[0]) * found[0]
    np.testing.assert_allclose(filled[1], drawn / np.linalg.norm(drawn), atol=1e-6)
    zero = np.asarray(backend.orthonormalise(put(0 * x), 4))
    assert not zero.any() and np.isfinite(zero).all()
    put.check()


@pytest.mark.parametrize("rows,columns", [(2, 9), (6, 40), (12, 7)])
@pytest.mark.parametrize("dropped", [0.0, 0.01, 0.3, 0.9])
def test_principal_components(backend: Any, rows: int, columns: int, dropped: float) -> None:
    """Their combinations span what the eigenvectors of the covariance do, and their number is the least."""
    x = vector("normal", rows * columns, 7) * np.repeat(2.0 ** -np.arange(rows), columns).astype(np.float32) + 5
    most, put = min(rows - 1, columns), Put(backend)
    count, weights = backend.principal(put(x.astype(np.float32)), rows, 1, most, dropped)
    assert get(count)[:2] == ("int32", (1,)) and np.asarray(weights).shape == (most * rows,)
    d, wide = int(count[0]), x.astype(np.float32).reshape(rows, columns).astype(np.float64)
    values, vectors = np.linalg.eigh(np.cov(wide.T, bias=True).reshape(columns, columns))
    values, vectors = values[::-1], vectors[:, ::-1]
    left_out = [values[k:].sum() / values.sum() for k in range(columns)]
    least = next(k for k in range(1, columns + 1) if values[k:].sum() <= dropped * values.sum() + 1e-12 * values.sum())
    assert d == min(max(least, 1), most), (d, left_out)
    assert not array(weights).reshape(most, rows)[d:].any()
    mixed = backend.combine(put(np.asarray(weights)[: d * rows]), put(x.astype(np.float32)), rows)
    basis = array(backend.orthonormalise(mixed, d)).reshape(d, columns)
    np.testing.assert_allclose(basis.T @ basis, vectors[:, :d] @ vectors[:, :d].T, atol=2e-5)
    put.check()


def test_principal_components_within_bounds_and_of_nothing(backend: Any) -> None:
    put, x = Put(backend), vector("normal", 60)
    assert [int(backend.principal(put(x), 6, least, most, 0.5)[0][0]) for least, most in ((4, 5), (1, 1))] == [4, 1]
    count, weights = backend.principal(put(0 * x), 6, 1, 5, 0.01)
    assert int(count[0]) == 1 and np.isfinite(np.asarray(weights)).all()
    count, weights = backend.principal(put((x * 1e37).astype(np.float32)), 6, 1, 5, 0.01)
    assert np.isfinite(np.asarray(weights)).all() and np.isfinite(np.asarray(backend.combine(weights, put(x), 6))).all()


def test_what_all_ranks_compute_is_equal_to_the_bit_in_every_backend(backend: Any) -> None:
    put, x, w = Put(backend), vector("heavy", 700), vector("normal", 21)
    assert get(backend.combine(put(w), put(x), 7)) == get(reference.combine(w, x, 7))
    p, q = vector("heavy", 60), vector("normal", 90)
    assert get(backend.outer_sum(put(p), put(q), 3)) == get(reference.outer_sum(p, q, 3))
    large = backend.outer_sum(put(np.ones(3, np.float32)), put(np.full(3, MAX / 4, np.float32)), 3)
    assert np.isfinite(np.asarray(large)).all()
