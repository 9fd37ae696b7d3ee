"""Every backend's verbs give the reference's results to the bit."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdcompress
from hvdcompress.method import Sparse
from hvdcompress.ops import numpy as reference
from hvdcompress.parts import pack, select

MAX = float(np.finfo(np.float32).max)
TINY = float(np.float32(1e-45))
LARGE = [1e37, MAX, -MAX]
SMALL = [0.0, -0.0, TINY, -TINY, 1e-40, 1.1754944e-38]
SPECIAL = [*SMALL, 6e-8, 6.1e-5, 0.1, -0.1, 1.0, -1.0, 65504.0, 65520.0, *LARGE]


@pytest.fixture(scope="module", params=["numpy", "numba", "torch", "tensorflow"])
def backend(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip(request.param)
    return importlib.import_module(f"hvdcompress.ops.{request.param}")


def verbs(ops: Any) -> set[str]:
    """The public functions of a backend, its own and those it took over from the reference."""
    functions = inspect.getmembers(ops, inspect.isfunction)
    return {name for name, f in functions if name[0] != "_" and f.__module__.startswith("hvdcompress.")}


def is_torch(ops: Any) -> bool:
    return ops.__name__.endswith(".torch")


def is_tensorflow(ops: Any) -> bool:
    return ops.__name__.endswith(".tensorflow")


#: verbs that add or multiply: TensorFlow's kernels take denormal numbers for 0 then
CALCULATE = {
    "accumulate", "accumulate_moments", "add_all", "blend", "bucket_norms", "combine", "dequantize", "l2_norm",
    "magnitudes", "merge", "outer_sum", "quantize", "scaled", "subtract", "write",
}  # fmt: skip


def without_tiny(x: np.ndarray) -> np.ndarray:
    """What is so small that products of two are no normal numbers, as 0."""
    return np.where(np.abs(x) < 1e-18, np.float32(0), x).astype(np.float32)


def get(x: Any) -> Any:
    """A result as something to compare: dtype, shape and bytes of arrays."""
    if isinstance(x, tuple):
        return tuple(get(one) for one in x)
    if isinstance(x, (bool, int, float, bytes, str)) or x is None:
        return x
    array = np.asarray(x)
    return str(array.dtype).replace("uint16", "int16"), array.shape, array.tobytes()  # torch has the latter only


class Put:
    """Hands arrays to a backend, and checks afterwards that only those meant to be were changed."""

    def __init__(self, ops: Any):
        self.ops, self.kept = ops, []

    def __call__(self, array: np.ndarray, changes: bool = False) -> Any:
        if is_torch(self.ops):
            import torch

            handed = torch.from_numpy(array.view(np.int16 if array.dtype == np.uint16 else array.dtype).copy())
        elif is_tensorflow(self.ops):
            handed = self.ops.Buffer(array) if changes else self.ops.Buffer(array).value
        else:
            handed = array.copy()
        if not changes:
            self.kept.append((handed, array.copy()))
        return handed

    def check(self) -> None:
        for array, before in self.kept:
            assert get(array) == get(before), "an input was changed"


Call = Callable[[Any, Put, np.ndarray, np.ndarray], Any]
CALLS: dict[str, list[Call]] = {}


def call(verb: str) -> Callable[[Call], Call]:
    """Registers one way of calling a verb with two float32 vectors of equal length."""

    def register(function: Call) -> Call:
        CALLS.setdefault(verb, []).append(function)
        return function

    return register


def chosen(x: np.ndarray, every: int = 3) -> np.ndarray:
    return np.arange(0, x.size, every, dtype=np.int32)


def changed(ops: Any, put: Put, x: np.ndarray, function: Callable[[Any], Any]) -> Any:
    out = put(x, changes=True)
    function(out)
    return out


def bytes_at(start: int, x: np.ndarray) -> np.ndarray:
    """``start`` bytes, then whole 8-byte words."""
    return np.frombuffer(b"\1" * start + x[: x.size // 2 * 2].tobytes(), np.uint8)


def numbers(x: np.ndarray, width: int) -> np.ndarray:
    return (x.view(np.uint32) & ((1 << width) - 1)).astype(np.int64)


for scale in (1.0, 0.3, 2.0**-16):
    call("accumulate")(
        lambda o, put, x, r, s=scale: changed(o, put, 0 * r, lambda out: o.accumulate(put(x), put(r), s, out))
    )
    call("accumulate_moments")(
        lambda o, put, x, r, s=scale: changed(o, put, 0 * r, lambda out: o.accumulate_moments(put(x), put(r), s, out))
    )
    call("subtract")(lambda o, put, x, r, s=scale: changed(o, put, x, lambda out: o.subtract(out, put(r), s)))
    call("subtract")(
        lambda o, put, x, r, s=scale: changed(
            o, put, x, lambda out: o.subtract(out, Sparse(put(chosen(x)), put(r[chosen(x)])), s)
        )
    )
    call("write")(lambda o, put, x, r, s=scale: changed(o, put, x, lambda out: o.write(out, put(r), s)))
    call("write")(
        lambda o, put, x, r, s=scale: changed(
            o, put, np.ones(x.size, np.float64), lambda out: o.write(out, put(r.astype(np.float64)), s)
        )
    )
    call("to_fp16")(lambda o, put, x, r, s=scale: o.to_fp16(put(x), s))
    call("to_fp16")(lambda o, put, x, r, s=scale: o.to_fp16(put(x), s, 65504.0 * (1 - 2**-9) / 3))
    call("from_fp16")(lambda o, put, x, r, s=scale: o.from_fp16(put(x.astype(np.float16)), s))


call("zero_where")(lambda o, put, x, r: changed(o, put, x, lambda out: o.zero_where(out, put(r))))
call("zero_where")(
    lambda o, put, x, r: changed(o, put, x, lambda out: o.zero_where(out, Sparse(put(chosen(x)), put(r[chosen(x)]))))
)


@call("subtract")
def _(o, put, x, r):  # the padding of Gaussian-k: the last index again and again, with 0
    index = np.r_[chosen(x), [max(x.size - 1, 0)] * min(x.size, 3)].astype(np.int64)
    values = np.r_[r[chosen(x)], [0.0] * min(x.size, 3)].astype(np.float32)
    return changed(o, put, x, lambda out: o.subtract(out, Sparse(put(index), put(values)), 1.0))


@call("write")
def _(o, put, x, r):  # three ranks' shares, which overlap: sums in the order of ranks
    index = np.concatenate([chosen(x, 2), chosen(x, 3), chosen(x, 1)])
    values = np.concatenate([x[chosen(x, 2)], r[chosen(x, 3)], x[::-1]])
    return changed(o, put, x, lambda out: o.write(out, Sparse(put(index), put(values)), 1 / 3))


@call("write")
def _(o, put, x, r):  # distinct indices, 64 bits
    total = Sparse(put(chosen(x).astype(np.int64)), put(r[chosen(x)]))
    return changed(o, put, x, lambda out: o.write(out, total, 1.0))


for beta in (0.1, 1.0):
    call("blend")(lambda o, put, x, r, b=beta: changed(o, put, x, lambda out: o.blend(out, put(r), b)))
for share in (1, 2, 10, 100):
    call("top_k")(lambda o, put, x, r, d=share: o.top_k(put(x), -(-x.size // d)))
    call("chunk_argmax")(lambda o, put, x, r, c=share: o.chunk_argmax(put(x), c))
    call("chunk_positions")(
        lambda o, put, x, r, c=share: o.chunk_positions(put(reference.chunk_argmax(x, c)), c, x.size)
    )
for level in (0.0, TINY, 0.1, 1.0, MAX, np.inf):
    t = np.float32(level)
    call("count_above")(lambda o, put, x, r, t=t: o.count_above(put(x), t))
    for room in (1, 5, 10**6):
        call("first_above")(lambda o, put, x, r, t=t, c=room: o.first_above(put(x), t, c))
        call("first_equal")(lambda o, put, x, r, t=t, c=room: o.first_equal(put(x), t, c))
for width in (0, 1, 7, 8, 13, 31):
    call("pack_bits")(lambda o, put, x, r, w=width: o.pack_bits(put(numbers(x, w)), w))
    call("pack_bits")(lambda o, put, x, r, w=width: o.pack_bits(put(numbers(x, w).astype(np.int32)), w))
    call("unpack_bits")(
        lambda o, put, x, r, w=width: o.unpack_bits(put(reference.pack_bits(numbers(x, w), w)), w, x.size)
    )
for missing in (0, 1, 9):
    call("find_bits")(lambda o, put, x, r, m=missing: o.find_bits(put(x.view(np.uint8)), max(32 * x.size - m, 0)))
call("find_bits")(lambda o, put, x, r: o.find_bits(put(np.r_[x.view(np.uint8), np.uint8(255)]), 32 * x.size + 20))
call("set_bits")(lambda o, put, x, r: o.set_bits(put(chosen(x)), x.size))
call("set_bits")(lambda o, put, x, r: o.set_bits(put(chosen(x).astype(np.int64)), x.size + 5))
call("moments")(lambda o, put, x, r: None)  # in float64: test_moments
call("all_finite")(lambda o, put, x, r: o.all_finite(put(x)))
call("all_finite")(lambda o, put, x, r: o.all_finite(put(np.append(x, np.float32(np.inf)))))
call("all_finite")(lambda o, put, x, r: o.all_finite(put(np.append(x, np.float32(np.nan)))))
call("all_finite")(lambda o, put, x, r: o.all_finite(put(np.append(x.astype(np.float64), [np.inf, -np.inf]))))
call("all_finite")(lambda o, put, x, r: o.all_finite(put(np.full(3, 1e300))))
call("max_abs")(lambda o, put, x, r: o.max_abs(put(x)))
call("to_bf16")(lambda o, put, x, r: o.to_bf16(put(x)))
call("from_bf16")(lambda o, put, x, r: o.from_bf16(put(reference.to_bf16(x))))
call("add_all")(lambda o, put, x, r: o.add_all([put(x), put(r), put(x)]))
call("take")(lambda o, put, x, r: o.take(put(x), put(chosen(x))))
call("take")(lambda o, put, x, r: o.take(put(x), put(chosen(x).astype(np.int64))))
call("sort")(lambda o, put, x, r: o.sort(put(x.view(np.int32))))
call("fill")(lambda o, put, x, r: changed(o, put, x, lambda out: o.fill(out, float("nan"))))
call("zeros")(lambda o, put, x, r: tuple(o.zeros(x.size, d, like=put(x)) for d in ("float32", "uint16", "int64")))
call("asarray")(lambda o, put, x, r: o.asarray(np.frombuffer(x.tobytes(), np.uint8), like=put(r)))  # read-only
call("concat")(lambda o, put, x, r: o.concat([put(x), put(r)]))
call("concat")(lambda o, put, x, r: o.concat([put(reference.to_bf16(x)), o.zeros(3, "uint16", like=put(x))]))
call("to_bytes")(lambda o, put, x, r: o.to_bytes(put(x)))
call("to_bytes")(lambda o, put, x, r: o.to_bytes(o.to_bf16(put(x))))
for at in (0, 1, 2, 4):
    for dtype in ("float32", "float16", "uint16", "int32", "int64"):
        call("from_bytes")(lambda o, put, x, r, a=at, d=dtype: o.from_bytes(put(bytes_at(a, x))[a:], d))
call("head_bytes")(lambda o, put, x, r: o.head_bytes(put(x.view(np.uint8)), 24))
call("index_range")(lambda o, put, x, r: o.index_range(x.size, put(x)))
call("index_dtype")(lambda o, put, x, r: (o.index_dtype(x.size), o.index_dtype(2**31)))
call("all_below")(lambda o, put, x, r: (o.all_below(put(chosen(x)), x.size), o.all_below(put(chosen(x)), x.size // 2)))
call("all_below")(lambda o, put, x, r: o.all_below(put(np.array([3, -1], np.int64)), 5))
call("moments_of")(lambda o, put, x, r: o.moments_of(3.0, 5.0, 2))


def compare(ops: Any, x: np.ndarray, residual: np.ndarray, only: Collection[str] = ()) -> None:
    """All calls of all verbs (or ``only`` of some) on two vectors, under ``ops`` and under the reference."""
    with np.errstate(all="ignore"):  # Inf is a result like another here
        for verb in only or CALLS:
            a, b = x, residual
            if verb in CALCULATE and is_tensorflow(ops):
                a, b = without_tiny(x), without_tiny(residual)
            for number, function in enumerate(CALLS[verb]):
                put = Put(ops)
                expected, result = function(reference, Put(reference), a, b), function(ops, put, a, b)
                assert get(result) == get(expected), f"{verb}, call {number}: {result} instead of {expected}"
                put.check()


def test_backends_have_the_same_verbs(backend: Any) -> None:
    assert verbs(backend) == verbs(reference)
    if backend is not reference and hasattr(backend, "__all__"):
        assert verbs(backend) <= set(backend.__all__)


def test_every_verb_is_compared() -> None:
    for file in sorted(Path(__file__).parent.glob("test_ops_*.py")):  # where the rest of them are compared
        if file.stem != "test_ops_tensorflow":
            importlib.import_module(file.stem)
    assert CALLS.keys() == verbs(reference)


finite = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32, allow_nan=False, allow_infinity=False))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(pairs=st.lists(st.tuples(finite, finite), max_size=40))
def test_verbs_on_any_floats(backend: Any, pairs: list[tuple[float, float]]) -> None:
    x, residual = np.array(pairs, np.float32).reshape(-1, 2).T
    compare(backend, np.ascontiguousarray(x), np.ascontiguousarray(residual))


def vector(kind: str, n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, n])
    if kind == "constant":
        return np.full(n, 0.1, np.float32)
    if kind == "ties":
        return rng.integers(-2, 3, n).astype(np.float32)
    if kind == "special":
        return rng.choice(np.array(SPECIAL, np.float32), n)
    if kind == "heavy":
        return (rng.normal(size=n) ** 9).astype(np.float32)
    return rng.normal(size=n).astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "heavy", "constant", "ties", "special"])
@pytest.mark.parametrize("n", [0, 1, 2, 31, 1024, 4099])
def test_verbs_on_vectors(backend: Any, kind: str, n: int) -> None:
    compare(backend, vector(kind, n), vector(kind, n, seed=1))


@pytest.mark.parametrize("kind", ["normal", "heavy", "constant", "ties"])
def test_selection_where_a_sample_decides(backend: Any, kind: str) -> None:
    x = vector(kind, 300_007)  # large enough for the compiled top_k to look at a sample only
    sampled = np.arange(x.size) % 5 == 0
    too_low, too_high = np.where(sampled, 1e-3 * x, x), np.where(sampled, x, 1e-3 * x)
    for array in (x, too_low.astype(np.float32), too_high.astype(np.float32)):
        for k in (1, 30, 3_000, 200_000):
            assert get(backend.top_k(Put(backend)(array), k)) == get(reference.top_k(array, k))


def test_conversions_of_every_half(backend: Any) -> None:
    put, bits = Put(backend), np.arange(2**16, dtype=np.uint16)
    halves = bits.view(np.float16)[~np.isnan(bits.view(np.float16))]
    for scale in (1.0, 3.0, 0.25):
        assert get(backend.from_fp16(put(halves), scale)) == get(reference.from_fp16(halves, scale))
    damaged = np.float16([np.nan, 1.0])
    with np.errstate(invalid="ignore"):
        assert np.isnan(np.asarray(backend.from_fp16(put(damaged), 1.0))[0])
    assert get(backend.from_bf16(put(bits))) == get(reference.from_bf16(bits))
    # both sides of every rounding boundary, and the boundary itself
    exact = halves[np.isfinite(halves)].astype(np.float32)
    middle = (exact + np.roll(exact, 1)) / 2
    for x in (exact, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(MAX))):
        assert get(backend.to_fp16(put(x), 1.0)) == get(reference.to_fp16(x, 1.0))
        assert get(backend.to_bf16(put(x))) == get(reference.to_bf16(x))


@pytest.mark.parametrize("kind", ["normal", "heavy", "constant", "ties", "special"])
def test_moments(backend: Any, kind: str) -> None:
    for n in (0, 1, 2, 257, 65_537, 1_000_003):
        x = vector(kind, n)
        size = float(np.sqrt(np.square(x, dtype=np.float64).mean())) if n else 0.0
        mean, std = reference.moments(x)
        out = np.zeros_like(x)
        for found in (
            backend.moments(Put(backend)(x)),
            backend.accumulate_moments(Put(backend)(x), Put(backend)(0 * x), 1.0, Put(backend)(out, changes=True)),
        ):
            assert abs(found[0] - mean) <= 1e-12 * size
            assert abs(found[1] - std) <= 1e-12 * size
            if kind == "normal":  # the threshold of Gaussian-k is the same float
                start = [np.float32(select.gaussian_threshold(*m, 0.01)) for m in (found, (mean, std))]
                assert start[0] == start[1]


def test_equal_elements_deviate_by_nothing(backend: Any) -> None:
    for value in (0.1, -3e37, 1e-30):
        assert backend.moments(Put(backend)(np.full(1000, value, np.float32)))[1] == 0.0


def test_sums_of_many_ranks_are_added_in_rank_order(backend: Any) -> None:
    rng = np.random.default_rng(5)
    shares = [np.sort(rng.choice(200, 50, replace=False)) for _ in range(16)]
    index = np.concatenate([*shares, [0] * 40]).astype(np.int32)
    values = (rng.normal(size=index.size) * 10.0 ** rng.integers(-8, 8, index.size)).astype(np.float32)
    values[-40:] = 0
    put, expected = Put(backend), np.zeros(200, np.float32)
    reference.write(expected, Sparse(index, values), 0.7)
    out = put(expected * 0 + 1, changes=True)
    backend.write(out, Sparse(put(index), put(values)), 0.7)
    assert get(out) == get(expected)


def test_no_index_is_added_to_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA ``index_add_`` takes duplicates in any order (on a CPU in theirs, so sums would not show it)."""
    torch, ops = pytest.importorskip("torch"), importlib.import_module("hvdcompress.ops.torch")
    calls, add = [], torch.Tensor.index_add_

    def watch(out: Any, dim: int, index: Any, values: Any) -> Any:
        calls.append(np.bincount(np.asarray(index)[np.asarray(values) != 0]).max(initial=0))
        return add(out, dim, index, values)

    monkeypatch.setattr(torch.Tensor, "index_add_", watch)
    index = torch.tensor([0, 2, 5, 5, 5, 2, 5, 7, 0, 1, 2, 2])
    values = torch.tensor([1.0, 2, 3, 0, 0, 4, 5, 6, 7, 8, 9, 0])
    ops.write(torch.ones(8), Sparse(index, values), 1.0)
    assert calls == [1, 1, 1]  # the third for index 2, which three ranks sent


def test_unusual_memory_goes_to_the_reference() -> None:
    numba_ops = pytest.importorskip("hvdcompress.ops.numba")
    x = vector("normal", 2000)
    frozen = x.copy()
    frozen.flags.writeable = False
    unaligned = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32)
    for unusual in (frozen, x[::2], x.astype(np.float64), unaligned):
        for verb, arguments in (("top_k", (20,)), ("chunk_argmax", (7,)), ("count_above", (0.5,)), ("max_abs", ())):
            found = getattr(numba_ops, verb)(unusual, *arguments)
            assert get(found) == get(getattr(reference, verb)(unusual, *arguments)), verb


def test_lengths_that_differ_are_an_error() -> None:
    numba_ops = pytest.importorskip("hvdcompress.ops.numba")
    x, short, index = (np.zeros(n, np.float32) for n in (100, 50, 60))
    for call_it in (
        lambda: numba_ops.subtract(x, short, 0.5),
        lambda: numba_ops.subtract(x, Sparse(index.astype(np.int32), short), 0.5),
        lambda: numba_ops.write(x, Sparse(index.astype(np.int32), short), 0.5),
        lambda: numba_ops.accumulate(x, short, 0.5, x),
        lambda: numba_ops.accumulate_moments(x, x, 0.5, short),
        lambda: numba_ops.blend(x, short, 0.5),
    ):
        with pytest.raises((ValueError, IndexError)):
            call_it()


@pytest.mark.parametrize("bad", [-1, 100, 2**31 - 1, -(2**31)])
def test_compiled_code_never_writes_out_of_bounds(bad: int) -> None:
    numba_ops = pytest.importorskip("hvdcompress.ops.numba")
    damaged = Sparse(np.array([3, bad], np.int32), np.ones(2, np.float32))
    with pytest.raises(IndexError):
        numba_ops.write(np.zeros(100, np.float32), damaged, 1.0)
    with pytest.raises(IndexError):
        numba_ops.subtract(np.zeros(100, np.float32), damaged, 1.0)
    with pytest.raises(IndexError):
        numba_ops.set_bits(damaged.index, 100)


def test_indices_above_2_to_the_24(backend: Any) -> None:
    n = 2**24 + 3  # float32 cannot tell 2^24 and 2^24 + 1 apart
    put, x = Put(backend), np.zeros(n, np.float32)
    places = np.array([5, 2**24 - 1, 2**24 + 1, 2**24 + 2], np.int32)
    x[places] = [1, -2, 3, -4]
    there = put(x, changes=True)
    index = backend.top_k(there, 4)
    assert get(index) == get(backend.first_above(there, np.float32(0), 9)) == get(places)
    packed = pack.encode_index(index, "elias_fano", n, backend)
    assert get(packed) == get(pack.encode_index(places, "elias_fano", n, reference))
    index = pack.decode_index(packed, "elias_fano", 4, n, backend)
    backend.subtract(there, Sparse(index, backend.take(there, index)), 1.0)
    assert backend.max_abs(there) == 0.0
    backend.write(there, Sparse(index, put(x[places])), 1.0)
    offset = backend.chunk_argmax(there, 1 << 20)
    assert np.asarray(backend.chunk_positions(offset, 1 << 20, n))[[0, -2, -1]].tolist() == [5, 2**24 - 1, 2**24 + 2]


def test_torch_waits_for_the_device_in_one_place_only() -> None:
    source = (Path(hvdcompress.__file__).parent / "ops" / "torch.py").read_text(encoding="utf-8")
    assert re.findall(r"\.(?:cpu|numpy|item|tolist)\(", source) == [".tolist("]
    assert re.search(r"def _host\(x: Array\) -> Any:\n.*\n    return x.tolist\(\)", source)


def test_tensorflow_waits_for_the_device_in_one_place_only() -> None:
    """And what a verb asks of a tensor's numbers without saying so, test_ops_tensorflow.py finds."""
    files = []
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    assert re.findall(r"\.(?:cpu|numpy|_numpy|item|tolist)\(", source) == [".numpy(", ".tolist("]
    assert re.search(r"def host\(x: Array\) -> Any:\n.*\n    return x.numpy\(\).tolist\(\)", source)


def test_fast_is_the_compiled_backend() -> None:
    numba_ops = pytest.importorskip("hvdcompress.ops.numba")
    from hvdcompress.ops import fast

    assert fast is numba_ops
    with pytest.raises(AttributeError):
        hvdcompress.ops.slow  # noqa: B018
