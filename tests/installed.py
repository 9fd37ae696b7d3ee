"""What is installed, without importing it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(*packages: str) -> None:
    """Skip a test, or a file of tests, where one of these is not installed. ``pytest.importorskip`` would import it,
    which takes seconds of a framework that only ranks in other processes use."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)
