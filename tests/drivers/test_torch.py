"""The torch driver behind the stock optimizer, launched as a user launches it: see ``cases.py`` for what is checked."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from launching import SECONDS, case_names, check, launch, outcomes

pytest.importorskip("torch")
pytest.importorskip("horovod")
pytestmark = pytest.mark.parallel

HERE = Path(__file__).parent
LAUNCHES = ["mpi-2", "mpi-3", "mpi-4", "gloo-2"]
CASES = HERE / "cases.py"
NAMES = [*case_names(CASES), *case_names(HERE / "refusal_cases.py")]


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("kind", LAUNCHES)
@pytest.mark.parametrize("name", NAMES)
def test_case(kind: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(kind, name, outcomes(kind, CASES, tmp_path_factory.mktemp(kind)))


@pytest.mark.timeout(2 * SECONDS)
def test_bytes_of_scalecom_do_not_grow_with_the_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    two, four = (outcomes(kind, CASES, tmp_path_factory.mktemp(kind))[0] for kind in ("mpi-2", "mpi-4"))
    assert {rank["numbers"]["scalecom"] for rank in two + four} == {two[0]["numbers"]["scalecom"]}


@pytest.mark.timeout(150)
def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    done = launch("mpi-2", HERE / "killed.py", str(tmp_path), seconds=120)
    assert done.returncode != 0
    assert (tmp_path / "before").exists(), done.stdout[-3000:]
    assert not (tmp_path / "survivor").exists(), "the other rank went on as if nothing had happened"
    assert time.monotonic() - began < 110
