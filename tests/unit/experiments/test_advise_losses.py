"""The adviser's second judgement: losses after the same seconds of training, dense and under a plan."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest

from experiments.advise import run, verdict, workload
from experiments.advise.choose import DENSE, Candidate, Case
from experiments.advise.losses import Curve, Trial, learns
from experiments.advise.profile import Profile
from experiments.advise.report import Report
from experiments.advise.timeline import Link, Step, Times
from experiments.advise.training import Trainings
from experiments.configfile import MethodEntry
from experiments.scale.cost import Codec
from hvdcompress.plan import load
from tests.installed import needs

SECONDS = 10.0
NOISE = 0.02
TOPK, FP16 = {"method": "topk", "density": 0.01}, {"method": "fp16"}


def curve(end, steps=200, start=3.0, seed=0, noise=NOISE, held_out=None):
    """A loss that falls from ``start`` to ``end`` in ten seconds, in steps of the same length."""
    done = np.arange(1, steps + 1) / steps
    losses = end + (start - end) * (1 - done) ** 2 + noise * np.random.default_rng(seed).standard_normal(steps)
    return Curve((SECONDS * done).tolist(), losses.tolist(), held_out)


def diverging(steps=50):
    return Curve([SECONDS * (at + 1) / 200 for at in range(steps)], [2.0] * (steps - 1) + [math.nan])


def trial(dense, curves, plan=TOPK):
    return Trial.of(load(plan).to_dict(), SECONDS, dense, curves)


def dense_curves(seeds=3):
    return [curve(1.0, seed=seed) for seed in range(seeds)]


def advice_of(topk, ratio=0.5, fp16=0.9, fp16_trial=None):
    """Advice between dense, fp16 and top-k, whose steps take these parts of a dense one's."""

    def one(label, plan, seconds, tried=None):
        return Candidate(
            label,
            plan["method"],
            load(plan),
            Step(seconds, 0.9 * seconds, 0.0, 0.0),
            1,
            1,
            measured=seconds,
            trial=tried,
        )

    case = Case({"w": (1000, 1000)}, Times({"w": 0.0}, 0.1), Link(8e6), 2, lambda method: (Codec(), Codec()))
    found = [
        one(DENSE, {"method": "none"}, 1.0),
        one("topk", TOPK, ratio, topk),
        one("fp16", FP16, fp16, fp16_trial),
    ]
    return case, verdict.advise(case, found, 0.1)


def notes_of(case, advice, **given):
    shapes = {name: list(shape) for name, shape in case.tensors.items()}
    times = {"forward": 0.0, "backward": 0.1, "update": 0.0, "ready": {"w": 0.0}}
    profile = Profile.made_of(tensors=shapes, times=times)
    return " ".join(Report(profile, case.given, 2, 1.0, advice, case, **given).notes())


# -- the verdict, from made-up curves ---------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("worse", [0.05, 0.3, 1.9])
@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_faster_per_step_and_worse_per_second_is_never_advised(ratio, worse, seeds):
    """However much shorter its steps are, and however many more of them it takes."""
    steps = int(200 / ratio)
    dense = dense_curves(seeds)
    found = trial(dense, [curve(1.0 + worse, steps, seed=10 + seed) for seed in range(seeds)])
    case, advice = advice_of(found, ratio, fp16=1.0)
    assert found.lost and advice.best is advice.dense and advice.verdict == verdict.DONT
    said = notes_of(case, advice)
    assert "is worse than dense's" in said and f"({steps} steps)" in said and "(200 steps)" in said
    for runs in (found.runs, found.dense):
        assert f"{np.mean([one.loss for one in runs]):.2f}" in said


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_plan_that_arrives_sooner_is_advised_and_says_when(seeds):
    dense = dense_curves(seeds)
    found = trial(dense, [curve(0.5, 400, seed=10 + seed) for seed in range(seeds)])
    case, advice = advice_of(found)
    assert not found.lost and advice.verdict == verdict.PLAN and advice.best.label == "topk"
    assert all(one.reached is not None and 5 < one.reached < SECONDS for one in found.runs)
    assert "topk reached dense's loss after" in notes_of(case, advice) and " of 10 s" in notes_of(case, advice)


def test_a_plan_that_diverges_is_not_advised():
    found = trial(dense_curves(), [curve(0.5), diverging(), curve(0.5)])
    case, advice = advice_of(found, fp16=1.0)
    assert found.diverged and advice.best is advice.dense and "became NaN or Inf" in advice.reason
    assert "NaN (150 steps)" in notes_of(case, advice)


# -- trials in profiles -----------------------------------------------------------------------------------


def profile_of(trials=()):
    codec = {"encode": [1e-4, 1e-9, 0.0, 0.0], "decode": [1e-4, 1e-9, 0.0, 0.0]}
    return Profile.made_of(
        ranks=2,
        tensors={"w": [1000, 1000]},
        times={"forward": 0.01, "backward": 0.02, "update": 0.001, "ready": {"w": 0.02}},
        link={"rate": 1e7, "message": 5e-05, "round": 0.001, "call": 0.0001, "overlap": 0.5},
        codecs={"topk density=0.01": codec, "fp16": codec},
        trials=[one.model_dump() for one in trials],
    )


ENTRIES = [MethodEntry.model_validate({"label": plan["method"], **plan}) for plan in (TOPK, FP16)]


def test_a_profile_keeps_trials_for_the_link_that_was_measured(tmp_path):
    lost = trial(dense_curves(), [curve(2.0), diverging(), curve(2.0)])
    profile_of([lost]).save(tmp_path / "profile.json")
    profile = Profile.open(tmp_path / "profile.json")
    assert profile.trials == [lost]
    assert run.report_of(profile_of(), ENTRIES, 0.1).advice.best.label == "topk"
    report = run.report_of(profile, ENTRIES, 0.1)
    assert report.advice.best.label == "fp16" and json.dumps(report.to_dict()["trials"])
    elsewhere = run.report_of(profile, ENTRIES, 0.1, link=run.link_of("10mbit"))
    assert elsewhere.advice.best.label == "topk" and "do not count here" in " ".join(elsewhere.notes())


# -- training, in one process -----------------------------------------------------------------------------


class OneRank:
    """Ranks of which there is one, which exchanges nothing."""

    rank, world_size = 0, 1

    def sums(self, *values):
        return list(values)

    def share(self, value):
        return [value]

    def wrap(self, model, plan, optimizer):
        return model, optimizer, None


def trainings(named=None, seconds=0.2, seeds=2, say=lambda words: None):
    return Trainings(OneRank(), workload.of(named or workload.Named(task="digits")), seconds, seeds, say)


def test_trainings_are_paired_and_as_long_as_asked():
    """Without an exchange, dense and the plan are the same training: equal losses, step by step."""
    needs("torch", "sklearn")
    said = []
    here = trainings(say=said.append)
    one, other = here.train(DENSE, None, 0), here.train("topk", load(TOPK), 0)
    count = min(len(one.losses), len(other.losses))
    assert count > 3 and list(one.losses[:count]) == list(other.losses[:count])
    assert one.seconds[-1] >= 0.2 > one.seconds[-2] and one.held_out and "seed 1 of 2" in said[0]
    assert here.train(DENSE, None, 1).losses[0] != one.losses[0]


# -- whose losses say something ---------------------------------------------------------------------------

MINE = """
import torch

def make_model():
    return torch.nn.Linear(4, 3)

def make_batch():
    x = torch.randn(8, 4)
    return x, x[:, :3].argmax(1)

def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)

def make_nothing(model):
    return None
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    needs("torch")
    (tmp_path / "losses_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda optimizer=None: workload.Named(
        model="losses_mine:make_model",
        data="losses_mine:make_batch",
        optimizer=optimizer and f"losses_mine:{optimizer}",
    )
    sys.modules.pop("losses_mine", None)


def test_a_users_model_is_trained_with_the_users_optimizer(mine):
    found = workload.of(mine("make_optimizer"))
    setups = [found.setup(rank, 2, seed) for rank, seed in ((0, 0), (1, 0), (0, 1), (0, 0))]
    weights = [setup.model.weight.detach().clone() for setup in setups]
    assert weights[0].equal(weights[1]) and not weights[0].equal(weights[2])
    batches = []
    for rank, seed in ((0, 0), (1, 0), (0, 0)):
        setup = found.setup(rank, 2, seed)
        batches.append([next(setup.batches)[0] for _ in range(2)])
    assert not batches[0][0].equal(batches[1][0]) and not batches[0][0].equal(batches[0][1])
    assert batches[0][1].equal(batches[2][1])
    dense = trainings(mine("make_optimizer"), seconds=0.3).train(DENSE, None, 0)
    assert learns([dense])
