"""Every backend has the ops of the spec, and returns the reference's results to the byte."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress.ops.numpy import ops as reference
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Codes, Fields, Sparse, quantized_levels, signs_of
from hvdcompress.parts import pack
from tests.unit.ops.calls import CALLS, TO_ROUNDING
from tests.unit.ops.comparing import Put, compare, get, host, op_names, own_ops
from tests.unit.ops.inputs import key, vector

FOLDER = Path(hvdcompress.__file__).parent / "ops"

# -- the spec -----------------------------------------------------------------------------------------------------


def test_backends_take_the_arguments_of_the_spec(backend: Any) -> None:
    """mypy checks the number and types of the arguments, but not the defaults."""

    def arguments(function: Any) -> list[Any]:
        return [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]

    for op in op_names():
        assert arguments(getattr(type(backend), op)) == arguments(getattr(Ops, op)), op


# -- the reference's results --------------------------------------------------------------------------------------


def test_every_op_is_compared_with_the_reference() -> None:
    assert op_names() == CALLS.keys() | TO_ROUNDING


#: kind and length: empty, one element, an odd length, one block of 512 and a little more, several blocks with ties
VECTORS = [("normal", 0), ("special", 1), ("ties", 31), ("special", 515), ("heavy", 4099)]
KINDS = ("normal", "heavy", "constant", "ties", "special")
ALL_VECTORS = [(kind, n) for n in (0, 1, 2, 31, 1024, 4099) for kind in KINDS]


@pytest.mark.parametrize("vectors", [VECTORS, pytest.param(ALL_VECTORS, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize(
    "name,op", [(name, op) for name in ("numba", "torch") for op in own_ops(name) if op not in TO_ROUNDING]
)
def test_results_equal_the_references(name: str, op: str, vectors: list[tuple[str, int]]) -> None:
    ops = importlib.import_module(f"hvdcompress.ops.{name}").ops
    for kind, n in vectors:
        compare(ops, vector(kind, n), vector(kind, n, seed=1), [op])


@pytest.mark.parametrize("kind,n", [("special", 515), pytest.param("ties", 2100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", [op for op in own_ops("triton") if op not in TO_ROUNDING])
def test_results_under_triton_equal_the_references(op: str, kind: str, n: int) -> None:
    """Vectors of 2100 elements need several programs of a kernel."""
    compare(importlib.import_module("hvdcompress.ops.triton").ops, vector(kind, n), vector(kind, n, seed=1), [op])


#: float32 cannot tell 2^24 and 2^24 + 1 apart
PLACES = np.array([5, 2**24 - 1, 2**24 + 1, 2**24 + 2], np.int32)


@pytest.fixture(scope="module")
def long_vector() -> np.ndarray:
    """A vector of more than 2^24 elements, all zero but four."""
    x = np.zeros(2**24 + 3, np.float32)
    x[PLACES] = [1, -2, 3, -4]
    return x


def test_indices_above_2_to_the_24(native: Any, long_vector: np.ndarray) -> None:
    put, n = Put(native), long_vector.size
    x = put(long_vector, changes=True)
    index = native.top_k(x, 4)
    assert get(index) == get(native.first_above(x, np.float32(0), 9)) == get(PLACES)
    packed = pack.encode_index(index, "elias_fano", n, native)
    assert get(packed) == get(pack.encode_index(PLACES, "elias_fano", n, reference))
    index = pack.decode_index(packed, "elias_fano", 4, n, native)
    native.subtract(x, Sparse(index, native.take(x, index)), 1.0)
    assert native.max_abs(x) == 0.0
    native.write(x, Sparse(index, put(long_vector[PLACES])), 1.0)
    offset = native.chunk_argmax(x, 1 << 20)
    assert host(native.chunk_positions(offset, 1 << 20, (n,)))[[0, -2, -1]].tolist() == [5, 2**24 - 1, 2**24 + 2]


def test_codes_of_elements_above_2_to_the_24(native: Any, long_vector: np.ndarray) -> None:
    put, n = Put(native), long_vector.size
    x, one = put(np.sign(long_vector)), put(np.ones(1, np.float32))
    quantized = native.dense(Codes(native.quantize(x, one, n, 2, key(5)), one, n, quantized_levels(2), 2, 0, n))
    added = native.dense(Fields(native.quantize_fields(x, 1.0, one, 3, key(5)), 3, 1, one, 0, n))
    assert get(quantized) == get(added) == get(np.sign(long_vector))
    signs = host(native.dense(signs_of(native.pack_signs(x), one, n)))
    assert np.flatnonzero(signs < 0).tolist() == [2**24 - 1, 2**24 + 2]


@pytest.mark.parametrize("op", [op for op in own_ops("numba") if op not in TO_ROUNDING])
def test_kernels_take_ordinary_arrays(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results would be the same if the condition for a kernel never held, and steps slower."""
    of = next(each for each in type(reference).__mro__ if op in vars(each))
    whole, used = vars(of)[op], []

    def recorded(*args: Any, **options: Any) -> Any:
        used.append(op)
        return whole(*args, **options)

    monkeypatch.setattr(of, op, recorded)
    ops, x = importlib.import_module("hvdcompress.ops.numba").ops, vector("normal", 4099)
    left_to_reference = []
    for call in CALLS[op]:
        call(ops, Put(ops), x, vector("normal", 4099, seed=1))
        left_to_reference.append(bool(used))
        used.clear()
    assert not all(left_to_reference)


# -- inputs that kernels do not take ------------------------------------------------------------------------------


def test_numba_passes_unusual_memory_to_the_reference() -> None:
    numba_ops = pytest.importorskip("hvdcompress.ops.numba").ops
    x = vector("normal", 2000)
    frozen = x.copy()
    frozen.flags.writeable = False
    unaligned = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32)
    calls: dict[str, tuple[Any, ...]] = {
        "top_k": (20,), "chunk_argmax": (7,), "count_above": (0.5,), "max_abs": (), "bucket_norms": (100, "max"),
        "quantize": (np.full(20, 4, np.float32), 100, 4, key(5)),
    }  # fmt: skip
    for unusual in (frozen, x[::2], unaligned):
        for op, arguments in calls.items():
            found = getattr(numba_ops, op)(unusual, *arguments)
            assert get(found) == get(getattr(reference, op)(unusual, *arguments)), op


def test_lengths_that_differ_are_an_error() -> None:
    numba_ops = pytest.importorskip("hvdcompress.ops.numba").ops
    x, short, index = np.zeros(100, np.float32), np.zeros(50, np.float32), np.zeros(60, np.int32)
    for op, *arguments in (
        ("subtract", x, short, 0.5),
        ("subtract", x, Sparse(index, short), 0.5),
        ("write", x, Sparse(index, short), 0.5),
        ("accumulate", x, short, 0.5, x),
        ("accumulate", x, x, 0.5, short),
        ("blend", x, short, 0.5),
    ):
        with pytest.raises((ValueError, IndexError)):
            getattr(numba_ops, op)(*arguments)


@pytest.mark.parametrize("bad", [-1, 100, 2**31 - 1, -(2**31)])
def test_compiled_code_never_writes_out_of_bounds(bad: int) -> None:
    numba_ops = pytest.importorskip("hvdcompress.ops.numba").ops
    x, damaged = np.zeros(100, np.float32), Sparse(np.array([3, bad], np.int32), np.ones(2, np.float32))
    for op, *arguments in (
        ("write", x, damaged, 1.0),
        ("subtract", x, damaged, 1.0),
        ("take", x, damaged.index),
        ("take", x, damaged.index.astype(np.int64)),
        ("set_bits", damaged.index, 100),
    ):
        with pytest.raises(IndexError):
            getattr(numba_ops, op)(*arguments)


def test_fast_is_the_compiled_backend() -> None:
    assert hvdcompress.ops.fast is pytest.importorskip("hvdcompress.ops.numba").ops
