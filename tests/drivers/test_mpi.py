"""The MPI driver under plain mpirun, and alone: see ``mpi_cases.py`` for what is checked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.parallel

HERE = Path(__file__).parent
LAUNCHES = ["alone", "mpirun-2", "mpirun-3", "mpirun-4"]
SECONDS = 270


def environment() -> dict[str, str]:
    """Ranks share two cores: one thread each, and MPI yields while it waits."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))},
        "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"],
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def launch(kind: str, script: Path, *arguments: str, seconds: int = SECONDS) -> subprocess.CompletedProcess:
    """``mpirun`` a script; ends all its processes when it takes too long."""
    mpirun = ["mpirun", "--oversubscribe", "-bind-to", "none", "-np", kind[-1]] if kind != "alone" else []
    line = [*mpirun, sys.executable, str(script), *arguments]
    with subprocess.Popen(
        line, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # mpirun ends its ranks
            output, _ = process.communicate(timeout=30)
            pytest.fail(f"{' '.join(line)} took more than {seconds} s\n{output[-6000:]}")
    return subprocess.CompletedProcess(line, process.returncode, output)


_finished: dict[str, tuple[list[dict], str, int]] = {}


def outcomes(kind: str, folder: Path) -> tuple[list[dict], str, int]:
    """What each rank wrote in one launch of all cases, the log and the exit status; launched once and remembered."""
    if kind not in _finished:
        done = launch(kind, HERE / "mpi_cases.py", str(folder))
        files = [folder / f"{rank}.json" for rank in range(1 if kind == "alone" else int(kind[-1]))]
        found = [json.loads(f.read_text()) if f.exists() else {} for f in files]
        _finished[kind] = (found, done.stdout, done.returncode)
    return _finished[kind]


def case_names() -> list[str]:
    """The cases' names, read from the source: importing it would initialise MPI here."""
    lines = (HERE / "mpi_cases.py").read_text().splitlines()
    return [b.split("(")[0].removeprefix("def ") for a, b in zip(lines, lines[1:], strict=False) if a == "@case"]


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("kind", LAUNCHES)
@pytest.mark.parametrize("name", case_names())
def test_case(kind: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    ranks, log, _ = outcomes(kind, tmp_path_factory.mktemp(kind))
    found = [rank.get("results", {}).get(name, "did not run") for rank in ranks]
    if all(result.startswith("skip: ") for result in found):
        pytest.skip(found[0].removeprefix("skip: "))
    for rank, result in enumerate(found):
        assert result == "ok", f"rank {rank} of {kind}: {result}\n--- end of the launch's log:\n{log[-3000:]}"


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("kind", LAUNCHES)
def test_ranks_end_well_and_in_silence(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    _, log, status = outcomes(kind, tmp_path_factory.mktemp(kind))
    assert status == 0, log[-3000:]
    assert "Traceback" not in log and "error" not in log.lower(), log[-3000:]


@pytest.mark.timeout(2 * SECONDS)
def test_bytes_of_scalecom_do_not_grow_with_the_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    two, four = (outcomes(kind, tmp_path_factory.mktemp(kind))[0] for kind in ("mpirun-2", "mpirun-4"))
    assert {rank["numbers"]["scalecom"] for rank in two + four} == {two[0]["numbers"]["scalecom"]}


@pytest.mark.timeout(150)
def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    done = launch("mpirun-2", HERE / "mpi_killed.py", str(tmp_path), seconds=120)
    assert done.returncode != 0
    assert (tmp_path / "before").exists(), done.stdout[-3000:]
    assert not (tmp_path / "survivor").exists(), "the other rank went on as if nothing had happened"
    assert time.monotonic() - began < 60


@pytest.mark.timeout(60)
def test_it_can_be_imported_alone() -> None:
    """Without mpirun, and with nothing on the PATH that could start a daemon."""
    done = subprocess.run(
        [sys.executable, "-c", "from hvdcompress.mpi import Compressor; print(Compressor('topk').allreduce)"],
        env={"PATH": "/nonexistent", "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "allreduce" in done.stdout, done.stdout + done.stderr


@pytest.mark.timeout(150)
def test_the_example_converges() -> None:
    done = launch("mpirun-2", HERE.parents[1] / "examples" / "mpi_numpy.py", seconds=120)
    said = re.search(r"^2 ranks, error ([\d.]+)%, ([\d.]+) times fewer bytes than dense$", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and said, done.stdout
    assert float(said[1]) < 2 and float(said[2]) > 10
