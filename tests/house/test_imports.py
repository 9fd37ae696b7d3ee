"""Imports point one way, and importing the package imports no framework; the documented examples run."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hvdcompress

PACKAGE = Path(hvdcompress.__file__).parent
FRAMEWORKS = {"torch", "tensorflow", "keras", "tf_keras", "horovod", "mpi4py"}
DRIVERS = {"loopback", "torch", "tensorflow", "keras", "mpi"}
CORE = ("methods", "parts", "ops")
#: what each layer may import of the package: methods -> parts -> ops, all three -> method
ALLOWED = {
    "methods": {"method", "parts", "registry", "wire"},
    "parts": {"method", "ops", "parts", "wire"},
    "ops": {"method", "ops", "wire"},
    "method": set(),
    "wire": set(),
    "ledger": set(),
}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, inside functions too: "numpy", "hvdcompress.parts.seed"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layers(path: Path) -> set[str]:
    """The parts of hvdcompress that a file imports: "parts", "method", …"""
    own = [name.split(".") for name in imports(path) if name.split(".")[0] == "hvdcompress"]
    return {words[1] for words in own if len(words) > 1}


def files(layer: str) -> list[Path]:
    folder = PACKAGE / layer
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{layer}.py"]


@pytest.mark.parametrize("layer", ALLOWED)
def test_imports_point_one_way(layer: str) -> None:
    for path in files(layer):
        wrong = layers(path) - ALLOWED[layer] - {"__version__"}
        assert not wrong, f"{path.relative_to(PACKAGE)} imports {sorted(wrong)}; {layer} may import {ALLOWED[layer]}"


def test_nothing_imports_a_driver() -> None:
    """But for the suite and the command line, which run one, and a driver itself (keras on tensorflow)."""
    users = {"testing", "cli", "checkup", "selftest", "launcher", "experiment", "compare", "choreography"}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name.lstrip("_").split("_")[0] not in DRIVERS | users:
            wrong = layers(path) & DRIVERS
            assert not wrong, f"{path.relative_to(PACKAGE)} imports the driver {sorted(wrong)}"


def test_the_core_imports_no_framework() -> None:
    for layer in (
        *CORE,
        "method",
        "wire",
        "ledger",
        "registry",
        "plan",
        "yamlfile",
        "worker",
        "loopback",
        "testing",
    ):
        for path in files(layer):
            used = {name.split(".")[0] for name in imports(path)} & FRAMEWORKS
            own = set(path.stem.split("_")) if layer == "ops" else {"torch"} if layer == "testing" else set()
            assert used <= own, f"{path.relative_to(PACKAGE)} imports {sorted(used)}"


def test_methods_use_no_array_library_but_ops() -> None:
    """A method speaks through ``ops``, or it would not run on a GPU; numpy is there for scalars' dtypes."""
    for path in files("methods"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("np", "numpy")
        }
        assert used <= {"float32", "int32"}, f"{path.name} uses numpy's {sorted(used)}"


@pytest.mark.parametrize(
    "module", ["hvdcompress", "hvdcompress.loopback", "hvdcompress.testing", "hvdcompress.engine.ledger"]
)
def test_importing_the_package_imports_no_framework(module: str) -> None:
    code = (
        f"import sys; import {module}; import hvdcompress; hvdcompress.get('topk');"
        f"print(sorted(set(sys.modules) & {FRAMEWORKS!r}))"
    )
    path = [str(PACKAGE.parent), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_public_face() -> None:
    for name in ("available", "get", "load", "__version__"):
        assert hasattr(hvdcompress, name)
    assert set(hvdcompress.__all__) >= {"available", "get", "load", "__version__"}


def _modules() -> list[str]:
    methods = [f"hvdcompress.methods.{info.name}" for info in pkgutil.iter_modules([str(PACKAGE / "methods")])]
    return [*methods, "hvdcompress.loopback", "hvdcompress.registry", "hvdcompress.testing"]


@pytest.mark.parametrize("name", _modules())
def test_doctests(name: str) -> None:
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        pytest.skip("numpy 2 writes numbers another way")
    failed, tried = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert tried and not failed
