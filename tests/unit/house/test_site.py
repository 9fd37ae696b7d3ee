"""The documentation site is built without a warning: every link leads somewhere, every docstring can be read."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

OWN = ROOT / "build" / "docs-venv" / "bin" / "python"  # launch/docs.sh makes it
NEEDED = ("sphinx", "furo", "myst_parser", "sphinx_design", "sphinx_copybutton")


def builder() -> str | None:
    """A Python that has what builds the site: this one, or that of launch/docs.sh."""
    if all(importlib.util.find_spec(name) for name in NEEDED):
        return sys.executable
    return str(OWN) if OWN.exists() else None


@pytest.mark.timeout(200)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    python = builder()
    if python is None:
        pytest.skip("no Sphinx: launch/docs.sh installs it (docs/requirements.txt), in about a minute")
    line = [python, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "PyTorch DDP" in (tmp_path / "index.html").read_text(encoding="utf-8")
