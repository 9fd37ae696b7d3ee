"""Choose the tests that a change can affect: ``launch/test.sh --changed``, ``pytest --changed``.

Changed are the files that differ from the commit at which the branch left ``main``, and files that git does not track.
This is a quick choice for the developer at work, not a proof: CI runs all tests.
"""

from __future__ import annotations

import ast
import re
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest

from tests import ROOT

#: folder of the library -> the driver of tests/ranks that runs its code
DRIVERS = {
    "hvdcompress/ddp/": "ddp-torchrun-2",
    "hvdcompress/mpi/": "mpi-mpirun-2",
    "hvdcompress/horovod/torch/": "torch-mpi-2",
    "hvdcompress/horovod/tensorflow/": "tensorflow-mpi-2",
    "hvdcompress/horovod/keras": "tensorflow-mpi-2",
    "hvdcompress/_torch/": "ddp-torchrun-2",
    "hvdcompress/engine/": "loopback-",
    "hvdcompress/loopback.py": "loopback-",
}


def changed_files() -> list[str]:
    """Return the changed files, relative to the repository."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.split("\n")[:-1]

    base = git("merge-base", "HEAD", "main")[0]
    return [*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")]


@lru_cache
def imports_of(test_file: Path) -> set[str]:
    """Return the modules that a file of tests imports, and "module.name" for each name that it takes from one."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(test_file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def affects(changed: str, item: pytest.Item) -> bool:
    """Return whether a test depends on a changed file, as far as names and imports tell."""
    test = str(item.path.relative_to(ROOT))
    path = Path(changed)
    if changed == test:
        return True
    if path.suffix == ".py" and changed.startswith(("hvdcompress/", "experiments/", "tests/")):
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        mirrored = Path("tests/unit", *path.parts[1:-1], f"test_{path.name}")
        if test == str(mirrored) or module in imports_of(item.path):
            return True
        if changed.startswith("hvdcompress/methods/") and test.startswith("tests/unit/"):
            return re.search(rf"(?<![a-z]){path.stem}(?![a-z])", item.nodeid) is not None
        runs = [name for folder, name in DRIVERS.items() if changed.startswith(folder)]
        return any(f"[{name}" in item.nodeid for name in runs)
    return test.startswith(("tests/unit/house", "tests/launched/test_launch"))


def choose(items: list[pytest.Item], config: pytest.Config) -> None:
    """Deselect the tests that no changed file affects."""
    files = changed_files()
    chosen = [item for item in items if any(affects(file, item) for file in files)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen
