"""``python -m experiments run``: small trainings under DDP and Horovod, Ctrl-C, and a rank that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from experiments.report import results
from experiments.training.command import RANK
from tests import ROOT
from tests.installed import needs, without_tensorflow

needs("horovod", "torch", "sklearn", "psutil", "matplotlib")

LAUNCHERS = {"-np", "torch.distributed.run"}  #: words of the commands that start ranks
ONE_RUN = "tasks: [{task: digits, steps: STEPS, log_every: 2}]\nmethods: [{method: topk, density: 0.01}]\n"


def start(config, *words):
    """Begin an experiment."""
    return subprocess.Popen(
        [sys.executable, "-m", "experiments", "run", str(config), *words],
        cwd=config.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(without_tensorflow() if "horovod" in words else {})},
    )


def wait_for_ranks(folder):
    deadline = time.monotonic() + 120
    while len(pids := rank_pids(folder)) < 2:
        assert time.monotonic() < deadline, "no ranks"
        time.sleep(0.1)
    time.sleep(5.0)  # now they train
    return pids


def rank_pids(folder):
    """Return the process ids of the ranks that work on this test's folder."""
    import psutil

    words_of = {process: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline", "cwd"])}
    return [
        process.pid
        for process, words in words_of.items()
        if process.info["cwd"] == str(folder) and RANK in words and not LAUNCHERS & set(words)
    ]


def finish(run, seconds=240):
    output, _ = run.communicate(timeout=seconds)
    assert "Traceback" not in output, output
    return output


@pytest.mark.timeout(280)
@pytest.mark.parametrize("resumes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ctrl_c_ends_every_rank_and_the_same_command_goes_on(config, resumes):
    config.write_text(ONE_RUN.replace("STEPS", "100000"))
    run = start(config, "--driver", "ddp", "--out", "out")
    wait_for_ranks(config.parent)
    run.send_signal(signal.SIGINT)
    output = finish(run, 60)
    assert run.returncode == 128 + signal.SIGINT and not rank_pids(config.parent), output
    assert "every rank has ended" in output
    if not resumes:
        return
    config.write_text(ONE_RUN.replace("STEPS", "20"))
    output = finish(start(config, "--driver", "ddp", "--out", "out"))
    assert "[1/1] train" in output, output
    assert "1 of 1 results are kept" in finish(start(config, "--driver", "ddp", "--out", "out"))
    found = results.load("records", config.parent / "out").iloc[0]
    assert 5 < found["score"] < 100 and found["computing_s"] < found["step_s"]


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_killed_rank_ends_the_command_and_finished_runs_are_kept(config):
    long = "{task: digits, label: long, steps: 100000, log_every: 2}"
    config.write_text(f"tasks: [{{task: digits, steps: 20}}, {long}]\nmethods: [fp16]\n")
    run = start(config, "--driver", "horovod", "--out", "out")
    kept = config.parent / "out" / "results.jsonl"
    deadline = time.monotonic() + 120
    while not kept.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(wait_for_ranks(config.parent)[0], signal.SIGKILL)
    output = finish(run)
    assert run.returncode == 1 and "of 2 failed (exit status" in output, output
    assert not rank_pids(config.parent) and len(kept.read_text().split()) > 0
