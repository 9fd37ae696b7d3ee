"""Tests of ``matrices.py`` in the backends; ``test_ops.py`` compares layouts and ``combine`` with the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcompress.ops.numpy import ops as reference
from hvdcompress.ops.scan import Product, Scan
from tests.unit.ops.comparing import Put, get, host
from tests.unit.ops.inputs import key, vector


def array(x: Any) -> np.ndarray:
    return host(x).astype(np.float64)


@pytest.mark.parametrize(
    "rows,inner,columns", [(1, 1, 1), (1, 90, 7), (2, 2100, 3), (4, 64, 65), (8, 19, 33), (11, 5, 40)]
)
def test_products(native: Any, monkeypatch: pytest.MonkeyPatch, rows: int, inner: int, columns: int) -> None:
    """Products with a sum of gradient and residual, separately and in the pass that accumulates the sum."""
    if type(native).__name__ == "NumbaOps":  # use the kernels for small matrices, too
        monkeypatch.setattr("hvdcompress.ops.numba.matrices.LARGE", 0)
        monkeypatch.setattr("hvdcompress.ops.numba.arithmetic.LARGE", 0)
    a, g, r = (vector("normal", n, seed) for seed, n in enumerate((rows * inner, columns * inner, columns * inner)))
    total = np.zeros_like(g)
    reference.accumulate(g, r, 0.3, total)
    put = Put(native)
    out = put(np.full_like(g, 7), changes=True)
    found = native.accumulate(put(g), put(r), 0.3, out, Scan(product=Product(put(a), rows)))
    assert found.finite and get(out) == get(total)
    transposed = np.ascontiguousarray(total.reshape(columns, inner).T).ravel()
    exact = a.reshape(rows, inner).astype(np.float64) @ total.reshape(columns, inner).T
    for product in (
        found.product,
        native.matmul(put(a), put(transposed), rows, columns),
        native.matmul_transposed(put(a), put(total), rows, columns),
    ):
        assert get(product)[:2] == ("float32", (rows * columns,))
        np.testing.assert_allclose(array(product).reshape(rows, columns), exact, atol=1e-6 * inner)
    put.check()


@pytest.mark.parametrize("scale", [1.0, 1e37, 1e-44])
@pytest.mark.parametrize("rows,columns", [(1, 1), (2, 2), (5, 40), (9, 300)])
def test_orthonormalise_is_gram_schmidt(backend: Any, rows: int, columns: int, scale: float) -> None:
    x = (vector("normal", rows * columns, 5) * np.float32(scale)).astype(np.float32)
    q, r = np.linalg.qr(x.reshape(rows, columns).T.astype(np.float64))
    found = array(backend.orthonormalise(Put(backend)(x), rows)).reshape(rows, columns)
    assert np.isfinite(found).all()
    if scale > 1e-40:  # denormals have hardly any digits
        np.testing.assert_allclose(found, (q * np.sign(np.diag(r))).T, atol=1e-5)


@pytest.mark.parametrize("rows,columns", [(1, 1), (3, 2), (4, 511), (3, 513), (2, 5000)])
@pytest.mark.parametrize("number", [None, key(9)], ids=["zero", "drawn"])
def test_compiled_orthonormal_rows_equal_the_references(rows: int, columns: int, number: np.ndarray | None) -> None:
    """To the byte: all ranks compute them for themselves, some perhaps without numba."""
    numba_ops = pytest.importorskip("hvdcompress.ops.numba").ops
    x = vector("heavy", rows * columns, 5)
    x[columns : 2 * columns] = 0
    assert get(numba_ops.orthonormalise(x, rows, number)) == get(reference.orthonormalise(x, rows, number))


def test_nearly_parallel_rows_become_orthogonal(backend: Any) -> None:
    """One pass of Gram-Schmidt would leave them at an angle of rounding / difference."""
    x = np.ones((3, 200), np.float64) + 1e-5 * vector("normal", 600).reshape(3, 200)
    found = array(backend.orthonormalise(Put(backend)(x.ravel()), 3)).reshape(3, 200)
    np.testing.assert_allclose(found @ found.T, np.eye(3), atol=1e-6)


def test_dependent_rows_become_zero_or_are_drawn(backend: Any) -> None:
    a, b = vector("normal", 40, 1), vector("normal", 40, 2)
    x = np.concatenate([a, 3 * a, 0 * a, a - b])
    found = array(backend.orthonormalise(Put(backend)(x), 4)).reshape(4, 40)
    assert not found[1:3].any()
    np.testing.assert_allclose(found @ found.T, np.diag([1, 0, 0, 1]), atol=1e-6)
    filled = array(backend.orthonormalise(Put(backend)(x), 4, key(3)))
    x[40:120] = (reference.uniform(key(3), 160, a) - np.float32(0.5))[40:120]
    np.testing.assert_allclose(filled, reference.orthonormalise(x, 4), atol=1e-6)


@pytest.mark.parametrize("rows,columns", [(2, 9), (6, 40), (12, 7)])
@pytest.mark.parametrize("dropped", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("centre", [True, False])
def test_principal_components(native: Any, rows: int, columns: int, dropped: float, centre: bool) -> None:
    """They span the first eigenvectors of the covariance, and their number is the smallest allowed."""
    x = vector("normal", rows * columns, 7) * np.repeat(2.0 ** -np.arange(rows), columns).astype(np.float32) + 5
    most, put = min(rows - 1, columns), Put(native)
    count, weights = native.principal(put(x), rows, 1, most, dropped, centre)
    assert get(count)[:2] == ("int32", (1,)) and host(weights).shape == (most * rows,)
    d, wide = int(count[0]), x.reshape(rows, columns).astype(np.float64)
    wide = wide - wide.mean(0) * centre
    values, vectors = np.linalg.eigh(wide.T @ wide / rows)
    lost = np.append(values.cumsum()[::-1], 0)  # variance that the first k components lose, for k = 0, 1, …
    least = int(np.argmax(lost <= (dropped + 1e-12) * values.sum()))
    assert d == min(max(least, 1), most)
    assert not host(weights).reshape(most, rows)[d:].any()
    mixed = native.combine(put(host(weights)[: d * rows]), put(x), rows, centre)
    basis = array(native.orthonormalise(mixed, d)).reshape(d, columns)
    first = vectors[:, ::-1][:, :d]
    np.testing.assert_allclose(basis.T @ basis, first @ first.T, atol=2e-5)
    put.check()


def test_principal_components_within_bounds_and_of_zeros(native: Any) -> None:
    put, x = Put(native), vector("normal", 60)
    for scale, bounds, expected in ((1, (4, 5), 4), (1, (1, 1), 1), (0, (1, 5), 1)):
        count, weights = native.principal(put(x * np.float32(scale)), 6, *bounds, 0.5)
        assert int(count[0]) == expected and np.isfinite(host(weights)).all()
