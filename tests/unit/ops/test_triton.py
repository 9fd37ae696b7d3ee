"""The Triton backend: the instructions of its kernels, the inputs that they do not take, and the fallback to torch."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

import hvdcompress
from hvdcompress.ops.numpy import ops as reference
from hvdcompress.ops.scan import Scan
from hvdcompress.ops.torch import ops as general
from hvdcompress.ops.vectors import Sparse
from tests.unit.ops.calls import CALLS
from tests.unit.ops.comparing import LAUNCHING, Put, device_of, get, host, own_ops
from tests.unit.ops.inputs import key, vector

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
triton_ops = importlib.import_module("hvdcompress.ops.triton").ops
launching = importlib.import_module("hvdcompress.ops.triton._kernels.launching")

ROOT = Path(hvdcompress.__file__).parents[1]
DEVICE = device_of(triton_ops)


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).to(DEVICE)


# -- the instructions of kernels --------------------------------------------------------------------------------

TYPES = {"float32": "*fp32", "float64": "*fp64", "float16": "*fp16"}
TYPES |= {"int16": "*i16", "int32": "*i32", "int64": "*i64", "uint8": "*u8"}

#: Reads launches from its input, and compiles each for a GPU of compute capability 9.0; no GPU is needed for that.
COMPILING = """
import importlib, json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for module, name, signature, constants in json.load(sys.stdin):
    kernel = getattr(importlib.import_module(module), name)
    types = dict(zip(kernel.arg_names, signature)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, types, constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    words = set(re.findall(r"^\\t(?:@%p\\d+ )?([a-z][a-z0-9_.]*)", made.asm["ptx"], re.M))
    print(json.dumps([name, sorted(words)]))
"""


def type_of(argument: Any) -> str:
    if hasattr(argument, "dtype"):
        return TYPES[str(argument.dtype).removeprefix("torch.")]
    return "fp32" if isinstance(argument, float) else "i32"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Call all ops. Return a launch of each kernel with each combination of dtypes and flags."""
    found: dict[Any, Any] = {}
    launch = launching.launch

    def note(kernel: Any, programs: int, like: Any, *arguments: Any, **constants: Any) -> None:
        signature = [type_of(argument) for argument in arguments]
        flags = [(name, value) for name, value in constants.items() if isinstance(value, bool)]
        module, name = kernel.fn.__module__, kernel.fn.__name__
        found[name, str(signature), str(flags)] = (module, name, signature, constants)
        launch(kernel, programs, like, *arguments, **constants)

    for subject in LAUNCHING:
        monkeypatch.setattr(f"hvdcompress.ops.triton.{subject}.launch", note)
    x = vector("normal", 9)
    with np.errstate(all="ignore"):
        for call in (call for op in own_ops("triton") for call in CALLS.get(op, [])):
            call(triton_ops, Put(triton_ops), x, x[::-1].copy())
    for rounding_key in (None, key(5)):
        triton_ops.orthonormalise(tensor(x), 3, rounding_key)
    return found


@pytest.mark.parametrize("complete", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kernels_compile_to_plain_ieee_arithmetic(launches: dict[Any, Any], complete: bool) -> None:
    """No fused or approximate instruction, none that reads denormals as zeros, and no atomic one.

    Compiles one launch of each kernel, or all launches if ``complete``. Triton caches kernels by source and options.
    """
    wanted = list((launches if complete else {name: launches[name, *rest] for name, *rest in launches}).values())
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, "-c", COMPILING]
    out = subprocess.check_output(command, input=json.dumps(wanted), text=True, timeout=200, env=environment)
    compiled = [json.loads(line) for line in out.splitlines()]
    assert len(compiled) == len(wanted)
    for name, instructions in compiled:
        for instruction in instructions:
            parts = set(instruction.split("."))
            assert not parts & {"fma", "mad24", "ftz", "approx", "full", "atom", "red"}, f"{name}: {instruction}"
            assert "mad" not in parts or not parts & {"f32", "f64"}, f"{name}: {instruction}"
    assert {"mul.rn.f32", "add.rn.f32"} <= set(dict(compiled)["accumulate"])  # the test reads the right words
    assert "div.rn.f32" in dict(compiled)["quantize"]
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "hvdcompress/ops/triton").glob("*.py"))
    assert dict(compiled).keys() == set(re.findall(r"(?<!_)kernels\.(\w+)", sources))


def test_every_launch_forbids_fusion() -> None:
    kernel = MagicMock()
    launching.launch(kernel, 3, torch.ones(1), 7, BLOCK=8)
    kernel.__getitem__.assert_called_once_with((3,))
    kernel[3,].assert_called_once_with(7, BLOCK=8, enable_fp_fusion=False)
    sources = (ROOT / "hvdcompress/ops/triton").rglob("*.py")
    assert sum(path.read_text(encoding="utf-8").count("kernel[") for path in sources) == 1  # nothing else launches


# -- unusual inputs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2], ids=["empty", "strided"])
def test_unusual_memory_goes_to_torch(step: int) -> None:
    x = tensor(vector("normal", 200 * (step - 1)))[::step]
    calls: dict[str, tuple[Any, ...]] = {
        "top_k": (20,), "count_above": (0.5,), "first_above": (0.5, 9),
        "quantize": (tensor(np.full(1, 4, np.float32)), 1000, 4, key(5)),
    }  # fmt: skip
    for op, arguments in calls.items():
        assert get(getattr(triton_ops, op)(x, *arguments)) == get(getattr(general, op)(x, *arguments)), op
    out = torch.zeros(2 * len(x), device=DEVICE)[::2]
    triton_ops.accumulate(x, x, 0.5, out)
    triton_ops.write(out, out.clone(), 2.0)
    assert get(out) == get(host(x) * np.float32(3))


@pytest.mark.parametrize("chunk", [4096, 4097])
def test_chunks_larger_than_a_program(chunk: int) -> None:
    x, out = vector("ties", 9000), torch.zeros(9000, device=DEVICE)
    expected = get(reference.chunk_argmax(x, chunk))
    found = triton_ops.accumulate(tensor(x), torch.zeros_like(out), 1.0, out, Scan(chunk=chunk))
    assert found.finite and get(found.offsets) == expected and get(out) == get(x)


@pytest.mark.parametrize("bad", [-1, 100, 2**31 - 1, -(2**31)])
def test_kernels_never_write_out_of_bounds(bad: int) -> None:
    """The interpreter would fail; a GPU would damage other memory."""
    damaged = Sparse(torch.tensor([3, bad], dtype=torch.int32, device=DEVICE), torch.ones(2, device=DEVICE))
    x = torch.full((300,), 2.0, device=DEVICE)
    triton_ops.write(x[100:200], damaged, 1.0)
    triton_ops.subtract(x[100:200], damaged, 0.5)
    assert x.tolist() == [2.0] * 100 + [*[0.0] * 3, 0.5, *[0.0] * 96] + [2.0] * 100


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 1024, 2999])
def test_every_program_notices_elements_that_are_not_finite(place: int, value: float) -> None:
    x, zeros, out = torch.tensor([[1.0], [0.0], [0.0]], device=DEVICE).repeat(1, 3000)
    x[place] = value
    assert not triton_ops.all_finite(x)
    for scan in (Scan(), Scan(chunk=7), Scan(above=2.0, capacity=5)):
        assert not triton_ops.accumulate(x, zeros, 1.0, out, scan).finite


# -- the choice of a backend ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device,forced,name",
    [("cuda", False, "triton"), ("cuda", True, "torch"), ("xpu", False, "torch"), ("cpu", True, "torch")],
)
def test_only_cuda_tensors_get_triton(device: str, forced: bool, name: str) -> None:
    from hvdcompress._torch.framework import TorchFramework

    x: Any = SimpleNamespace(is_cuda=device == "cuda")
    assert TorchFramework(forced, dict).ops(x) is importlib.import_module(f"hvdcompress.ops.{name}").ops


@pytest.mark.parametrize("module,found", [("triton", None), ("tensorflow", sys)])
def test_cuda_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch, module: str, found: Any) -> None:
    """If Triton is missing, or TensorFlow was imported first: the process cannot load the LLVM libraries of both."""
    for name in [name for name in sys.modules if name.startswith(("triton", "hvdcompress.ops.triton"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, found)
    monkeypatch.setattr(hvdcompress.ops, "cuda", None, raising=False)
    assert hvdcompress.ops.__getattr__("cuda") is general
