"""The verbs for sparse vectors, thresholds and norms: every backend gives the reference's results to the bit."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ops import SPECIAL, Put, backend, call, get, is_tensorflow, vector  # noqa: F401  (backend is a fixture)
from test_ops import compare as compare_verbs

import hvdcompress
from hvdcompress.method import Sparse
from hvdcompress.ops import _numpy_sparse
from hvdcompress.ops import numpy as reference

INDEX = ("int32", "int64")


def two(x: np.ndarray, y: np.ndarray, overlap: bool = True) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two sparse vectors of the numbers in x and y; their places overlap in part."""
    step = 2 if overlap else 3
    return [(2 * np.arange(x.size), x), (step * np.arange(y.size) + (0 if overlap else 1), y)]


def merged(ops: Any, put: Any, pair: list[tuple[np.ndarray, np.ndarray]], n: int, dtypes: Any = INDEX[:1] * 2) -> Any:
    parts = [Sparse(put(i.astype(d)), put(v)) for (i, v), d in zip(pair, dtypes, strict=True)]
    return ops.merge(*parts, n)


for dtypes in (INDEX, INDEX[:1] * 2, INDEX[1:] * 2):
    for n in (10**6, 2**31):
        call("merge")(lambda o, put, x, r, d=dtypes, n=n: merged(o, put, two(x, r), n, d))
call("merge")(lambda o, put, x, r: merged(o, put, two(x, r[: r.size // 2], overlap=False), 10**6))
call("merge")(lambda o, put, x, r: merged(o, put, two(x, -x), 10**6))  # to zeros, whatever their sign was
for share in (1, 2, 10, 100):
    call("kth_magnitude")(lambda o, put, x, r, d=share: o.kth_magnitude(put(x), -(-x.size // d)))
call("l2_norm")(lambda o, put, x, r: float(np.float32(o.l2_norm(put(x / np.float32(1e4))))))


def test_every_verb_is_compared() -> None:
    from test_ops import CALLS

    assert set(_numpy_sparse.__all__) <= CALLS.keys()


def compare(ops: Any, x: np.ndarray, r: np.ndarray) -> None:
    compare_verbs(ops, x, r, only=_numpy_sparse.__all__)


@pytest.mark.parametrize("kind", ["normal", "heavy", "constant", "ties", "special"])
@pytest.mark.parametrize("n", [0, 1, 2, 31, 1024, 4099])
def test_verbs_on_vectors(backend: Any, kind: str, n: int) -> None:  # noqa: F811
    compare(backend, vector(kind, n), vector(kind, n, seed=1))


finite = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32, allow_nan=False, allow_infinity=False))


@settings(max_examples=25)
@given(pairs=st.lists(st.tuples(finite, finite), max_size=30))
def test_verbs_on_any_floats(backend: Any, pairs: list[tuple[float, float]]) -> None:  # noqa: F811
    x, r = np.array(pairs, np.float32).reshape(-1, 2).T
    compare(backend, np.ascontiguousarray(x), np.ascontiguousarray(r))


# -- against an independent word for it -------------------------------------------------------------------


@given(
    st.dictionaries(st.integers(0, 40), st.floats(-10, 10, width=32)),
    st.dictionaries(st.integers(0, 40), st.floats(-10, 10, width=32)),
)
def test_merge_is_the_sum_of_two_dictionaries(a: dict[int, float], b: dict[int, float]) -> None:
    parts = [Sparse(np.array(sorted(d), np.int32), np.array([d[i] for i in sorted(d)], np.float32)) for d in (a, b)]
    index, values = reference.merge(*parts, 41)
    assert index.tolist() == sorted(a | b) and index.dtype == np.int32
    expected = [np.float32(np.float32(a.get(i, 0)) + np.float32(b.get(i, 0))) for i in sorted(a | b)]
    assert values.tolist() == [float(e) for e in expected] and values.dtype == np.float32


def test_merge_sums_in_either_order_alike(backend: Any) -> None:  # noqa: F811
    x, y = vector("heavy", 500), vector("special", 500)
    with np.errstate(over="ignore"):
        there = merged(backend, Put(backend), two(x, y), 1000)
        back = merged(backend, Put(backend), two(x, y)[::-1], 1000)
    assert get(there) == get(back)


def test_merge_adds_no_place_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA ``index_add_`` adds in any order: two values on a zero sum to the same, three would not."""
    torch, ops = pytest.importorskip("torch"), importlib.import_module("hvdcompress.ops.torch")
    counts, add = [], torch.Tensor.index_add_

    def watch(out: Any, dim: int, index: Any, values: Any) -> Any:
        counts.append(int(np.bincount(np.asarray(index)).max()))
        assert not out.any()
        return add(out, dim, index, values)

    monkeypatch.setattr(torch.Tensor, "index_add_", watch)
    merged(ops, Put(ops), two(vector("normal", 50), vector("normal", 50)), 100)
    assert counts == [2]


@pytest.mark.parametrize("k", [1, 7, 31])
def test_kth_magnitude_by_sorting(backend: Any, k: int) -> None:  # noqa: F811
    for kind in ("normal", "ties", "constant"):
        x = vector(kind, 31)
        assert backend.kth_magnitude(Put(backend)(x), k) == sorted(np.abs(x).tolist())[-k]


@pytest.mark.parametrize("size", [1e-45, 1e-30, 1.0, 1e37])
def test_norm_neither_overflows_nor_vanishes(backend: Any, size: float) -> None:  # noqa: F811
    if size < 1e-38 and is_tensorflow(backend):
        pytest.skip("TensorFlow takes denormal numbers for 0")
    for n in (1, 2, 1000, 65_537):
        x = (vector("normal", n).clip(-3, 3) * np.float32(size)).astype(np.float32)
        expected = math.sqrt(math.fsum(float(value) ** 2 for value in x))
        assert backend.l2_norm(Put(backend)(x)) == pytest.approx(expected, rel=1e-12, abs=0)
    assert backend.l2_norm(Put(backend)(np.zeros(0, np.float32))) == 0.0


def test_torch_waits_for_the_device_in_one_place_only() -> None:
    source = (Path(hvdcompress.__file__).parent / "ops" / "_torch_sparse.py").read_text(encoding="utf-8")
    assert re.findall(r"\.(?:cpu|numpy|item|tolist)\(", source) == [".tolist("]
    assert re.search(r"def _host\(x: Array\) -> Any:\n.*\n    return x.tolist\(\)", source)
