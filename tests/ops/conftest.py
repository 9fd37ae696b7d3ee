"""The fixture ``backend``: every array backend in turn."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from comparing import BACKENDS


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip(request.param)
    return importlib.import_module(f"hvdcompress.ops.{request.param}")
