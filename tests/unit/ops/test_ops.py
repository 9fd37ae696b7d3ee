"""Every backend's ops are those of the spec, and give the reference's results to the bit."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdcompress
from hvdcompress.ops import numpy as reference
from hvdcompress.ops.scan import Scan
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Sparse
from hvdcompress.parts import pack
from tests.unit.ops.comparing import BACKENDS, CALLS, Put, compare, finite, get, host, op_names, vector

FOLDER = Path(hvdcompress.__file__).parent / "ops"
SUBJECTS = sorted(Path(__file__).parent.glob("test_ops_*.py"))
for file in SUBJECTS:  # they register the calls that are compared here
    importlib.import_module(f"tests.unit.ops.{file.stem}")


# -- the spec -----------------------------------------------------------------------------------------------------


def test_backends_are_those_in_the_folder() -> None:
    assert {path.parent.name for path in FOLDER.glob("*/__init__.py")} == set(BACKENDS)


def test_backends_have_the_ops_of_the_spec_and_no_others(backend: Any) -> None:
    assert list(backend.__all__) == sorted(op_names())
    functions = {name for name, f in inspect.getmembers(backend, inspect.isfunction) if name[0] != "_"}
    assert functions == op_names()


def test_ops_take_the_arguments_of_the_spec(backend: Any) -> None:
    """mypy checks their number and types, in ``ops/__init__.py``, but neither names nor defaults."""

    def arguments(function: Any) -> list[Any]:
        return [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]

    for op in op_names():
        assert arguments(getattr(backend, op)) == arguments(getattr(Ops, op))[1:], op


def test_ops_are_documented_in_the_spec_and_there_only(backend: Any) -> None:
    for op in op_names():
        told = inspect.getdoc(getattr(Ops, op)) or ""
        assert re.match(r"[A-Z].*\.", told), f"Ops.{op} has no sentence that says what it does"
        assert len((getattr(backend, op).__doc__ or "").splitlines()) <= 1, f"{op} is documented in ops/spec.py"


def test_ops_import_nothing_of_the_package_but_ops() -> None:
    for path in FOLDER.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0 and "*" not in [a.name for a in node.names], path
                names = [node.module or ""]
            for name in names:
                assert not name.startswith("hvdcompress") or name.startswith("hvdcompress.ops"), (
                    f"{path} imports {name}"
                )


def test_backends_do_not_import_each_other() -> None:
    """But for those that numba and triton fall back to."""
    for backend, others in (
        ("numpy", "numba|torch|triton"),
        ("numba", "torch|triton"),
        ("torch", "numpy|numba|triton"),
        ("triton", "numpy|numba"),
    ):
        for path in (FOLDER / backend).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            assert not re.search(rf"from hvdcompress\.ops(\.| import )({others})\b", source), path


# -- the reference's results --------------------------------------------------------------------------------------


def test_every_op_is_compared() -> None:
    assert CALLS.keys() == op_names()


@settings(max_examples=8)
@given(pairs=st.lists(st.tuples(finite, finite), max_size=40))
def test_ops_on_any_floats(native: Any, pairs: list[tuple[float, float]]) -> None:
    x, residual = np.array(pairs, np.float32).reshape(-1, 2).T
    compare(native, np.ascontiguousarray(x), np.ascontiguousarray(residual))


KINDS = ("normal", "heavy", "constant", "ties", "special")
#: kinds that say more of a length than others; of few elements, most kinds are alike
TELLING = {0: ("normal",), 1: ("normal", "special"), 2: ("ties", "special"), 1024: ("normal", "ties", "special")}


@pytest.mark.parametrize(
    "kind,n",
    [
        pytest.param(kind, n, marks=[] if kind in TELLING.get(n, KINDS) else [pytest.mark.slow])
        for n in (0, 1, 2, 31, 1024, 4099)
        for kind in KINDS
    ],
)
def test_ops_on_vectors(native: Any, kind: str, n: int) -> None:
    compare(native, vector(kind, n), vector(kind, n, seed=1))


@pytest.mark.parametrize("kind,n", [("heavy", 1), ("special", 515), pytest.param("ties", 2100, marks=pytest.mark.slow)])
def test_triton_ops_on_vectors(kind: str, n: int) -> None:
    """Of one program and of several, of equal magnitudes in several."""
    pytest.importorskip("triton")
    triton_ops = importlib.import_module("hvdcompress.ops.triton")
    compare(triton_ops, vector(kind, n), vector(kind, n, seed=1))


def test_indices_above_2_to_the_24(native: Any) -> None:
    n = 2**24 + 3  # float32 cannot tell 2^24 and 2^24 + 1 apart
    put, x = Put(native), np.zeros(n, np.float32)
    places = np.array([5, 2**24 - 1, 2**24 + 1, 2**24 + 2], np.int32)
    x[places] = [1, -2, 3, -4]
    there = put(x, changes=True)
    index = native.top_k(there, 4)
    assert get(index) == get(native.first_above(there, np.float32(0), 9)) == get(places)
    packed = pack.encode_index(index, "elias_fano", n, native)
    assert get(packed) == get(pack.encode_index(places, "elias_fano", n, reference))
    index = pack.decode_index(packed, "elias_fano", 4, n, native)
    native.subtract(there, Sparse(index, native.take(there, index)), 1.0)
    assert native.max_abs(there) == 0.0
    native.write(there, Sparse(index, put(x[places])), 1.0)
    offset = native.chunk_argmax(there, 1 << 20)
    assert host(native.chunk_positions(offset, 1 << 20, (n,)))[[0, -2, -1]].tolist() == [5, 2**24 - 1, 2**24 + 2]


# -- backends -----------------------------------------------------------------------------------------------------


def test_unusual_memory_goes_to_the_reference() -> None:
    numba_ops = pytest.importorskip("hvdcompress.ops.numba")
    x = vector("normal", 2000)
    frozen = x.copy()
    frozen.flags.writeable = False
    unaligned = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32)
    for unusual in (frozen, x[::2], x.astype(np.float64), unaligned):
        for op, arguments in (("top_k", (20,)), ("chunk_argmax", (7,)), ("count_above", (0.5,)), ("max_abs", ())):
            found = getattr(numba_ops, op)(unusual, *arguments)
            assert get(found) == get(getattr(reference, op)(unusual, *arguments)), op


def test_lengths_that_differ_are_an_error() -> None:
    numba_ops = pytest.importorskip("hvdcompress.ops.numba")
    x, short, index = (np.zeros(n, np.float32) for n in (100, 50, 60))
    for call_it in (
        lambda: numba_ops.subtract(x, short, 0.5),
        lambda: numba_ops.subtract(x, Sparse(index.astype(np.int32), short), 0.5),
        lambda: numba_ops.write(x, Sparse(index.astype(np.int32), short), 0.5),
        lambda: numba_ops.accumulate(x, short, 0.5, x),
        lambda: numba_ops.accumulate(x, x, 0.5, short, Scan(moments=True)),
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
    for index in (damaged.index, damaged.index.astype(np.int64)):
        with pytest.raises(IndexError):
            numba_ops.take(np.zeros(100, np.float32), index)
    with pytest.raises(IndexError):
        numba_ops.set_bits(damaged.index, 100)


def test_torch_waits_for_the_device_in_one_place_only() -> None:
    files = sorted(path for name in ("torch", "triton") for path in (FOLDER / name).glob("*.py"))
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    assert re.findall(r"\.(?:cpu|numpy|item|tolist)\(", source) == [".tolist("]
    assert re.search(r"def host\(x: Array\) -> Any:\n.*\n    return x.tolist\(\)", source)


def test_fast_is_the_compiled_backend() -> None:
    numba_ops = pytest.importorskip("hvdcompress.ops.numba")
    from hvdcompress.ops import fast

    assert fast is numba_ops
    with pytest.raises(AttributeError):
        hvdcompress.ops.slow  # noqa: B018
