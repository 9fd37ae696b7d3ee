"""``experiments reproduce``: verdicts by rule, results that are kept, and the command, with a paper of toy claims."""

from __future__ import annotations

import json
import math
from itertools import chain

import pandas as pd
import pytest
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.papers import command
from experiments.papers.claims import Kind, Paper, Verdict, judge, over_seeds
from experiments.papers.command import PAPERS
from experiments.report import results
from experiments.training.experiment import Task
from experiments.units import Unit


def square(number, seed, log):
    """Measure of the toy claims: it writes each call to a log."""
    with open(log, "a") as stream:
        stream.write(f"{number}\n")
    return {"square": number * number}


def train(method, seed, momentum="keep"):
    return [{"step": step, "loss": step + (momentum == "adapt")} for step in range(2)]


def paper(log, numbers=(1, 2, 3)):
    """Squares are positive (true), and below 9 (true of some); both claims share their units. Losses fall (false)."""
    made = Paper("toy", [])

    def squares():
        return [Unit(square, {"number": n, "log": str(log)}, {"number": n}) for n in numbers]

    def trainings():
        return [Unit(train, {"method": {"method": id}}, {"method": id}) for id in ("none", "topk")]

    def below(limit, frame):
        cells = {f"n = {row.number}": [row.square < limit] for row in frame.itertuples()}
        return Verdict(judge(cells, "no square is"), f"At most {frame.square.max()}.")

    def fall(frame):
        least = frame.groupby("method")["loss"].min().to_dict()
        return Verdict(judge({"all": [False]}, "losses rise"), f"Least: {least}.")

    made.claim("T1", "Squares are positive.", squares)(lambda frame: below(1e9, frame))
    made.claim("T2", "Squares are below 9.", squares)(lambda frame: below(9, frame))
    made.claim("T3", "Losses fall.", trainings, trains=True)(fall)
    return made


def reproduce(folder, paper, jobs=1, only=()):
    return command.measured(paper, folder, (0,), jobs, only)


@pytest.mark.parametrize(
    "cells,kind,because",
    [
        ({"a": [True] * 3, "b": [True] * 3}, Kind.HOLDS, ""),
        ({"a": [True] * 3, "b": [True, True, False]}, Kind.CONDITIONS, "a"),  # every seed must meet the rule
        ({"a": [True, False], "b": [False, True]}, Kind.FAILS, "otherwise"),
        ({**{n: [True] for n in "efghijk"}, "d": [False]}, Kind.CONDITIONS, "all but d"),
        ({**{n: [True] for n in "efghij"}, "d": [False]}, Kind.CONDITIONS, "e; f; g; h; i; j"),
        ({n: [n < "i"] for n in "abcdefghijklmnop"}, Kind.CONDITIONS, "a; b; c; d; e; f; g; h"),
    ],
)
def test_judge_names_the_conditions_that_are_met(cells, kind, because):
    found = judge(cells, "otherwise")
    assert (found.kind, found.because, found.of) == (kind, because, len(cells))
    with pytest.raises(ValueError, match="needs conditions"):
        judge({**cells, "without seeds": []}, "otherwise")


def test_a_diverged_seed_is_not_averaged_away():
    frame = pd.DataFrame({"net": ["a"] * 4, "seed": [0, 0, 1, 1], "loss": [1.0, 3.0, 4.0, 6.0]})
    (row,) = over_seeds(frame, ["net"], ["loss"]).to_dict("records")
    assert row == {"net": "a", "loss": 3.5, "loss least": 2.0, "loss largest": 5.0}
    frame.loc[3, "loss"] = math.nan
    assert over_seeds(frame, ["net"], ["loss"])["loss"].isna().all()


@pytest.mark.parametrize("id", PAPERS)
def test_units_of_each_paper_have_different_names_and_published_results(id):
    paper = pytest.importorskip(f"experiments.papers.{id}.claims").PAPER
    for claim in paper.claims:
        for units in (list(chain(*sets)) for sets in claim.needed((0,)).values()):
            assert units and len({unit.name for unit in units}) == len({unit.key for unit in units})
            assert all(Task.model_validate(unit.settings["task"]) for unit in units if "task" in unit.settings)
    published = json.loads((results.FOLDER / f"papers-{id}.json").read_text())["records"]
    assert [claim.id for claim in paper.claims] == list(dict.fromkeys(record["claim"] for record in published))


def test_results_are_kept_and_shared(tmp_path):
    log = tmp_path / "log"
    records = reproduce(tmp_path, paper(log))
    assert log.read_text().split() == ["1", "2", "3"], "both claims list the same units"
    assert [(each["claim"], each["momentum"]) for each in records] == [
        ("T1", ""), ("T2", ""), ("T3", "keep"), ("T3", "adapt"),
    ]  # fmt: skip
    (first, *_), (square, *_) = (record["tables"][0] for record in records[:2])
    assert first == square and first["square"] == 1, "medians by the units' labels"
    assert [each["number"] for each in records[2:]] == [f"Least: {{'none': 0, 'topk': {n}}}." for n in (0, 1)]

    reproduce(tmp_path, paper(log, (1, 2)), only=["T2"])
    records = json.loads((tmp_path / "papers-toy.json").read_text())["records"]
    assert [each["number"] for each in records[:2]] == ["At most 9.", "At most 4."], "T1 is left as it was"
    with pytest.raises(ValueError, match="it has T1, T2, T3"):
        reproduce(tmp_path, paper(log), only=["t2"])


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_results_are_kept_when_a_measurement_fails(tmp_path, jobs):
    log = tmp_path / "log"
    with pytest.raises(TypeError, match="NoneType"):
        reproduce(tmp_path, paper(log, (1, 2, None)), jobs)
    assert not list(tmp_path.glob("papers-*"))
    reproduce(tmp_path, paper(log, (1, 2)), jobs)
    assert sorted(log.read_text().split()) == ["1", "2", "None"]


def test_the_command_measures_prints_and_writes(tmp_path, monkeypatch):
    from experiments.papers.peers import claims

    monkeypatch.setattr(claims, "PAPER", paper(tmp_path / "log"))
    words = ["reproduce", "peers", "--quick", "--output", str(tmp_path / "toy"), "--jobs", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "holds under 2 of 3 conditions" in done.output, done.output
    assert (tmp_path / "toy" / "papers-toy.json").exists()
