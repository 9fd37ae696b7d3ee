"""Trainings: what is refused before anything starts, what a resumed run keeps, and tables from records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments import __main__ as cli
from experiments.cluster import launch
from experiments.report import folders, jsonl
from experiments.training import report
from experiments.training.experiment import Experiment
from experiments.training.run import prepare
from tests import SMALL_EXPERIMENT


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("method: topk", "method: tokp", "line 3: methods.1.method: unknown method 'tokp' (did you mean 'topk'?)"),
        ("density: 0.01", "density: 1.5", "line 3: methods.1.density"),
        ("task: digits", "task: digit", "line 2: tasks.0.task: unknown task 'digit' (did you mean 'digits'?)"),
        ("task: digits", "task: digits, net: lenet", "line 2: tasks.0.net: no net 'lenet' learns 'digits'"),
        ("task: digits", "task: digits, net: byte_lstm", "these do: digits_net"),
        ("task: digits", "task: digits, clip: before", "line 2: tasks.0.clip: must be after"),
    ],
)
def test_a_bad_experiment_starts_nothing(config, monkeypatch, old, new, words):
    monkeypatch.setattr(launch, "Ranks", lambda *_: pytest.fail("ranks were started"))
    config.write_text(SMALL_EXPERIMENT.replace(old, new), encoding="utf-8")
    result = CliRunner().invoke(cli.app, ["run", str(config)])
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output
    assert not Path("runs").exists()


def test_a_resumed_run_keeps_what_is_finished_and_only_that(config, tmp_path):
    experiment, folder = Experiment.open(config), tmp_path / "out"
    prepare(folder, experiment, "ddp", "here")
    for run, end in zip(experiment.runs(), ("finished", "failed"), strict=True):
        for event in (
            {"event": "start", "spec": run.spec(), "launch": {"driver": "ddp", "link": "here"}},
            {"event": end},
        ):
            jsonl.append(folder / "metrics" / f"{run.id}.jsonl", event)
    prepare(folder, experiment, "ddp", "here")
    assert [file.name for file in (folder / "metrics").iterdir()] == ["digits.none.0.jsonl"]
    with pytest.raises(ValueError, match=r"other settings, \{'task': .*'steps': 20"):
        prepare(folder, experiment.override(steps=30), "ddp", "here")
    with pytest.raises(ValueError, match=r"other settings, \{'launch': .*'link': 'here'"):
        prepare(folder, experiment, "ddp", "4 hosts")


def test_a_new_folder_for_every_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert folders.choose("x") == Path("runs/x")
    for name in ("x", "x-2", "x-10", "xy"):
        Path("runs", name).mkdir(parents=True)
    assert folders.choose("x").name == "x-11"
    assert folders.choose("x", resume=True).name == "x-10"
    with pytest.raises(ValueError, match="give --resume to go on"):
        folders.choose("x", Path("runs"))
    with pytest.raises(ValueError, match="nothing to resume"):
        folders.choose("z", resume=True)


def test_lines_that_were_cut_off_are_skipped(tmp_path):
    file = tmp_path / "x.jsonl"
    assert jsonl.read(file) == []
    jsonl.append(file, {"n": 1})
    with file.open("ab") as stream:
        stream.write('\n{"n": "é'.encode()[:-1])  # in the middle of a character, even
    assert jsonl.read(file) == [{"n": 1}]
    jsonl.append(file, {"n": 2})
    assert jsonl.read(file) == [{"n": 1}, {"n": 2}]


# -- tables ----------------------------------------------------------------------------------------

CONFIG = """\
name: made
seeds: [0, 1, 2]
tasks: [{task: digits, steps: 100}]
methods: [none, {method: topk, label: few, density: 0.01}, fp16]
"""


@pytest.fixture
def folder(tmp_path):
    """Three seeds of none and few are finished, fp16 has failed once, was interrupted once, and never began once."""
    folder = tmp_path / "made"
    (folder / "metrics").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    for run in Experiment.open(folder / "config.yaml").runs():
        label = run.method.label
        score, sent = {"none": (98.0 + run.seed, 4000), "few": (97.5 + 0.9 * run.seed, 40)}.get(label, (0, 2000))
        start = {"event": "start", "spec": run.spec(), "parameters": 1000, "versions": {"framework": "PyTorch 2"}}
        start |= {"launch": {"driver": "ddp", "link": "shared memory"}}
        steps = [{"event": "step", "step": s, "loss": 2 / s, "score": score} for s in range(10, 101, 10)]
        finished = {
            "event": "finished", "score": score, "step_s": 0.011, "codec_s": 0.002, "computing_s": 0.008,
            "sent_bytes": sent, "wire_bytes": sent, "dense_bytes": 4000,
        }  # fmt: skip
        events = [start, *steps, finished]
        if label == "fp16":
            events = ([start, {"event": "failed", "error": "rank 1: ValueError: no"}], [start, steps[0]], [])[run.seed]
        for event in events:
            jsonl.append(folder / "metrics" / f"{run.id}.jsonl", event)
    return folder


def test_a_table_has_means_paired_differences_and_predictions(folder):
    head, _, none, few, fp16 = report.table(report.records([folder]), "digits").splitlines()
    cells = {name: [cell.strip() for cell in line.strip("|").split("|")] for name, line in
             {"head": head, "none": none, "few": few, "fp16": fp16}.items()}  # fmt: skip
    few = dict(zip(cells["head"], cells["few"], strict=True))
    assert few["ratio"] == "100x" and few["accuracy, %"] == "98.40" and few["step, measured"] == "11.0 ms"
    assert few["against dense"] == "−0.60 (−0.77 to −0.43)"  # -0.5, -0.6 and -0.7: t of two degrees, 90 %
    assert few["predicted, 100 Mbit/s"] == "10.0 ms"
    assert cells["none"][cells["head"].index("predicted, 100 Mbit/s")] == "10.3 ms"  # 8 + 2 + 0.33
    assert cells["fp16"][0] == "fp16 (3 of 3 not finished)" and set(cells["fp16"][1:]) == {"–"}


def test_a_report_of_runs_that_are_not_finished_either(folder, capsys):
    report.publish([folder], folder)
    text = (folder / "table.md").read_text()
    assert text in capsys.readouterr().out and "fp16: rank 1: ValueError: no" in text
    assert len(json.loads((folder / "records.json").read_text())["records"]) == 9
    assert "few" in (folder / "scores.svg").read_text()
    for file in (folder / "metrics").iterdir():
        file.unlink()
    report.publish([folder], folder)
    assert "none (3 of 3 not finished)" in (folder / "table.md").read_text()
    with pytest.raises(ValueError, match="holds no training"):
        report.publish([folder / "metrics"], folder)
