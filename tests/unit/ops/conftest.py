"""The fixtures ``backend``, every array backend in turn, and ``native``, those that run on the processor."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.unit.ops.comparing import BACKENDS


def _imported(name: str) -> Any:
    pytest.importorskip(name)
    return importlib.import_module(f"hvdcompress.ops.{name}")


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    return _imported(request.param)


@pytest.fixture(scope="module", params=[name for name in BACKENDS if name != "triton"])
def native(request: pytest.FixtureRequest) -> Any:
    """For tests of many elements: Triton's interpreter takes a thousand times as long for them."""
    return _imported(request.param)
