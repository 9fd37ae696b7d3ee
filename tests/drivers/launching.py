"""Start ranks as a user does, and read what each of them wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 240


def environment(**more: str) -> dict[str, str]:
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
        **more,
    }


def launch(
    kind: str, script: Path, *arguments: str, seconds: int = SECONDS, **more: str
) -> subprocess.CompletedProcess[str]:
    """``horovodrun`` a script, "mpi-2" or "gloo-3", with ``more`` in its environment; ends all its processes when it
    takes too long."""
    controller, world = kind.split("-")
    line = ["horovodrun", "-np", world, f"--{controller}", sys.executable, str(script), *arguments]
    with subprocess.Popen(
        line,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # horovodrun ends its ranks
            output, _ = process.communicate(timeout=30)
            pytest.fail(f"{' '.join(line)} took more than {seconds} s\n{output[-6000:]}")
    return subprocess.CompletedProcess(line, process.returncode, output)


_finished: dict[tuple, tuple[list[dict], str]] = {}


def outcomes(
    kind: str, script: Path, folder: Path, *cases: str, seconds: int = SECONDS, **more: str
) -> tuple[list[dict], str]:
    """What each rank wrote in one launch of a script's cases, and the log; launched once and remembered."""
    key = (kind, script, cases)
    if key not in _finished:
        done = launch(kind, script, str(folder), *cases, seconds=seconds, **more)
        files = [folder / f"{rank}.json" for rank in range(int(kind.split("-")[1]))]
        _finished[key] = ([json.loads(f.read_text()) if f.exists() else {} for f in files], done.stdout)
    return _finished[key]


def case_names(script: Path) -> list[str]:
    """The cases' names, read from the source: importing it would initialise Horovod's libraries here."""
    lines = script.read_text().splitlines()
    return [b.split("(")[0].removeprefix("def ") for a, b in zip(lines, lines[1:], strict=False) if a == "@case"]


def check(kind: str, name: str, found: tuple[list[dict], str]) -> None:
    """Pass, skip or fail, as the ranks said of the case ``name``."""
    ranks, log = found
    results = [rank.get("results", {}).get(name, "did not run") for rank in ranks]
    if all(result.startswith("skip: ") for result in results):
        pytest.skip(results[0].removeprefix("skip: "))
    for rank, result in enumerate(results):
        assert result == "ok", f"rank {rank} of {kind}: {result}\n--- end of the launch's log:\n{log[-3000:]}"
