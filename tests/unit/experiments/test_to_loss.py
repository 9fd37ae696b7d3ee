"""The time that trainings take to a fixed loss, from curves that are given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.training import to_loss
from experiments.training.experiment import Experiment


def test_one_lucky_batch_is_not_enough():
    seconds = [float(n) for n in range(10)]
    assert to_loss.reached(seconds, [5, 5, 0, 5, 5, 5, 1, 1, 1, 1], 2) == 9  # (5 + 1 + 1 + 1 + 1)/5
    assert to_loss.reached(seconds, [5] * 10, 2) is None
    assert to_loss.reached([], [], 2) is None


def run(folder: Path, losses: dict[str, list[float]], seeds: tuple[int, ...] = (0,)) -> Path:
    """Trainings of some curves; each seed after the first takes a step longer to every loss."""
    tasks = [{"task": "digits", "steps": 8, "label": "digits"}]
    experiment = Experiment.open({"name": "x", "tasks": tasks, "methods": list(losses), "seeds": list(seeds)})
    (folder / "metrics").mkdir()
    experiment.save(folder / "config.yaml")
    for each in experiment.runs():
        curve = losses[each.method.label]
        curve = [curve[0]] * each.seed + curve[: len(curve) - each.seed]
        pace = 2.0 if each.method.label == "none" else 0.5
        events = [
            {"event": "step", "step": n, "loss": loss, "bytes_sent": n, "dense_bytes": n, "seconds": n * pace}
            for n, loss in enumerate(curve, 1)
        ]
        text = "\n".join(map(json.dumps, events))
        (folder / "metrics" / f"{each.id}.jsonl").write_text(text)
    return folder


def test_the_table(tmp_path):
    falling = [8.0, 7, 6, 5, 4, 3, 2, 1]
    folder = run(tmp_path, {"none": falling, "topk": falling, "fp16": [9.0] * 8})
    lines = to_loss.table(to_loss.times(folder, [("digits", 5.0)])).markdown().splitlines()
    assert lines[2:] == [
        "| digits, 5 | none | 12.0 s | 100 % | 6 |",
        "| digits, 5 | topk | 3.00 s | 25 % | 6 |",
        "| digits, 5 | fp16 | not reached | – | – |",
    ]
    with pytest.raises(ValueError, match="has no task 'bytes'; it has: digits"):
        to_loss.times(folder, [("bytes", 1.0)])


def test_several_seeds_have_a_median_and_those_that_do_not_get_there_are_counted(tmp_path):
    falling = [8.0, 7, 6, 5, 4, 3, 2, 1]
    folder = run(tmp_path, {"none": falling, "topk": falling, "fp16": [9.0, 9, 9, 9, 9, 9, 1, 1]}, seeds=(0, 1, 2))
    times = to_loss.times(folder, [("digits", 5.0), ("digits", 6.0)])
    lines = to_loss.table(times).markdown().splitlines()
    assert lines[3] == "| digits, 5 | topk | 3.50 s (3.00 s – 4.00 s) | 25 % (25 % – 25 %) | 7 (6 – 8) |"
    assert lines[7] == "| digits, 6 | fp16 | 4.00 s, not reached in 2 of 3 | 40 % | 8 |"
    picture = to_loss.picture(times, "x")
    for words in ("digits 5: topk", "digits 6: fp16", "40 %", "3 seeds"):
        assert words in picture
    assert "digits 5: fp16" not in picture, "it did not get there"
