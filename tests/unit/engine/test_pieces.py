"""Forms of a bucket's vector: one piece, or one per tensor; sparse, of low rank, or dense."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from hvdcompress.engine.pieces import by_tensor, combined, in_same_form, is_compact, scaled, slots_of, to_dense
from hvdcompress.method import Sparse, TensorSpec
from hvdcompress.ops import fast
from hvdcompress.ops.shared import outer_sum
from hvdcompress.ops.vectors import Outer, Shares
from hvdcompress.plan import IN_ORDER, plan_of

(BUCKET,) = plan_of("topk", density=0.5, min_elements=1, bucket_elements=1000).buckets(
    [TensorSpec("a", (4, 3)), TensorSpec("b", (5,)), TensorSpec("c", (2, 3))], IN_ORDER
)
LIKE = np.zeros(1, np.float32)


def sparse(index: list[int], values: list[float]) -> Sparse:
    return Sparse(np.int32(index), np.float32(values))


WHOLE = sparse([1, 7, 11, 12, 22], [1, 2, 3, 4, 5])
EACH = (sparse([1, 7, 11], [1, 2, 3]), sparse([0], [4]), sparse([5], [5]))
DENSE = np.zeros(23, np.float32)
DENSE[WHOLE.index] = WHOLE.values


@pytest.mark.parametrize("pieces", [(WHOLE,), EACH, (DENSE,), (DENSE[:12], DENSE[12:17], DENSE[17:])])
def test_every_form_is_the_same_vector(pieces: tuple[Any, ...]) -> None:
    np.testing.assert_array_equal(to_dense(pieces, BUCKET, fast, LIKE), DENSE)
    np.testing.assert_array_equal(to_dense(by_tensor(pieces, BUCKET), BUCKET, fast, LIKE), DENSE)
    np.testing.assert_array_equal(to_dense(scaled(pieces, 0.5), BUCKET, fast, LIKE), DENSE / 2)
    assert len(by_tensor(pieces, BUCKET)) == 3


def test_a_matrix_of_low_rank_becomes_dense() -> None:
    outer = Outer(np.float32([1, 2, 3, 4]), np.float32([1, 10, 100]), 1)
    pieces = (outer, sparse([1], [7]), DENSE[:6])
    want = np.concatenate([np.outer(outer.left, outer.right).ravel(), [0, 7, 0, 0, 0], DENSE[:6]])
    np.testing.assert_array_equal(to_dense(pieces, BUCKET, fast, LIKE), want)
    np.testing.assert_array_equal(to_dense(scaled(pieces, 3.0), BUCKET, fast, LIKE), 3 * want)


def test_earlier_pieces_take_the_form_of_new_ones() -> None:
    """If the forms are of different kinds, the result is empty."""
    np.testing.assert_equal(in_same_form([WHOLE], EACH, BUCKET, fast), [WHOLE])
    np.testing.assert_equal(in_same_form(list(EACH), (WHOLE,), BUCKET, fast), list(EACH))
    assert in_same_form([WHOLE], (DENSE,), BUCKET, fast) == () == in_same_form([WHOLE], (), BUCKET, fast)


@pytest.mark.parametrize(
    "pieces,compact",
    [
        ([WHOLE], True),
        ([Shares([WHOLE, WHOLE])], True),
        (EACH, True),
        ([Outer(LIKE, LIKE, 1)] * 3, True),
        ([Outer(LIKE, LIKE, 1)], False),  # a matrix of several tensors cannot be cut
        ([Outer(LIKE, LIKE, 1), WHOLE, WHOLE], False),
        ([WHOLE, DENSE, WHOLE], False),
        ([DENSE], False),
    ],
)
def test_sparse_vectors_and_matrices_of_low_rank_stay_compact(pieces: Any, compact: bool) -> None:
    assert is_compact(pieces, BUCKET) is compact


@pytest.mark.parametrize(
    "piece,names",
    [
        (WHOLE, ["momentum.index", "momentum.values"]),
        (Outer(LIKE, LIKE, 1), ["momentum.left", "momentum.right"]),
        (DENSE, ["momentum"]),
    ],
)
def test_names_in_a_saved_state(piece: Any, names: list[str]) -> None:
    assert list(slots_of(piece)) == names


@pytest.mark.parametrize("basis", ["left", "right"])
def test_the_sum_of_two_matrices_with_one_basis_has_their_rank(basis: Literal["left", "right"]) -> None:
    rng = np.random.default_rng(0)
    shared = fast.orthonormalise(rng.standard_normal(2 * 50).astype(np.float32), 2)
    turned = (np.array([[2.0, 1.0], [0.5, -3.0]]) @ shared.reshape(2, 50)).astype(np.float32).ravel()
    elsewhere = rng.standard_normal(len(shared)).astype(np.float32)
    one, two = (rng.standard_normal(2 * 30).astype(np.float32) for _ in range(2))

    def outer(of_basis: np.ndarray, other: np.ndarray) -> Outer:
        return Outer(of_basis, other, 2) if basis == "left" else Outer(other, of_basis, 2)

    first, second = outer(shared, one)._replace(scale=0.5, basis=basis), outer(turned, two)
    joint = combined(first, 3.0, second, -0.9, fast)
    apart = combined(first._replace(basis=None), 3.0, second, -0.9, fast)
    assert joint.terms == 2 and apart.terms == 4
    np.testing.assert_allclose(outer_sum(joint), outer_sum(apart), atol=1e-5)
    assert combined(first, 3.0, outer(elsewhere, two), -0.9, fast).terms == 4
