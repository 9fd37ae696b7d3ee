"""``python -m experiments run``: a tiny training under Horovod and under DDP, Ctrl-C, and a rank that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from experiments.report import jsonl, results
from experiments.training.run import RANK
from tests import ROOT
from tests.installed import needs, without_tensorflow


def start(config, *words, **more):
    """Begin an experiment, with ``more`` in its environment."""
    out = () if "--out" in words else ("--out", "out")
    line = [sys.executable, "-m", "experiments", "run", str(config), *out, *words]
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
        if process.info["cwd"] == str(folder) and RANK in words and not {"-np", "torch.distributed.run"} & set(words):
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


def finish(run, seconds=240):
    output, _ = run.communicate(timeout=seconds)
    assert "Traceback" not in output, output
    return output


@pytest.mark.timeout(280)
def test_horovod_and_ddp_train_to_the_same_bits(whole):
    records, ends = {}, {}
    for driver in ("horovod", "ddp"):
        run = start(whole, "--driver", driver, "--out", driver, **without_tensorflow())
        output = finish(run)
        assert run.returncode == 0 and "[2/2] digits topk:" in output and "| topk " in output, output
        folder = whole.parent / driver
        events = {name: jsonl.read(folder / "metrics" / f"digits.{name}.0.jsonl") for name in ("none", "topk")}
        assert [event["event"] for event in events["topk"]] == ["start", "step", "step", "finished"]
        ends[driver] = {name: found[-1]["parameters_sha256"] for name, found in events.items()}
        records[driver] = results.load("records", folder).set_index("method")
        assert (folder / "scores.svg").exists() and "predicted, 1 Gbit/s" in (folder / "table.md").read_text()
    assert ends["horovod"] == ends["ddp"]
    for found in records.values():
        topk = found.loc["topk"]
        assert 40 < topk["dense_bytes"] / topk["sent_bytes"] < 100
        assert found["score"].between(5, 100).all() and (found["computing_s"] < found["step_s"]).all()


@pytest.mark.timeout(280)
def test_ctrl_c_ends_every_rank_and_resume_goes_on(whole):
    tasks = "[{task: digits, steps: 20}, {task: digits, label: long, steps: STEPS, log_every: 2}]"
    text = f"name: small\ntasks: {tasks}\nmethods: [none]\n"
    whole.write_text(text.replace("STEPS", "100000"))
    run = start(whole, "--driver", "ddp")
    wait_for_step(whole.parent, "long.none.0")
    assert len(rank_pids(whole.parent)) == 2
    run.send_signal(signal.SIGINT)
    output = finish(run, 60)
    assert run.returncode == 128 + signal.SIGINT, output
    assert not rank_pids(whole.parent)
    assert "every rank has ended" in output and "none (1 of 1 not finished)" in output
    whole.write_text(text.replace("STEPS", "30"))
    again = start(whole, "--driver", "ddp", "--resume")
    output = finish(again)
    assert again.returncode == 0 and "digits none" not in output and "[2/2] long none" in output, output


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_killed_rank_fails_its_run_and_no_other(whole):
    long = "{task: digits, label: long, steps: 100000, log_every: 2}"
    whole.write_text(f"tasks: [{long}, {{task: digits, steps: 20}}]\nmethods: [fp16]\n")
    run = start(whole, "--driver", "horovod", **without_tensorflow())
    wait_for_step(whole.parent, "long.fp16.0")
    os.kill(rank_pids(whole.parent)[0], signal.SIGKILL)
    output = finish(run)
    assert run.returncode == 1, output
    assert "[1/2] long fp16: rank" in output and "[2/2] digits fp16: " in output and "log.txt" in output
    assert not rank_pids(whole.parent)
