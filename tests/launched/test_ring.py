"""All-reduces over a ring that are timed."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.reproduce import gradiveq_ring


def test_rings_are_timed_over_shared_memory():
    pytest.importorskip("mpi4py")
    contenders = {"dense": [0, "fp32"], "8x": [8.0, "fp32"], "both": [8.0, "qsgd8"]}
    found = gradiveq_ring.timed([(16, 8, 3, 3)], 2, None, 0, 1, contenders)
    assert found["elements"] == 1152 and set(found["seconds"]) == set(contenders)
    assert found["sent"]["dense"] == 4 * 1152 and found["sent"]["8x"] == 4 * 144
    assert min(*found["seconds"].values(), *found["codec"].values(), found["fit"]) > 0


@pytest.mark.timeout(120)
def test_the_experiment_across_ranks(tmp_path) -> None:
    pytest.importorskip("mpi4py")
    line = [str(Path(__file__).parents[2] / "launch" / "ring.sh"), "-n", "3", "--", "--elements", "1200", "--runs", "2"]
    line += ["-m", "topk density=0.1", "-m", "none", "--out", str(tmp_path / "ring"), "--format", "csv"]
    sys.path.insert(0, str(Path(__file__).parents[1] / "drivers"))
    from tests.launching import untraced  # with MPI's traces mpirun would believe that it is a rank itself

    done = subprocess.run(line, env=untraced(), capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["all-reduce"]: row for row in csv.DictReader(io.StringIO(done.stdout))}
    assert {"MPI all-reduce", "ring, fp32", "ring, qsgd4", "none", "topk density=0.1"} <= set(rows)
    error = {name: float(row["error"]) for name, row in rows.items()}
    assert (
        error["MPI all-reduce"] < 1e-6
        and error["none"] < 1e-6 < error["ring, fp16"] < 1e-2 < error["topk density=0.1"] < 1
    )
    assert float(rows["ring, fp32"]["on the wire [B]"]) == 2 * 2 / 3 * 4800
    for file in ("ring.json", "table.md"):
        assert "topk density=0.1" in (tmp_path / "ring" / file).read_text()
    assert (tmp_path / "ring" / "ring.svg").read_text().startswith("<svg")
    wrong = subprocess.run([line[0], "-n", "x"], capture_output=True, text=True, timeout=20)
    assert wrong.returncode == 1 and "not a number of ranks" in wrong.stderr
