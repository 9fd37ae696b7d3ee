"""``python -m experiments run``: whole runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from experiments.training import launch
from tests import ROOT, SMALL_EXPERIMENT
from tests.installed import needs, without_tensorflow


def start(config, *words, **more):
    """Begin an experiment, with ``more`` in its environment."""
    line = [sys.executable, "-m", "experiments", "run", str(config), "--out", "out", *words]
    return subprocess.Popen(
        line,
        cwd=config.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **more},
    )


def rank_pids(folder):
    """Process ids of the ranks that work on this test's folder."""
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline", "cwd", "status"]):
        words = process.info["cmdline"] or []
        if process.info["cwd"] == str(folder) and launch.MODULES["torch"] in words and "-np" not in words:
            found.append(process.pid)
    return found


def wait_for_step(folder, run, seconds=120):
    file = folder / "out" / "metrics" / f"{run}.jsonl"
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if file.exists() and '"event": "step"' in file.read_text():
            return
        time.sleep(0.1)
    pytest.fail(f"{run} did not begin: {(folder / 'out' / 'log.txt').read_text()[-2000:]}")


@pytest.fixture
def whole(config):
    needs("horovod", "torch", "sklearn", "psutil", "matplotlib")
    return config


@pytest.fixture(scope="module")
def under_horovod(tmp_path_factory):
    """A run from end to end: what it printed, and its folder."""
    needs("horovod", "torch", "sklearn", "psutil", "matplotlib")
    file = tmp_path_factory.mktemp("whole") / "small.yaml"
    file.write_text(SMALL_EXPERIMENT, encoding="utf-8")
    run = start(file)
    output, _ = run.communicate(timeout=240)
    assert run.returncode == 0, output
    return output, file.parent / "out"


def events_of(folder, run):
    return [json.loads(line) for line in (folder / "metrics" / f"{run}.jsonl").read_text().splitlines()]


@pytest.mark.timeout(280)
def test_a_run_from_end_to_end(under_horovod):
    output, folder = under_horovod
    assert "horovodrun -np 2 --mpi" in output and "100x" not in output
    assert "tensorflow" not in output.lower() and "cuda" not in output.lower()
    summary = json.loads((folder / "summary.json").read_text())
    none, topk = summary["rows"]
    assert none["mean"]["rate"] == pytest.approx(1, abs=0.01) and 40 < topk["mean"]["rate"] < 100
    events = events_of(folder, "digits.topk.0")
    assert [event["event"] for event in events] == ["start", "step", "step", "finished"]
    assert events[0]["versions"]["torch"] and events[0]["launch"]["command"].endswith("out")
    end = events[-1]
    assert end["identical"] and len(end["parameters_sha256"]) == 64
    # The table's bytes are the ledger's.
    assert topk["mean"]["sent"] * 20 == pytest.approx(sum(end["ranks"]["bytes_sent"]) / 2)
    assert end["ranks"]["bytes_sent"][0] == events[-2]["bytes_sent"]
    assert (folder / "report.html").stat().st_size > 10_000


@pytest.mark.timeout(280)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ctrl_c_ends_every_rank_and_reports(whole, number):
    whole.write_text(SMALL_EXPERIMENT.replace("steps: 20", "steps: 100000, log_every: 2"))
    run = start(whole, **without_tensorflow())
    wait_for_step(whole.parent, "digits.none.0")
    ranks = rank_pids(whole.parent)
    assert len(ranks) == 2
    run.send_signal(number)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + number, output
    assert not rank_pids(whole.parent)
    assert "Traceback" not in output and "every rank has ended" in output
    assert "interrupted at step" in output and "not started" in output
    assert "interrupted at step" in (whole.parent / "out" / "table.md").read_text()
    assert (whole.parent / "out" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_killed_rank_fails_its_run_and_no_other(whole):
    long = "{task: digits, label: long, steps: 100000, log_every: 2}"
    whole.write_text(f"tasks: [{long}, {{task: digits, steps: 20}}]\nmethods: [fp16]\n")
    run = start(whole, **without_tensorflow())
    wait_for_step(whole.parent, "long.fp16.0")
    os.kill(rank_pids(whole.parent)[0], signal.SIGKILL)
    output, _ = run.communicate(timeout=240)
    assert run.returncode == 1, output
    assert "✗ 1/2 long" in output and "✓ 2/2 digits" in output
    assert "fp16 (failed)" in output and "1 of 2 runs failed" in output and "log.txt" in output
    assert not rank_pids(whole.parent)


@pytest.mark.timeout(280)
def test_under_ddp_the_results_are_the_same_without_horovod(under_horovod, whole):
    """Losses and parameters are, to the bit, those under Horovod; the bytes differ by what each driver agrees with."""
    run = start(whole, "--driver", "ddp")
    output, _ = run.communicate(timeout=240)
    assert run.returncode == 0, output
    horovods, folder = under_horovod[0], whole.parent / "out"
    assert "torch.distributed.run" in output and "torch.distributed.run" not in horovods
    events, others = events_of(folder, "digits.topk.0"), events_of(under_horovod[1], "digits.topk.0")
    losses, expected = ([one["loss"] for one in found if one["event"] == "step"] for found in (events, others))
    assert losses and losses == expected
    assert events[-1]["identical"] and others[-1]["identical"]
    assert events[-1]["parameters_sha256"] == others[-1]["parameters_sha256"]
    assert "DistributedDataParallel" in (folder / "table.md").read_text()
