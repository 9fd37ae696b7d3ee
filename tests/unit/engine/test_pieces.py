"""Forms of a bucket's vector: one piece or one for each tensor; sparse, of low rank, or dense."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from hvdcompress.engine.pieces import by_tensor, combined, in_same_form, is_compact, scaled, slots_of, to_dense
from hvdcompress.engine.saving import snapshot
from hvdcompress.method import Sparse, TensorSpec
from hvdcompress.ops import fast
from hvdcompress.ops.shared import outer_sum
from hvdcompress.ops.vectors import Outer, Shares
from hvdcompress.plan import IN_ORDER, plan_of

(BUCKET,) = plan_of("topk", density=0.5, min_elements=1, bucket_elements=1000).buckets(
    [TensorSpec("a", (4, 3)), TensorSpec("b", (5,)), TensorSpec("c", (2, 3))], IN_ORDER
)
LIKE = np.zeros(1, np.float32)
FIRST = Sparse(np.array([1, 7, 11, 12, 22], np.int32), np.array([1, 2, 3, 4, 5], np.float32))
DENSE = np.zeros(23, np.float32)
DENSE[FIRST.index] = FIRST.values


def sparse(index: list[int], values: list[float]) -> Sparse:
    return Sparse(np.array(index, np.int32), np.array(values, np.float32))


EACH = (sparse([1, 7, 11], [1, 2, 3]), sparse([0], [4]), sparse([5], [5]))


@pytest.mark.parametrize("pieces", [(FIRST,), EACH, (DENSE,), (DENSE[:12], DENSE[12:17], DENSE[17:])])
def test_every_form_is_the_same_vector(pieces: tuple[Any, ...]) -> None:
    np.testing.assert_array_equal(to_dense(pieces, BUCKET, fast, LIKE), DENSE)
    np.testing.assert_array_equal(to_dense(by_tensor(pieces, BUCKET), BUCKET, fast, LIKE), DENSE)
    np.testing.assert_array_equal(to_dense(scaled(pieces, 0.5), BUCKET, fast, LIKE), DENSE / 2)
    assert len(by_tensor(pieces, BUCKET)) == 3


def test_a_matrix_of_low_rank_is_dense_where_it_has_to_be() -> None:
    outer = Outer(np.float32([1, 2, 3, 4]), np.float32([1, 10, 100]), 1)
    pieces = (outer, sparse([1], [7]), DENSE[:6])
    dense = to_dense(pieces, BUCKET, fast, LIKE)
    np.testing.assert_array_equal(dense[:12].reshape(4, 3), np.outer([1, 2, 3, 4], [1, 10, 100]))
    assert dense[12:17].tolist() == [0, 7, 0, 0, 0] and dense[17:].tolist() == DENSE[:6].tolist()
    np.testing.assert_array_equal(to_dense(scaled(pieces, 3.0), BUCKET, fast, LIKE), 3 * dense)


def test_the_past_takes_the_form_of_what_comes() -> None:
    """One sparse vector or one for each tensor; nothing where the forms are of another kind."""
    (joined,) = in_same_form([FIRST], EACH, BUCKET, fast)
    np.testing.assert_array_equal(joined.index, FIRST.index)
    np.testing.assert_array_equal(joined.values, FIRST.values)
    for one, other in zip(in_same_form(list(EACH), (FIRST,), BUCKET, fast), EACH, strict=True):
        np.testing.assert_array_equal(one.index, other.index)
        np.testing.assert_array_equal(one.values, other.values)
    assert in_same_form([FIRST], (DENSE,), BUCKET, fast) == () == in_same_form([FIRST], (), BUCKET, fast)


def test_what_stays_compact() -> None:
    outer = Outer(np.float32([1]), np.float32([1]), 1)
    assert is_compact([FIRST], BUCKET) and is_compact([Shares([FIRST, FIRST])], BUCKET) and is_compact(EACH, BUCKET)
    assert is_compact([outer] * 3, BUCKET)
    assert not is_compact([outer], BUCKET), "a matrix of several tensors cannot be cut"
    assert not is_compact([outer, FIRST, FIRST], BUCKET) and not is_compact([FIRST, DENSE, FIRST], BUCKET)
    assert not is_compact([DENSE], BUCKET)


def test_names_in_a_saved_state() -> None:
    assert list(slots_of(FIRST)) == ["momentum.index", "momentum.values"]
    assert list(slots_of(Outer(LIKE, LIKE, 1))) == ["momentum.left", "momentum.right"]
    assert list(slots_of(DENSE)) == ["momentum"]


@pytest.mark.parametrize("basis", ["left", "right"])
def test_two_matrices_on_one_basis_have_the_rank_of_one(basis: Literal["left", "right"]) -> None:
    rng = np.random.default_rng(0)
    shared = fast.orthonormalise(rng.standard_normal(2 * 50).astype(np.float32), 2)
    turned = (np.array([[2.0, 1.0], [0.5, -3.0]]) @ shared.reshape(2, 50)).astype(np.float32).ravel()
    one, two = (rng.standard_normal(2 * 30).astype(np.float32) for _ in range(2))
    if basis == "right":
        first, second = Outer(one, shared, 2, 0.5, basis), Outer(two, turned, 2)
    else:
        first, second = Outer(shared, one, 2, 0.5, basis), Outer(turned, two, 2)
    joint, apart = (
        combined(first, 3.0, second, -0.9, fast),
        combined(first._replace(basis=None), 3.0, second, -0.9, fast),
    )
    assert joint.terms == 2 and apart.terms == 4
    np.testing.assert_allclose(outer_sum(joint), outer_sum(apart), atol=1e-5)
    other = rng.standard_normal(len(shared)).astype(np.float32)
    elsewhere = Outer(other, two, 2) if basis == "left" else Outer(two, other, 2)
    assert combined(first, 3.0, elsewhere, -0.9, fast).terms == 4


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_saved_momentum_in_several_forms_becomes_dense(library: str) -> None:
    """Tensors of different buckets have different forms; the result lies where the arrays of the library lie."""
    put, copy = (lambda array: array), np.concatenate
    if library == "torch":
        torch = pytest.importorskip("torch")
        put, copy = torch.from_numpy, lambda parts: torch.cat([torch.as_tensor(part) for part in parts])
    left, right = np.float32([1, 2, 3, 4]), np.float32([1, -1, 0.5])
    forms = {"a": Outer(left, right, 1), "b": EACH[1]}
    state = {name: {slot: put(array) for slot, array in slots_of(form).items()} for name, form in forms.items()}
    merge = {name: dict.fromkeys(slots, "keep") for name, slots in state.items()}
    saved = {"steps": dict.fromkeys("abc", 3), "restarts": {}, "merge": merge, "state": state}
    found = snapshot.restored(saved, BUCKET, copy, whole=False)
    assert found is not None
    (dense,) = found.momentum.content
    assert type(dense) is type(put(left))
    np.testing.assert_array_equal(np.asarray(dense), np.concatenate([np.outer(left, right).ravel(), [4], np.zeros(10)]))
