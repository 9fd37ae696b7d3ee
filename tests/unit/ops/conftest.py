"""Fixtures: ``backend`` is each array backend in turn, ``native`` each one that runs on the processor."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.unit.ops.comparing import BACKENDS


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip(request.param)
    return importlib.import_module(f"hvdcompress.ops.{request.param}").ops


@pytest.fixture(scope="module", params=[name for name in BACKENDS if name != "triton"])
def native(request: pytest.FixtureRequest) -> Any:
    """For tests of many elements, which take Triton's interpreter a thousand times as long."""
    pytest.importorskip(request.param)
    return importlib.import_module(f"hvdcompress.ops.{request.param}").ops
