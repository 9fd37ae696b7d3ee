"""``python -m experiments bench`` on emulated hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.cluster import hosts
from experiments.report import results
from tests import ROOT
from tests.installed import needs, without_tensorflow

REAL = """
name: tiny
hosts: 2
rates: [200mbit]
rounds: 1
repeats: 2
sets: [{net: resnet32, label: small}]
methods:
  - {label: gradiveq, method: gradiveq, slice_elements: 768, matrix_rank: 4, dense_steps: 6, alone: 6}
  - {label: scalecom, method: scalecom, density: 0.05, bucket_elements: 5000}
  - {label: in ddp, over: ddp, method: scalecom, density: 0.05}
  - {label: over mpi4py, over: mpi4py, method: gradiveq, slice_elements: 768, matrix_rank: 4, dense_steps: 6, alone: 6}
baselines: [none ring, fp16 mpi, powersgd ddp]
"""


MORE = ["none gloo", "none ddp"]  #: takes a quarter longer with these


@pytest.fixture
def possible():
    needs("horovod", "torch", "psutil")
    if reason := hosts.problem():
        pytest.skip(" ".join(reason.split()))


def begin(tmp_path, more=()):
    (tmp_path / "tiny.yaml").write_text(REAL.replace("ddp]", ", ".join(["ddp", *more]) + "]"))
    line = [
        sys.executable,
        "-m",
        "experiments",
        "bench",
        str(tmp_path / "tiny.yaml"),
        "--out",
        str(tmp_path / "out"),
    ]
    return subprocess.Popen(
        line,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", **without_tensorflow()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ours(pid):
    return subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout.count(f"hvdc-p{pid}x")


@pytest.mark.timeout(290)
@pytest.mark.parametrize("more", [[], pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_benchmark_on_hosts(possible, tmp_path, more):
    run = begin(tmp_path, more)
    output, _ = run.communicate(timeout=280)
    assert run.returncode == 0, output
    assert ours(run.pid) == 0
    rows = results.load("bench-tiny", tmp_path / "out").set_index("contender")
    assert len(rows) == 7 + len(more)
    dense, payload = rows.loc["none ring"], 4 * 464_154
    assert dense["sent"] == payload and dense["on_wire"] == payload  # 2(p − 1)/p with 2 ranks
    assert 1.04 * payload < dense["interface"] < 1.3 * payload, "with headers, and Horovod's own messages"
    assert dense["least"] > 0.9 * 8 * payload / 200e6, "not faster than the link"
    assert rows.loc["fp16 mpi", "sent"] == payload / 2
    for compressed in ("gradiveq", "scalecom", "in ddp", "over mpi4py"):
        assert rows.loc[compressed, "sent"] < 0.2 * payload
    for name, row in rows[rows["sent"].notna()].iterrows():
        assert row["interface"] > row["on_wire"], f"{name}: the ledger's bytes left the host"
    assert (tmp_path / "out" / "bench-tiny.svg").exists()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ctrl_c_leaves_nothing(possible, tmp_path):
    run = begin(tmp_path)
    turns = tmp_path / "out" / "turns.jsonl"
    deadline = time.monotonic() + 150
    while not (turns.exists() and turns.read_text()) and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.2)
    assert run.poll() is None and ours(run.pid) == 3
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGINT, output
    assert "--resume goes on" in output and "Traceback" not in output
    assert ours(run.pid) == 0
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in _text(p)]


def _text(file):
    try:
        return file.read_text()
    except OSError:
        return ""
