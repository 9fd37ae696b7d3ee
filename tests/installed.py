"""What is installed, without importing it, and what a launch may do without."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest


def needs(*packages: str) -> None:
    """Skip a test, or a file of tests, where one of these is not installed. ``pytest.importorskip`` would import it,
    which takes seconds of a framework that only ranks in other processes use."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)


def without_tensorflow() -> dict[str, str]:
    """The variable under which ``horovodrun`` does not find TensorFlow. It imports every framework that it finds, to
    see what Horovod was built for: four seconds of seven, in launches of PyTorch alone."""
    tests, given = Path(__file__).resolve().parent, os.environ.get("PYTHONPATH")
    folders = [str(tests / "without_tensorflow"), str(tests.parent), *([given] if given else [])]
    return {"PYTHONPATH": os.pathsep.join(folders)}
