"""The torch driver when a rank is killed, ends or has joined; see ``test_promises_torch.py`` for all else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from installed import needs
from launching import launch

needs("torch", "horovod")
pytestmark = pytest.mark.parallel


@pytest.mark.timeout(150)
def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    done = launch("mpi-2", Path(__file__).parent / "killed.py", str(tmp_path), seconds=120)
    assert done.returncode != 0
    assert (tmp_path / "before").exists(), done.stdout[-3000:]
    assert not (tmp_path / "survivor").exists(), "the other rank went on as if nothing had happened"
    assert time.monotonic() - began < 110


@pytest.mark.timeout(80)
def test_all_reduces_that_start_while_a_peer_ends_raise(tmp_path: Path) -> None:
    """Without the fix in launch/horovod-0.28.1.patch, Horovod waits for a lock of its own with the GIL held."""
    done = launch("mpi-2", Path(__file__).parent / "peer_ends.py", str(tmp_path), seconds=60, DOOR="torch")
    assert "raised on purpose" in done.stdout
    assert (tmp_path / "error").exists(), done.stdout[-3000:]
    assert "Horovod has been shut down" in (tmp_path / "error").read_text()


@pytest.mark.timeout(100)
@pytest.mark.parametrize("method", [pytest.param("none", marks=pytest.mark.slow), "randomk"])
def test_a_rank_that_has_joined_is_named_as_the_cause(method: str, tmp_path: Path) -> None:
    """Of methods that gather, Horovod itself ends all ranks, with an error of its own: it cannot gather then."""
    done = launch("mpi-2", Path(__file__).parent / "joined.py", str(tmp_path), method, seconds=80)
    assert done.returncode != 0
    assert (tmp_path / "error").exists(), done.stdout[-3000:]
    assert "hvd.join()" in (tmp_path / "error").read_text()
