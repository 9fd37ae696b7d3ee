"""``hvdcompress advise``, with ranks that measure."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from experiments.advise.choose import DENSE
from experiments.advise.losses import Trial
from experiments.advise.profile import Profile
from hvdcompress.plan import load
from tests import ROOT
from tests.installed import needs


@pytest.mark.slow
@pytest.mark.timeout(290)
def test_two_ranks_measure_advise_and_check(tmp_path):
    needs("horovod", "torch")
    file = tmp_path / "profile.json"
    line = [sys.executable, "-m", "experiments", "advise", "--task", "digits", "-np", "2", "--check", "--rounds", "1"]
    line += ["--seconds", "1", "--seeds", "1"]
    line += ["--methods", "fp16,topk 1 %", "--save", str(file), "--format", "json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    measured = {row["candidate"]: row.get("measured") for row in data["candidates"]}
    assert measured[DENSE] and sum(one is not None for one in measured.values()) >= 2
    profile = Profile.open(file)
    assert profile.ranks == 2 and profile.link and profile.link.rate > 1e6 and profile.dense
    assert set(profile.times.ready) == set(profile.tensors)
    load(data["plan"])


@pytest.mark.timeout(290)
def test_it_runs_under_torchrun(tmp_path):
    needs("torch")
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line += ["-m", "experiments", "advise", "--task", "digits", "--check", "--rounds", "1", "--methods", "topk 1 %"]
    line += ["--seconds", "1", "--seeds", "1"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Verdict: ") == 1


TOPK, FP16 = {"method": "topk", "density": 0.01}, {"method": "fp16"}


RANK = f"""
from experiments.advise.fabric import join
from experiments.advise.training import Trainings
from experiments.advise.workload import TaskNet

fabric = join()
found = Trainings(fabric, TaskNet("digits"), 0.5, 1, lambda words: None).compare("topk", {TOPK}, {{}})
assert fabric.share(found)[0] == found, "all ranks have taken the same steps"
if fabric.rank == 0:
    print("FOUND", found.model_dump_json())
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_ranks_train_for_the_same_seconds(tmp_path):
    needs("torch", "sklearn")
    (tmp_path / "rank.py").write_text(RANK)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*line, str(tmp_path / "rank.py")], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    [words] = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found = Trial.model_validate_json(words)
    assert found.seconds == 0.5 and all(one.loss is not None for one in (*found.dense, *found.runs))
