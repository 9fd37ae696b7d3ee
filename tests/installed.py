"""What is installed, without importing it, and what a launch may do without."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import pytest

from tests import ROOT


def needs(*packages: str) -> None:
    """Skip a test, or a file of tests, where one of these is not installed. ``pytest.importorskip`` would import it,
    which takes seconds of a framework that only ranks in other processes use."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)


def runs_without(packages: Sequence[str], code: str) -> None:
    """Run code in a process in which importing these packages is an error, and expect that it succeeds."""
    line = [sys.executable, "-c", f"import sys\nsys.modules.update(dict.fromkeys({packages!r}))\n{code}"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def without_tensorflow() -> dict[str, str]:
    """The variable under which ``horovodrun`` does not find TensorFlow. It imports every framework that it finds, to
    see what Horovod was built for: four seconds of seven, in launches of PyTorch alone."""
    return {"PYTHONPATH": python_path(str(ROOT / "tests" / "without_tensorflow"))}


def python_path(*first: str) -> str:
    """A PYTHONPATH with which a script imports the package and ``tests``, whatever folder it is in."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*first, str(ROOT), *([given] if given else [])])
