"""The Triton backend: what its kernels are compiled to, what they refuse, and what serves where it is not installed."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress.ops import numpy as reference
from hvdcompress.ops import torch as general
from hvdcompress.ops.scan import Scan
from hvdcompress.ops.vectors import Sparse
from hvdcompress.testing.trial import Trial
from tests.unit.ops.comparing import CALLS, LAUNCHING, Put, device_of, get, host, vector

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
triton_ops = importlib.import_module("hvdcompress.ops.triton")

for file in sorted(Path(__file__).parent.glob("test_ops_*.py")):  # they register calls
    importlib.import_module(f"tests.unit.ops.{file.stem}")
ROOT = Path(hvdcompress.__file__).parents[1]
DEVICE = device_of(triton_ops)

# -- what kernels are compiled to -------------------------------------------------------------------------------

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


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).to(DEVICE)


def type_of(argument: Any) -> str:
    if hasattr(argument, "dtype"):
        return TYPES[str(argument.dtype).removeprefix("torch.")]
    return "fp32" if isinstance(argument, float) else "i32"


def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every kernel with every combination of dtypes and flags that the ops launch it with; one of each width."""
    found: dict[Any, Any] = {}

    def note(kernel: Any, programs: int, like: Any, *arguments: Any, **constants: Any) -> None:
        signature = [type_of(argument) for argument in arguments]
        flags = [(key, value) for key, value in constants.items() if isinstance(value, bool)]
        module, name = kernel.fn.__module__, kernel.fn.__name__
        found[name, str(signature), str(flags)] = (module, name, signature, constants)
        launch(kernel, programs, like, *arguments, **constants)

    launch = importlib.import_module("hvdcompress.ops.triton._kernels.launching").launch
    for subject in LAUNCHING:
        monkeypatch.setattr(f"hvdcompress.ops.triton.{subject}.launch", note)
    x = vector("normal", 9)
    with np.errstate(all="ignore"):
        for op in triton_ops.__all__:
            if inspect.getmodule(getattr(triton_ops, op)).__name__.startswith(triton_ops.__name__):
                for function in CALLS[op]:
                    function(triton_ops, Put(triton_ops), x, x[::-1].copy())
    triton_ops.moments(tensor(x))  # the calls that are compared do nothing: only to rounding
    for key in (None, np.array([5], np.uint32)):
        triton_ops.orthonormalise(tensor(x), 3, key)
    return list(found.values())


def test_kernels_compile_to_plain_ieee_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fused or approximate instruction, none that takes denormals for zeros, and no atomic one.

    Triton keeps what it has compiled in a folder of its own, by the sources and the options: a kernel is compiled once.
    """
    wanted = launches(monkeypatch)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILING],
        input=json.dumps(wanted), capture_output=True, text=True, timeout=200, check=False,
        env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == len(wanted)
    kernels = {name for name, _ in made}
    for name, words in made:
        for word in words:
            parts = set(word.split("."))
            assert not parts & {"fma", "mad24", "ftz", "approx", "full", "atom", "red"}, f"{name}: {word}"
            assert "mad" not in parts or not parts & {"f32", "f64"}, f"{name}: {word}"
    assert {"mul.rn.f32", "add.rn.f32"} <= set(dict(made)["accumulate"])  # so the check above reads the right words
    assert "div.rn.f32" in dict(made)["quantize"]
    named = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "hvdcompress/ops/triton").glob("*.py"))
    assert kernels == set(re.findall(r"(?<!_)kernels\.(\w+)", named))


def test_every_launch_forbids_fusion() -> None:
    options: dict[str, Any] = {}

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **given: options.update(given, grid=grid, arguments=arguments)

    importlib.import_module("hvdcompress.ops.triton._kernels.launching").launch(Kernel(), 3, torch.ones(1), 7, BLOCK=8)
    assert options == {"enable_fp_fusion": False, "grid": (3,), "arguments": (7,), "BLOCK": 8}
    sources = (ROOT / "hvdcompress/ops/triton").rglob("*.py")
    assert sum(path.read_text(encoding="utf-8").count("kernel[") for path in sources) == 1  # nothing else launches


# -- what the kernels do not take ---------------------------------------------------------------------------------


def test_unusual_memory_goes_to_torch() -> None:
    x = vector("normal", 200)
    twice = np.repeat(x, 2)
    key = np.array([5], np.uint32)
    for array in (tensor(twice)[::2], tensor(x[:0])):
        given = host(array)
        assert get(triton_ops.to_bf16(array)) == get(general.to_bf16(array))
        for op, arguments in (("top_k", (20,)), ("chunk_argmax", (7,)), ("count_above", (0.5,)), ("moments", ())):
            assert get(getattr(triton_ops, op)(array, *arguments)) == get(getattr(reference, op)(given, *arguments))
        norms = torch.full((1,), 4.0, device=DEVICE)
        found = triton_ops.quantize(array, norms, 1000, 4, key)
        assert get(found) == get(reference.quantize(given, host(norms), 1000, 4, key))
    apart = torch.zeros(400, device=DEVICE)[::2]
    triton_ops.accumulate(tensor(x), tensor(x), 0.5, apart)
    triton_ops.write(apart, apart.clone(), 2.0)
    expected = np.zeros_like(x)
    reference.accumulate(x, x, 0.5, expected)
    assert get(apart) == get(expected * np.float32(2))


def test_chunks_larger_than_a_program() -> None:
    x = vector("ties", 9000)
    for chunk in (4096, 4097):
        assert get(triton_ops.chunk_argmax(tensor(x), chunk)) == get(reference.chunk_argmax(x, chunk))
        out = torch.zeros(9000, device=DEVICE)
        found = triton_ops.accumulate(tensor(x), torch.zeros(9000, device=DEVICE), 1.0, out, Scan(chunk=chunk))
        assert found.finite and get(found.offsets) == get(reference.chunk_argmax(x, chunk)) and get(out) == get(x)


@pytest.mark.parametrize("bad", [-1, 100, 2**31 - 1, -(2**31)])
def test_kernels_never_write_out_of_bounds(bad: int) -> None:
    """The interpreter would fail, a GPU would damage other memory."""
    damaged = Sparse(torch.tensor([3, bad], dtype=torch.int32, device=DEVICE), torch.ones(2, device=DEVICE))
    x = torch.full((300,), 2.0, device=DEVICE)
    triton_ops.write(x[100:200], damaged, 1.0)
    triton_ops.subtract(x[100:200], damaged, 0.5)
    triton_ops.zero_where(x[100:200], damaged)
    expected = torch.full((300,), 2.0, device=DEVICE)
    expected[100:200] = 0
    assert torch.equal(x, expected)


def test_too_few_norms_are_an_error() -> None:
    x, norms, key = torch.ones(100), torch.ones(1), np.array([5], np.uint32)
    with pytest.raises(IndexError, match="norms"):
        triton_ops.quantize(x, norms, 50, 4, key)
    with pytest.raises(IndexError, match="norms"):
        triton_ops.dequantize(torch.zeros(50, dtype=torch.uint8), norms, 50, 4, 100)


def test_what_is_not_finite_is_seen_in_any_program() -> None:
    for place in (0, 1023, 1024, 2999):
        for value in (np.inf, -np.inf, np.nan):
            x, zeros, out = torch.tensor([[1.0], [0.0], [0.0]], device=DEVICE).repeat(1, 3000)
            x[place] = value
            assert not triton_ops.all_finite(x)
            for scan in (Scan(), Scan(chunk=7), Scan(above=2.0, capacity=5), Scan(moments=True), Scan(signs=True)):
                assert not triton_ops.accumulate(x, zeros, 1.0, out, scan).finite
                assert not triton_ops.inspect(x, scan).finite


# -- whole exchanges ----------------------------------------------------------------------------------------------

METHODS = {
    "topk": {"density": 0.02},
    "scalecom": {"density": 0.02, "values": "fp16"},
    "gaussiank": {"density": 0.02, "values": "bf16"},
    "dgc": {"density": 0.02},
    "redsync": {"density": 0.02, "interval": 2},
    "qsgd": {"bits": 3},
    "signsgd": {},
    "blockwise": {"values": "int4", "rotation": True},
    "natural": {},
    "onebit": {},
    "fp16": {"feedback": "plain"},
    "terngrad": {},
}


@pytest.mark.skipif(DEVICE == "cuda", reason="a Trial's gradients are in host memory")
@pytest.mark.parametrize("method", METHODS)
def test_methods_send_the_reference_s_bytes(method: str) -> None:
    made = hvdcompress.get(method, **METHODS[method])
    trials = [Trial(made, 2, ops=ops) for ops in (reference, triton_ops)]
    for step in range(3):
        gradients = [vector("heavy", 1500, seed=2 * step + rank).clip(-9, 9) for rank in range(2)]
        results = [trial.allreduce([g.copy() for g in gradients], name="w") for trial in trials]
        assert [get(one) for one in results[0]] == [get(one) for one in results[1]]
    assert trials[0].log == trials[1].log


# -- which ops serve --------------------------------------------------------------------------------------------


def test_cuda_tensors_get_triton() -> None:
    from hvdcompress._torch.framework import TorchFramework

    for device, forced, name in (
        ("cuda", False, "triton"), ("cuda", True, "torch"), ("xpu", False, "torch"), ("cpu", True, "torch")
    ):  # fmt: skip
        framework = TorchFramework(forced, dict)
        vector: Any = SimpleNamespace(is_cuda=device == "cuda")
        assert framework.ops(vector) is importlib.import_module(f"hvdcompress.ops.{name}")


@pytest.mark.parametrize("why", ["triton'] = None", "tensorflow'] = sys"])  # not there, or to be the second LLVM
def test_where_triton_cannot_be_imported_torch_serves(why: str) -> None:
    code = f"import sys; sys.modules['{why}; from hvdcompress.ops import cuda; print(cuda.__name__)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.stdout.split() == ["hvdcompress.ops.torch"], done.stderr
