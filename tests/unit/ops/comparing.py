"""What the tests of the array ops share: data, arrays of every backend, and the registry of calls to compare."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hvdcompress.ops import numpy as reference
from hvdcompress.ops.shared import mix
from hvdcompress.ops.spec import Ops

BACKENDS = ("numpy", "numba", "torch", "triton")
#: modules of ops/triton that launch kernels
LAUNCHING = ("arithmetic", "bits", "codes", "floats", "levels", "matrices", "selection", "statistics")

MAX = float(np.finfo(np.float32).max)
TINY = float(np.float32(1e-45))
LARGE = [1e37, MAX, -MAX]
SMALL = [0.0, -0.0, TINY, -TINY, 1e-40, 1.1754944e-38]
SPECIAL = [*SMALL, 6e-8, 6.1e-5, 0.1, -0.1, 1.0, -1.0, 65504.0, 65520.0, *LARGE]

finite = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32, allow_nan=False, allow_infinity=False))


def op_names() -> set[str]:
    """The names of the array ops."""
    return {name for name, op in vars(Ops).items() if inspect.isfunction(op) and name[0] != "_"}


def key(number: int) -> np.ndarray:
    """The key [1] uint32 of a random stream."""
    return mix(np.array([number], np.uint32))


def device_of(ops: Any) -> str | None:
    """Where a backend's tensors lie: on a GPU if Triton is not to interpret; None if it takes numpy arrays."""
    if not ops.__name__.endswith((".torch", ".triton")):
        return None
    return "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"


def host(x: Any) -> np.ndarray:
    """A result of any backend as a numpy array."""
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)


def get(x: Any) -> Any:
    """A result as something to compare: dtype, shape and bytes of arrays."""
    if isinstance(x, tuple):
        return tuple(get(one) for one in x)
    if isinstance(x, (bool, int, float, bytes, str)) or x is None:
        return x
    array = host(x)
    return str(array.dtype).replace("uint16", "int16"), array.shape, array.tobytes()  # torch has the latter only


class Put:
    """Hands arrays to a backend, and checks afterwards that only those meant to be were changed."""

    def __init__(self, ops: Any):
        self.ops, self.kept = ops, []

    def __call__(self, array: np.ndarray, changes: bool = False) -> Any:
        if device := device_of(self.ops):
            import torch

            same = array.view(np.int16 if array.dtype == np.uint16 else array.dtype).copy()
            handed = torch.from_numpy(same).to(device)
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


def call(op: str) -> Callable[[Call], Call]:
    """Registers one way of calling an op with two float32 vectors of equal length."""

    def register(function: Call) -> Call:
        CALLS.setdefault(op, []).append(function)
        return function

    return register


def chosen(x: np.ndarray, every: int = 3) -> np.ndarray:
    return np.arange(0, x.size, every, dtype=np.int32)


def changed(ops: Any, put: Put, x: np.ndarray, function: Callable[[Any], Any]) -> Any:
    out = put(x, changes=True)
    function(out)
    return out


def numbers(x: np.ndarray, width: int) -> np.ndarray:
    return (x.view(np.uint32) & ((1 << width) - 1)).astype(np.int64)


def compare(ops: Any, x: np.ndarray, residual: np.ndarray) -> None:
    """All calls of all ops on two vectors, under ``ops`` and under the reference."""
    differ = []
    with np.errstate(all="ignore"):  # Inf is a result like another here
        for op, functions in CALLS.items():
            for number, function in enumerate(functions):
                put = Put(ops)
                expected, result = function(reference, Put(reference), x, residual), function(ops, put, x, residual)
                if get(result) != get(expected):
                    differ.append(f"{op}, call {number}: {result} instead of {expected}")
                put.check()
    assert not differ, "\n".join(differ)


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
