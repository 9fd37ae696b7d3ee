"""Time to accuracy: contenders are read, results are kept and combined, and ranks train and are timed."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from experiments.to_accuracy import contenders, report, run  # noqa: E402
from experiments.to_accuracy.__main__ import app  # noqa: E402
from experiments.to_accuracy.races import RACES  # noqa: E402


def training(contender, seed, scores, race="mlp", rate=None):
    evaluations = [{"step": 20 * number, "seconds": 1.0, "score": score} for number, score in enumerate(scores, 1)]
    key = {"race": race, "driver": "ddp", "contender": contender, "seed": seed, "rate": rate}
    return {**key, "evaluations": evaluations}


def test_a_factor_of_the_rate_comes_and_goes():
    for name in ("dense", "topk@density=0.1:plain", "topk:cancelled"):
        assert contenders.without_rate(contenders.at_rate(name, 0.5)) == name
        assert contenders.parse(contenders.at_rate(name, 0.5)).lr == 0.5


def test_the_best_training_arrives_first_or_ends_better():
    slow, fast = training("a", 1, [80, 85]), training("b", 1, [84, 83])
    never, worse = training("c", 1, [80, 83]), training("d", 1, [80, 82])
    assert run.best([slow, fast, never]) is fast
    assert run.best([worse, never]) is never


def test_text_has_to_fall_to_its_target():
    race = RACES["lstm"]
    assert race.reached(race.target - 0.1)
    assert not race.reached(race.target + 0.1)


def keep(folder, kind, records):
    (folder / kind).mkdir()
    for number, record in enumerate(records):
        (folder / kind / f"{number}.json").write_text(json.dumps(record))


def test_seconds_are_steps_times_milliseconds(tmp_path):
    trainings = [training("dense", seed, [80, 84, 85]) for seed in (1, 2)]
    trainings += [training("topk@lr=2", seed, [84, 85, 85]) for seed in (1, 2)]
    trainings += [
        training("topk", 1, [80, 83, 84]),
        training("fp16", 1, [80, 84, 85]),
        training("fp16", 2, [80, 83, 83]),
    ]
    keep(tmp_path, "train", trainings)
    times = {"noop": [[50.0]], "dense": [[400.0, 402.0], [398.0]], "topk": [[100.0]], "fp16": [[200.0]]}
    keep(tmp_path, "time", [{"race": "mlp", "driver": "ddp", "rate": "1gbit", "measured": times}])
    (comparison,) = report.comparisons(tmp_path)
    entries = comparison.entries
    assert entries["dense"].seconds == {1: 16.0, 2: 16.0}
    assert entries["topk"].seconds == {1: 2.0, 2: 2.0}  # at the rate that was best on the first seed
    assert not entries["fp16"].arrives  # the second seed does not
    assert comparison.alternative is entries["dense"]
    table = report.markdown([comparison])
    assert "0.12 (0.12 to 0.12)" in table
    assert "not reached" in table
    saved, plot = tmp_path / "all.json", tmp_path / "plot.svg"
    done = CliRunner().invoke(app, ["report", "--folder", str(tmp_path), "--save", str(saved), "--plot", str(plot)])
    assert done.exit_code == 0 and table in done.output
    assert report.markdown(report.comparisons(saved)) == table
    assert "PowerSGD" not in plot.read_text() and "top-k, 1 %" in plot.read_text()
