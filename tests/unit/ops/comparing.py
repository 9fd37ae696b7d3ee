"""Compare the array ops of a backend with the numpy reference, to the byte."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from hvdcompress.ops.numpy import ops as reference
from hvdcompress.ops.spec import Ops
from tests.unit.ops.calls import CALLS
from tests.unit.ops.inputs import vector

__all__ = ["BACKENDS", "LAUNCHING", "Put", "compare", "device_of", "get", "host", "op_names", "own_ops", "vector"]

BACKENDS = ("numpy", "numba", "torch", "triton")
#: modules of ops/triton that launch kernels
LAUNCHING = ("arithmetic", "codes", "floats", "matrices", "selection", "statistics")


def op_names() -> set[str]:
    """Return the names of the array ops."""
    return {name for name, op in vars(Ops).items() if inspect.isfunction(op) and name[0] != "_"}


def own_ops(backend: str) -> list[str]:
    """Return the ops that a backend does not inherit from numpy's; all ops of the other libraries."""
    with suppress(ImportError):
        ops = importlib.import_module(f"hvdcompress.ops.{backend}").ops
        return sorted(
            op
            for op in op_names()
            if getattr(type(ops), op) is not getattr(type(reference), op, None) or backend != "numba"
        )
    return []


def device_of(ops: Any) -> str | None:
    """Return the device of a backend's tensors: "cuda" unless Triton interprets; None for numpy arrays."""
    if type(ops).__name__ not in ("TorchOps", "TritonOps"):
        return None
    return "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"


def host(x: Any) -> np.ndarray:
    """Return a result of any backend as a numpy array."""
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)


def get(x: Any) -> Any:
    """Return a result in a form that == compares: dtype, shape and bytes of arrays."""
    if isinstance(x, tuple):
        return tuple(get(each) for each in x)
    if isinstance(x, (bool, int, float, bytes, str)) or x is None:
        return x
    array = host(x)
    return str(array.dtype), array.shape, array.tobytes()


class Put:
    """Copies arrays to a backend. ``check`` fails if an op changed an array that it should not change."""

    def __init__(self, ops: Any):
        self.ops = ops
        self.kept: list[tuple[Any, np.ndarray]] = []

    def __call__(self, array: np.ndarray, changes: bool = False) -> Any:
        if device := device_of(self.ops):
            import torch

            handed = torch.from_numpy(array.copy()).to(device)
        else:
            handed = array.copy()
        if not changes:
            self.kept.append((handed, array.copy()))
        return handed

    def check(self) -> None:
        for array, before in self.kept:
            assert get(array) == get(before), "an input was changed"


def compare(ops: Any, x: np.ndarray, residual: np.ndarray, names: Iterable[str] = CALLS) -> None:
    """Make the calls of the named ops (by default, of all ops) on two vectors, and compare with the reference."""
    differ = []
    with np.errstate(all="ignore"):  # overflow to Inf is a result like any other
        for op in names:
            for number, call in enumerate(CALLS[op]):
                put, put_reference = Put(ops), Put(reference)
                expected, result = call(reference, put_reference, x, residual), call(ops, put, x, residual)
                if get(result) != get(expected):
                    differ.append(f"{op}, call {number} ({call}), {x.size} elements: {result} instead of {expected}")
                put.check()
                put_reference.check()
    assert not differ, "\n".join(differ)
