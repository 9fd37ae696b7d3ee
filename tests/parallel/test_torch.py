"""The torch driver behind the stock optimizer, launched as a user launches it: see ``cases.py`` for what is checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("horovod")
pytestmark = pytest.mark.parallel

HERE = Path(__file__).parent
LAUNCHES = ["mpi-2", "mpi-3", "mpi-4", "gloo-2"]
SECONDS = 240


def environment() -> dict[str, str]:
    """Ranks share two cores: one thread each, and MPI yields while it waits."""
    bin_folder = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": bin_folder + os.pathsep + os.environ["PATH"],
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def launch(kind: str, script: Path, *arguments: str, seconds: int = SECONDS) -> subprocess.CompletedProcess:
    """``horovodrun`` a script; ends all its processes when it takes too long."""
    controller, world = kind.split("-")
    line = ["horovodrun", "-np", world, f"--{controller}", sys.executable, str(script), *arguments]
    with subprocess.Popen(
        line, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # horovodrun ends its ranks
            output, _ = process.communicate(timeout=30)
            pytest.fail(f"{' '.join(line)} took more than {seconds} s\n{output[-6000:]}")
    return subprocess.CompletedProcess(line, process.returncode, output)


_finished: dict[str, tuple[list[dict], str]] = {}


def outcomes(kind: str, folder: Path) -> tuple[list[dict], str]:
    """What each rank wrote in one launch of all cases; launched once and remembered."""
    if kind not in _finished:
        done = launch(kind, HERE / "cases.py", str(folder))
        files = [folder / f"{rank}.json" for rank in range(int(kind[-1]))]
        _finished[kind] = ([json.loads(f.read_text()) if f.exists() else {} for f in files], done.stdout)
    return _finished[kind]


def case_names() -> list[str]:
    """The cases' names, read from the source: importing it would initialise Horovod's libraries here."""
    lines = (HERE / "cases.py").read_text().splitlines()
    return [b.split("(")[0].removeprefix("def ") for a, b in zip(lines, lines[1:], strict=False) if a == "@case"]


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("kind", LAUNCHES)
@pytest.mark.parametrize("name", case_names())
def test_case(kind: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    ranks, log = outcomes(kind, tmp_path_factory.mktemp(kind))
    found = [rank.get("results", {}).get(name, "did not run") for rank in ranks]
    if all(result.startswith("skip: ") for result in found):
        pytest.skip(found[0].removeprefix("skip: "))
    for rank, result in enumerate(found):
        assert result == "ok", f"rank {rank} of {kind}: {result}\n--- end of the launch's log:\n{log[-3000:]}"


@pytest.mark.timeout(2 * SECONDS)
def test_bytes_of_scalecom_do_not_grow_with_the_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    two, four = (outcomes(kind, tmp_path_factory.mktemp(kind))[0] for kind in ("mpi-2", "mpi-4"))
    assert {rank["numbers"]["scalecom"] for rank in two + four} == {two[0]["numbers"]["scalecom"]}


@pytest.mark.timeout(150)
def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    done = launch("mpi-2", HERE / "killed.py", str(tmp_path), seconds=120)
    assert done.returncode != 0
    assert (tmp_path / "before").exists(), done.stdout[-3000:]
    assert not (tmp_path / "survivor").exists(), "the other rank went on as if nothing had happened"
    assert time.monotonic() - began < 110
