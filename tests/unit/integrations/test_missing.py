"""Frameworks that are not installed."""

from __future__ import annotations

import importlib
import re
import sys

import pytest


@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_a_missing_framework_is_named_with_its_extra(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    ours = f"hvdcompress.integrations.{framework}"
    monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.delitem(sys.modules, ours, raising=False)
    with pytest.raises(ImportError, match=re.escape(f"pip install hvdcompress[{framework}]")):
        importlib.import_module(ours)
