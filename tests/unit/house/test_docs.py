"""The documented examples run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import hvdcompress

METHODS = Path(hvdcompress.__file__).parent / "methods"
MODULES = [
    *(f"hvdcompress.methods.{info.name}" for info in pkgutil.iter_modules([str(METHODS)])),
    "experiments.phases",
    "experiments.papers.claims",
    "experiments.papers.page",
    "hvdcompress.loopback",
    "hvdcompress.registry",
    "hvdcompress.testing",
]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert tried and not failed
