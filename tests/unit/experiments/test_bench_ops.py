"""``lab/bench/ops.py`` on a device: what is timed there is the same work for both backends."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from experiments.bench import ops as bench
from hvdcompress.ops.scan import Found

torch = pytest.importorskip("torch")


def on_cpu(array: np.ndarray) -> Any:
    return torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)


def as_bytes(result: Any) -> Any:
    """What is equal to the bit: not moments, which are sums in another order, nor the type of a count."""
    if isinstance(result, Found):
        result = tuple(result._replace(moments=None, saturated=None))
    if isinstance(result, tuple | list):
        return [as_bytes(one) for one in result]
    return np.asarray(result).tobytes() if isinstance(result, torch.Tensor | np.ndarray) else result


def test_both_backends_do_the_same_work() -> None:
    pytest.importorskip("triton")
    general, fused = (importlib.import_module(f"hvdcompress.ops.{name}") for name in ("torch", "triton"))
    pairs = zip(*(bench.cases_on_device(1500, on_cpu) for _ in range(2)), strict=True)
    for mine, its in pairs:  # each on arrays of its own: some calls change them
        results = mine.call(general), its.call(fused)
        if mine.op not in ("moments", "to_fp16"):
            assert as_bytes(results[0]) == as_bytes(results[1]), mine.op
    fast = {case.op for case in bench.cases_on_device(1500, on_cpu)}
    compiled = {op for op in fused.__all__ if getattr(fused, op) is not getattr(general, op)}
    assert compiled <= fast
