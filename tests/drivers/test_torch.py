"""The torch driver when a rank is killed; see ``test_promises.py`` for all else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from launching import launch

pytest.importorskip("torch")
pytest.importorskip("horovod")
pytestmark = pytest.mark.parallel


@pytest.mark.timeout(150)
def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    done = launch("mpi-2", Path(__file__).parent / "killed.py", str(tmp_path), seconds=120)
    assert done.returncode != 0
    assert (tmp_path / "before").exists(), done.stdout[-3000:]
    assert not (tmp_path / "survivor").exists(), "the other rank went on as if nothing had happened"
    assert time.monotonic() - began < 110
