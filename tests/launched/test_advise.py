"""``hvdcompress advise`` in ranks under torchrun and Horovod: verdicts, and how errors end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.installed import needs, without_tensorflow
from tests.launching import environment

MINE = """
import os, time
import torch

rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))

def make_model():
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 4))

def make_batch():
    x = torch.randn(8, 16)
    return x, x[:, :4].argmax(1)

def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

def fails_on_rank_1(model):
    if rank == 1:
        raise OSError("no such file")
    return make_optimizer(model)

calls = 0

def fails_later_on_rank_1(model, batch):  # while the other rank waits for its gradients
    global calls
    calls += 1
    if calls == 20 and rank == 1:
        raise OSError("too late")
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
HOROVODRUN = ["horovodrun", "-np", "2", "--mpi", sys.executable]
LAUNCHERS = {"torchrun": TORCHRUN, "horovodrun": HOROVODRUN}
#: the command, in which top-k is taken for the fastest contender: on one machine, none is faster than dense
TOPK_IS_FASTEST = """
from hvdcompress.cli.advise import verdict
from hvdcompress.cli.app import main

verdict.choose = lambda found: next(one for one in found if one.label == "topk")
main()
"""


def start(folder, launcher, *words, program=("-m", "hvdcompress"), **functions):
    needs("torch", *(["horovod"] if launcher == "horovodrun" else []))
    (folder / "mine.py").write_text(MINE)
    (folder / "topk.py").write_text(TOPK_IS_FASTEST)
    given = {"model": "make_model", "data": "make_batch", "optimizer": "make_optimizer", **functions}
    line = [*LAUNCHERS[launcher], *program, "advise", "--methods", "topk", *words]
    return subprocess.Popen(
        [*line, *(word for option, name in given.items() for word in (f"--{option}", f"mine:{name}"))],
        cwd=folder,
        env=environment(launcher, **(without_tensorflow() if launcher == "horovodrun" else {})),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end_of(run, seconds):
    """Return the output; end the launch if it takes too long."""
    try:
        return run.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGTERM)
        pytest.fail(f"no end after {seconds} s: {run.communicate(timeout=30)[0][-3000:]}")


@pytest.mark.timeout(290)
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("horovodrun", marks=pytest.mark.slow)])
def test_two_ranks_measure_and_decide(tmp_path, launcher):
    run = start(tmp_path, launcher, "--rounds", "1", "--link", "10mbit", program=("topk.py",))
    output = end_of(run, 280)
    assert run.returncode == 0 and output.count("Verdict: compress with topk") == 1, output
    call = {"torchrun": "ddp.attach(model", "horovodrun": "hc.DistributedOptimizer(optimizer"}[launcher]
    for words in ("no exchange", "dense", "own fp16", "predicted at 10mbit", "which-method.md", call):
        assert words in output, output
    assert "hvdcompress: topk" not in output, "the library's own messages"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ({"optimizer": "fails_on_rank_1"}, "--optimizer mine:fails_on_rank_1 raised OSError: no such file"),
        ({"loss": "fails_later_on_rank_1"}, "raised OSError: too late"),
    ],
)
def test_an_error_on_one_rank_ends_all(tmp_path, functions, words):
    run = start(tmp_path, "torchrun", "--rounds", "1", **functions)
    output = end_of(run, 100)
    assert run.returncode == 1 and output.count(words) == 1 and "(on rank 1)" in output, output
    assert output.count("error: ") == 1, "one message, and none of ranks that were left behind"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ctrl_c_ends_all_ranks_at_once(tmp_path):
    run = start(tmp_path, "torchrun")
    next(line for line in run.stdout if line.startswith("measuring"))
    began = time.monotonic()
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    output = end_of(run, 60)
    assert time.monotonic() - began < 25, "torchrun kills what has not ended after 30 s"
    assert output.count("interrupted") == 1 and "KeyboardInterrupt" not in output, output
