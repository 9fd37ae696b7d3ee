"""The ops of ``matrices.py``: layouts, products, orthonormal rows and principal components."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.scan import Product, Scan
from hvdcompress.ops.vectors import Outer
from tests.unit.ops.comparing import MAX, Put, call, changed, get, host, key, vector

# -- compared to the bit, by test_ops.py --------------------------------------------------------------------------


def tame(x: np.ndarray, rows: int = 3, most: int = 40) -> np.ndarray:
    """A few whole rows of numbers whose products are finite."""
    size = min(x.size, rows * most) // rows * rows
    return np.clip(x[:size], -1e18, 1e18)


def written(o: Any, put: Any, p: np.ndarray, q: np.ndarray, count: int, factor: float, scale: float = 1.0) -> Any:
    """A matrix of low rank, written."""
    out = np.full(p.size // count * (q.size // count), 7, np.float32)
    return changed(o, put, out, lambda out: o.write(out, Outer(put(p), put(q), count, scale), factor))


def subtracted(o: Any, put: Any, p: np.ndarray, q: np.ndarray, count: int, factor: float, scale: float) -> Any:
    out = vector("normal", p.size // count * (q.size // count))
    return changed(o, put, out, lambda out: o.subtract(out, Outer(put(p), put(q), count, scale), factor))


call("permute")(lambda o, put, x, r: o.permute(put(x), (x.size, 1), (1, 0)))
call("permute")(lambda o, put, x, r: o.permute(put(tame(x, 12)), (2, tame(x, 12).size // 12, 3, 2), (2, 3, 1, 0)))
for block in (1, 2, 8, 64, 2048):
    call("hadamard")(lambda o, put, x, r, b=block: o.hadamard(put(x[: x.size // b * b]), b))
for count in (1, 2, 3, 4, 5, 9):
    for factor, scale in ((1.0, 1.0), (0.3, 1.0), (1.0, 1 / 3), (0.1, 0.7)):
        call("write")(
            lambda o, put, x, r, c=count, f=factor, s=scale: written(o, put, tame(x, c), tame(r, c, 7), c, f, s)
        )
        call("subtract")(
            lambda o, put, x, r, c=count, f=factor, s=scale: subtracted(o, put, tame(x, c, 7), tame(r, c), c, f, s)
        )
call("write")(lambda o, put, x, r: written(o, put, tame(x, 2, 3), tame(r, 2, 2000), 2, 1.0))  # beyond a block
for count in (1, 2, 3):
    call("combine")(lambda o, put, x, r, c=count: o.combine(put(tame(r, 12)[: 4 * c]), put(tame(x, 4)), 4))
for op in ("coordinates", "matmul", "matmul_transposed", "orthonormalise", "principal"):
    call(op)(lambda o, put, x, r: None)  # to rounding, or not by every backend: below


# -- the definitions, in float64 ----------------------------------------------------------------------------------


def array(x: Any) -> np.ndarray:
    return host(x).astype(np.float64)


@pytest.mark.parametrize("shape,axes", [((7,), (0,)), ((3, 5), (1, 0)), ((4, 3, 2, 5), (2, 3, 1, 0))])
def test_permute_moves_each_element(backend: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    x = vector("normal", int(np.prod(shape)))
    moved = host(backend.permute(Put(backend)(x), shape, axes)).reshape([shape[a] for a in axes])
    for place in np.ndindex(*shape):
        assert moved[tuple(place[a] for a in axes)] == x.reshape(shape)[place]


def test_hadamard_multiplies_each_block_by_its_matrix(backend: Any) -> None:
    x = vector("normal", 48)
    ones = np.array([[(i & j).bit_count() for j in range(16)] for i in range(16)])
    found = array(backend.hadamard(Put(backend)(x), 16))
    np.testing.assert_allclose(found, ((-1.0) ** ones / 4 @ x.reshape(3, 16).T).T.ravel(), atol=1e-6)


@pytest.mark.parametrize(
    "rows,inner,columns",
    [(1, 1, 1), (1, 9, 4), (5, 1, 3), (17, 33, 2), (4, 300, 65), (2, 2100, 7), (3, 19, 2100), (8, 64, 33)],
)
def test_products(backend: Any, rows: int, inner: int, columns: int) -> None:
    a, b = vector("normal", rows * inner, 1), vector("normal", inner * columns, 2)
    exact = a.reshape(rows, inner).astype(np.float64) @ b.reshape(inner, columns)
    turned = np.ascontiguousarray(b.reshape(inner, columns).T).ravel()
    put = Put(backend)
    for found in (
        backend.matmul(put(a), put(b), rows, columns),
        backend.matmul_transposed(put(a), put(turned), rows, columns),
    ):
        assert str(host(found).dtype) == "float32" and host(found).shape == (rows * columns,)
        np.testing.assert_allclose(array(found).reshape(rows, columns), exact, atol=1e-6 * inner)
    put.check()


@pytest.mark.parametrize(
    "rows,inner,columns",
    [
        *[(1, 1, 1), (1, 90, 7), (2, 33, 17), (3, 2100, 3), (4, 64, 64), (11, 5, 40)],
        pytest.param(3, 2100, 2000, marks=pytest.mark.slow),  # Triton's interpreter takes a quarter of a minute
    ],
)
def test_products_while_accumulating(native: Any, rows: int, inner: int, columns: int) -> None:
    """What is accumulated is that of accumulate, to the bit; what is found, the product with it."""
    a, g, r = (vector("normal", n, seed) for n, seed in ((rows * inner, 1), (columns * inner, 2), (columns * inner, 3)))
    put, n = Put(native), columns * inner
    expected = np.zeros(n, np.float32)
    reference.accumulate(g, r, 0.3, expected)
    gradient, out = put(g), put(np.full(n, 7, np.float32), changes=True)
    wanted = Scan(product=Product(put(a), rows))
    result = native.accumulate(gradient, put(r), 0.3, out, wanted)
    found = result.product
    put.check()
    assert result.finite and get(out) == get(expected)
    exact = a.reshape(rows, inner).astype(np.float64) @ expected.reshape(columns, inner).T
    assert str(host(found).dtype) == "float32" and host(found).shape == (rows * columns,)
    np.testing.assert_allclose(array(found).reshape(rows, columns), exact, atol=1e-6 * inner)


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


@pytest.mark.parametrize("rows,columns", [(1, 1), (3, 2), (4, 511), (3, 513), (2, 5000), (1, 300_000)])
def test_compiled_orthonormal_rows_are_the_references_to_the_bit(rows: int, columns: int) -> None:
    """All ranks compute them for themselves, some perhaps without numba."""
    numba_ops = pytest.importorskip("hvdcompress.ops.numba")
    x = vector("heavy", rows * columns, 5)
    x[columns : 2 * columns] = 0  # the second row is drawn
    for number in (None, key(9)):
        assert get(numba_ops.orthonormalise(x, rows, number)) == get(reference.orthonormalise(x, rows, number))


def test_nearly_parallel_rows_are_orthogonal_nevertheless(backend: Any) -> None:
    """One pass of Gram-Schmidt would leave them at an angle of rounding / difference."""
    x = np.ones((3, 200), np.float64) + 1e-5 * vector("normal", 600).reshape(3, 200)
    found = array(backend.orthonormalise(Put(backend)(x.ravel()), 3)).reshape(3, 200)
    np.testing.assert_allclose(found @ found.T, np.eye(3), atol=1e-6)


def test_dependent_rows_are_zero_or_filled(backend: Any) -> None:
    a, b = vector("normal", 40, 1), vector("normal", 40, 2)
    fill = (reference.uniform(key(3), 160, a) - np.float32(0.5)).reshape(4, 40)
    x = np.concatenate([a, 3 * a, 0 * a, a - b])
    put = Put(backend)
    found = array(backend.orthonormalise(put(x), 4)).reshape(4, 40)
    assert not found[1:3].any()
    np.testing.assert_allclose(found @ found.T, np.diag([1, 0, 0, 1]), atol=1e-6)
    filled = array(backend.orthonormalise(put(x), 4, key(3))).reshape(4, 40)
    np.testing.assert_allclose(filled @ filled.T, np.eye(4), atol=1e-6)
    np.testing.assert_allclose(filled[0], found[0], atol=1e-7)
    drawn = fill[1] - (fill[1] @ found[0]) * found[0]
    np.testing.assert_allclose(filled[1], drawn / np.linalg.norm(drawn), atol=1e-6)
    zero = host(backend.orthonormalise(put(0 * x), 4))
    assert not zero.any() and np.isfinite(zero).all()
    put.check()


@pytest.mark.parametrize("rows,columns", [(1, 1), (3, 7), (4, 513), (8, 3000)])
def test_coordinates_of_combinations(backend: Any, rows: int, columns: int) -> None:
    """A backend finds them as the reference does, to the bit, or says that it does not look."""
    basis = reference.orthonormalise(vector("normal", rows * columns, 3), rows)
    weights = np.linspace(-2, 3, 2 * rows).reshape(rows, 2)
    x = (weights.T @ basis.reshape(rows, columns)).astype(np.float32).ravel()
    expected = reference.coordinates(x, basis, rows)
    assert expected is not None
    np.testing.assert_allclose(expected.reshape(rows, 2), weights, atol=1e-5)
    put = Put(backend)
    found = backend.coordinates(put(x), put(basis), rows)
    assert found is None if backend.__name__.endswith(("torch", "triton")) else get(found) == get(expected)
    if rows < columns:  # elsewhere nothing is left out
        x[0] += 0.01
        assert reference.coordinates(x, basis, rows) is None
        assert backend.coordinates(put(x), put(basis), rows) is None


@pytest.mark.parametrize("rows,columns", [(2, 9), (6, 40), (12, 7)])
@pytest.mark.parametrize("dropped", [0.0, 0.01, 0.3, 0.9])
@pytest.mark.parametrize("centre", [True, False])
def test_principal_components(backend: Any, rows: int, columns: int, dropped: float, centre: bool) -> None:
    """Their combinations span what the eigenvectors of the covariance do, and their number is the least."""
    x = vector("normal", rows * columns, 7) * np.repeat(2.0 ** -np.arange(rows), columns).astype(np.float32) + 5
    most, put = min(rows - 1, columns), Put(backend)
    count, weights = backend.principal(put(x.astype(np.float32)), rows, 1, most, dropped, centre)
    assert get(count)[:2] == ("int32", (1,)) and host(weights).shape == (most * rows,)
    d, wide = int(count[0]), x.astype(np.float32).reshape(rows, columns).astype(np.float64)
    wide = wide - wide.mean(0) * centre
    values, vectors = np.linalg.eigh(wide.T @ wide / rows)
    values, vectors = values[::-1], vectors[:, ::-1]
    left_out = [values[k:].sum() / values.sum() for k in range(columns)]
    least = next(k for k in range(1, columns + 1) if values[k:].sum() <= dropped * values.sum() + 1e-12 * values.sum())
    assert d == min(max(least, 1), most), (d, left_out)
    assert not array(weights).reshape(most, rows)[d:].any()
    mixed = backend.combine(put(host(weights)[: d * rows]), put(x.astype(np.float32)), rows, centre)
    basis = array(backend.orthonormalise(mixed, d)).reshape(d, columns)
    np.testing.assert_allclose(basis.T @ basis, vectors[:, :d] @ vectors[:, :d].T, atol=2e-5)
    put.check()


def test_principal_components_within_bounds_and_of_nothing(backend: Any) -> None:
    put, x = Put(backend), vector("normal", 60)
    assert [int(backend.principal(put(x), 6, least, most, 0.5)[0][0]) for least, most in ((4, 5), (1, 1))] == [4, 1]
    count, weights = backend.principal(put(0 * x), 6, 1, 5, 0.01)
    assert int(count[0]) == 1 and np.isfinite(host(weights)).all()
    count, weights = backend.principal(put((x * 1e37).astype(np.float32)), 6, 1, 5, 0.01)
    assert np.isfinite(host(weights)).all() and np.isfinite(host(backend.combine(weights, put(x), 6))).all()


def test_what_all_ranks_compute_is_equal_to_the_bit_in_every_backend(backend: Any) -> None:
    put, x, w = Put(backend), vector("heavy", 700), vector("normal", 21)
    for centre in (True, False):
        assert get(backend.combine(put(w), put(x), 7, centre)) == get(reference.combine(w, x, 7, centre))
    p, q = vector("heavy", 60), vector("normal", 90)
    assert get(written(backend, put, p, q, 3, 1.0)) == get(written(reference, Put(reference), p, q, 3, 1.0))
    large = written(backend, put, np.ones(3, np.float32), np.full(3, MAX / 4, np.float32), 3, 1.0)
    assert np.isfinite(host(large)).all()
