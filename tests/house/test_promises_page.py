"""docs/promises.md is what the tests promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_promises_is_up_to_date() -> None:
    line = [sys.executable, str(ROOT / "tools" / "write_promises.py"), "--check"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
