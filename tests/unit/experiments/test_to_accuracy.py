"""Time to accuracy: contenders are read, results are kept and combined, and ranks train and are timed."""

from __future__ import annotations

import pandas as pd
import pytest

from experiments.momentum.contenders import at_rate, without_rate
from experiments.report import results

torch = pytest.importorskip("torch")

from experiments.to_accuracy import contenders, report, run  # noqa: E402
from experiments.to_accuracy.races import RACES  # noqa: E402


def training(contender, seed, scores, race="mlp"):
    evaluations = [[20 * number, 1.0, score] for number, score in enumerate(scores, 1)]
    key = {"kind": "train", "race": race, "driver": "ddp", "device": "cpu", "rate": None}
    return {**key, "contender": contender, "seed": seed, "evaluations": evaluations}


def test_a_factor_of_the_rate_comes_and_goes():
    for name in ("dense", "topk@density=0.1:plain", "topk:cancelled"):
        assert without_rate(at_rate(name, 0.5)) == name
        assert contenders.parse(at_rate(name, 0.5)).lr == 0.5


def test_the_best_training_arrives_first_or_ends_better():
    slow, fast = training("a", 1, [80, 85]), training("b", 1, [84, 83])
    never, worse = training("c", 1, [80, 83]), training("d", 1, [80, 82])
    assert run.best([slow, fast, never]) is fast
    assert run.best([worse, never]) is never


def test_text_has_to_fall_to_its_target():
    race = RACES["lstm"]
    assert race.reached(race.target - 0.1)
    assert not race.reached(race.target + 0.1)


def test_seconds_are_steps_times_milliseconds():
    records = [training("dense", seed, [80, 84, 85]) for seed in (1, 2)]
    records += [training("topk@lr=2", seed, [84, 85, 85]) for seed in (1, 2)]
    records += [training("topk", 1, [80, 83, 84])]
    records += [training("fp16", 1, [80, 84, 85]), training("fp16", 2, [80, 83, 83])]
    times = {"noop": [[50.0]], "dense": [[400.0, 402.0], [398.0]], "topk": [[100.0]], "fp16": [[200.0]]}
    key = {"kind": "time", "race": "mlp", "driver": "ddp", "device": "cpu", "rate": "1gbit"}
    records += [{**key, "contender": name, "milliseconds": turns} for name, turns in times.items()]
    ((title, rows),) = report.comparisons(pd.DataFrame(records))
    assert title == "mlp: 84 %, ddp, 4 hosts at 1gbit"
    seconds = rows.groupby("contender")["seconds"].apply(list)
    assert seconds["dense"] == [16.0, 16.0]
    assert seconds["topk"] == [2.0, 2.0]  # at the rate that was best on the first seed
    table = report.table(rows).set_index("contender")
    assert list(table.index[:2]) == ["topk", "dense"] and table.loc["topk", "of dense"] == "0.12 (0.12 to 0.12)"
    assert pd.isna(table.loc["fp16", "seconds"])  # the second seed does not reach the target


def test_the_published_results():
    found = dict(report.comparisons(results.load("to-accuracy")))
    table = report.table(found["mlp: 84 %, ddp, 4 hosts at 1gbit"])
    assert "0.88 (0.81 to 0.96)" in list(table["of the best alternative"])
