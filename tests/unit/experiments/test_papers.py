"""`experiments reproduce`: verdicts by rule, results that are kept, pages."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
from typer.testing import CliRunner

from experiments import __main__ as cli
from experiments.cluster.launch import Stopped
from experiments.papers import claims, run
from experiments.papers.claims import Kind, Scale, judge
from experiments.papers.frames import over_seeds, spread
from experiments.papers.page import PAPERS, anchor
from experiments.report import jsonl, results
from experiments.training.experiment import Task
from tests import ROOT
from tests.unit.experiments import toy_claims


def reproduce(folder, paper, jobs=1, only=()):
    run.reproduce(paper, folder, Scale(seeds=(0,)), jobs, only)
    return json.loads((folder / "papers-toy.json").read_text())["records"]


# -- verdicts ------------------------------------------------------------------------------------


def test_every_seed_must_meet_the_rule():
    assert judge({"a": [True] * 3, "b": [True] * 3}, "-").kind is Kind.HOLDS
    some = judge({"a": [True] * 3, "b": [True, True, False]}, "-")
    assert some.kind is Kind.CONDITIONS and (some.because, some.met, some.of) == ("a", 1, 2)
    none = judge({"a": [True, False], "b": [False, True]}, "seeds disagree")
    assert none.kind is Kind.FAILS and none.because == "seeds disagree"
    many = judge({**{f"c{n}": [True] for n in range(9)}, "d": [False]}, "-")
    assert many.because == "all but d"
    few = judge({**{f"c{n}": [True] for n in range(6)}, "d": [False]}, "-")
    assert few.because == "c0; c1; c2; c3; c4; c5"
    half = judge({**{f"c{n}": [True] for n in range(8)}, **{f"d{n}": [False] for n in range(8)}}, "-")
    assert half.because == "c0; c1; c2; c3; c4; c5; c6; c7"
    with pytest.raises(ValueError, match="needs conditions"):
        judge({"a": []}, "-")


def test_a_diverged_seed_is_not_averaged_away():
    frame = pd.DataFrame({"net": ["a"] * 4, "seed": [0, 0, 1, 1], "loss": [1.0, 3.0, 4.0, 6.0]})
    assert over_seeds(frame, ["net"], ["loss"]).to_dict("records") == [
        {"net": "a", "loss": 3.5, "loss least": 2.0, "loss largest": 5.0}
    ]
    frame.loc[3, "loss"] = math.nan
    assert over_seeds(frame, ["net"], ["loss"])["loss"].isna().all()
    assert spread([1.0, math.nan]) == "diverged in 1 of 2" and spread([1.0, 3.0]) == "2.00 (1.00 to 3.00)"


@pytest.mark.parametrize("id", PAPERS)
def test_names_tell_a_papers_units_apart(id):
    paper = pytest.importorskip(f"experiments.papers.{id}.claims").PAPER
    for scale in (Scale(), Scale(full=True)):
        for claim in paper.claims:
            for sets in claim.needed(scale).values():
                units = [unit for units in sets for unit in units]
                assert len({unit.name for unit in units}) == len(units)
                assert units and all(json.dumps(unit.settings) for unit in units)
                assert all(Task.model_validate(unit.settings["task"]) for unit in units if "task" in unit.settings)


# -- results that are kept -----------------------------------------------------------------------


def test_results_are_kept_and_shared(tmp_path, capsys):
    log = tmp_path / "log"
    reproduce(tmp_path / "out", toy_claims.paper(str(log)))
    assert log.read_text().split() == ["1", "2", "3"]  # both claims list the same units
    assert "[6/6]" in capsys.readouterr().out  # 3 squares; top-k twice and dense once
    reproduce(tmp_path / "out", toy_claims.paper(str(log), (1, 2, 3, 4)))
    assert log.read_text().split() == ["1", "2", "3", "4"] and "6 of 7 results are kept" in capsys.readouterr().out


STOPPED = """
import sys
from pathlib import Path
from experiments.cluster.launch import Stopped
from experiments.papers import run
from experiments.papers.claims import Scale
from tests.unit.experiments import toy_claims
if __name__ == "__main__":
    try:
        run.reproduce(toy_claims.paper({log!r}, seconds=1.5), Path({out!r}), Scale(seeds=(0,)), 2)
    except Stopped as stopped:
        sys.exit(stopped.code)
"""


def test_ctrl_c_loses_only_what_was_under_way(tmp_path):
    log, out, script = tmp_path / "log", tmp_path / "out", tmp_path / "script.py"

    def kept() -> int:
        return sum(result["key"].startswith("square") for result in jsonl.read(out / "results.jsonl"))

    script.write_text(STOPPED.format(log=str(log), out=str(out)))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        start_new_session=True,
        # a shell's background job, and what it starts, would ignore the signal
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    until = time.monotonic() + 60
    while not kept() and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(timeout=20) == 130
    before = kept()
    assert 1 <= before < 3 and not list(out.glob("papers-*"))
    with pytest.raises(ProcessLookupError):  # no worker is left
        until = time.monotonic() + 10
        while time.monotonic() < until:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    begun = log.read_text().split()
    reproduce(out, toy_claims.paper(str(log), seconds=1.5), jobs=2)
    assert len(log.read_text().split()) - len(begun) == 3 - before  # it goes on where it was interrupted


# -- results and pages ---------------------------------------------------------------------------


def test_trainings_have_two_verdicts_and_dense_ones_are_shared(tmp_path):
    records = reproduce(tmp_path, toy_claims.paper(str(tmp_path / "log")))
    assert [(record["claim"], record["momentum"]) for record in records] == [
        ("T1", ""),
        ("T2", ""),
        ("T3", "keep"),
        ("T3", "adapt"),
    ]
    assert [record["number"] for record in records[2:]] == [
        "Least: {'none': 0, 'topk': 0}.",
        "Least: {'none': 0, 'topk': 1}.",
    ]
    assert records[1]["because"] == "n = 1; n = 2" and records[1]["tables"]["Squares"][2]["square"] == 9


def test_one_claim_alone_leaves_the_others(tmp_path):
    log = str(tmp_path / "log")
    reproduce(tmp_path, toy_claims.paper(log))
    records = reproduce(tmp_path, toy_claims.paper(log, (1, 2)), only=["T2"])
    assert [record["number"] for record in records[:2]] == ["At most 9.", "At most 4."]
    assert [record["kind"] for record in records[:2]] == ["holds", "holds"]
    assert records[1]["command"] == "python -m experiments reproduce toy --quick --claims T2"
    assert records[0]["command"] == "python -m experiments reproduce toy --quick"
    with pytest.raises(ValueError, match="it has T1, T2, T3"):
        reproduce(tmp_path, toy_claims.paper(log), only=["t2"])


def test_the_command_measures_prints_and_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "find", lambda id: toy_claims.paper(str(tmp_path / "log")))
    words = ["reproduce", "toy", "--quick", "--output", str(tmp_path / "toy"), "--jobs", "1"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    for said in ("[6/6]", "Squares are below 9.", "holds under 2 of 3 conditions", "toy.json"):
        assert said in done.output

    def interrupted(*_: object) -> None:
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr(run, "reproduce", interrupted)
    stopped = CliRunner().invoke(cli.app, words)
    assert stopped.exit_code == 130 and "what is finished is kept" in stopped.stderr


def test_a_paper_that_is_unknown_is_told():
    with pytest.raises(ValueError, match="did you mean 'scalecom'"):
        claims.find("scalecomm")


@pytest.mark.parametrize("id", PAPERS)
def test_published_pages_are_short_and_complete(id):
    found = json.loads((results.FOLDER / f"papers-{id}.json").read_text())
    text = (ROOT / "docs" / "papers" / f"{id}.md").read_text()
    assert len(text.split()) <= 1500
    assert text.count("**It ") == len(found["records"]) and all(record["number"] in text for record in found["records"])
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert link.startswith("http") or (ROOT / "docs" / "papers" / link).exists(), link
    overview = (ROOT / "docs" / "papers" / "README.md").read_text()
    for record in found["records"]:
        assert f"]({id}.md#{anchor(record)}) | {record['text']} | " in overview
    paper = pytest.importorskip(f"experiments.papers.{id}.claims").PAPER
    assert text.count("*Test:*") == text.count("*Rule:*") == len(paper.claims)
    assert [claim.id for claim in paper.claims] == list(dict.fromkeys(record["claim"] for record in found["records"]))
