"""The generated pages of the documentation agree with the results, the examples and the registry."""

from __future__ import annotations

import subprocess
import sys

from tests import ROOT
from tests.installed import needs


def test_generated_pages_are_up_to_date() -> None:
    needs("torch")  # to_accuracy names PyTorch's hooks
    line = [sys.executable, "docs/build.py", "--check"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
