"""Time to accuracy: contenders, the best training, and seconds as steps times milliseconds."""

from __future__ import annotations

import pandas as pd
import pytest

pytest.importorskip("torch")

from experiments.to_accuracy import report, run
from experiments.to_accuracy.races import RACES

COMMON = {"race": "mlp", "driver": "ddp", "device": "cpu"}


def training(contender, seed, scores):
    evaluations = [[20 * number, 1.0, score] for number, score in enumerate(scores, 1)]
    return {**COMMON, "kind": "train", "rate": None, "contender": contender, "seed": seed, "evaluations": evaluations}


def test_the_best_training_arrives_first_or_ends_better():
    worst, never, slow, fast = (training("a", 1, scores) for scores in ([80, 82], [80, 83], [80, 85], [84, 83]))
    assert run.best([slow, fast, never]) is fast
    assert run.best([worst, never]) is never
    race = RACES["lstm"]
    assert race.reached(race.target - 0.1) and not race.reached(race.target + 0.1), "bits per byte fall"


def test_seconds_are_steps_times_milliseconds():
    scores = {
        "dense": ([80, 84, 85], [80, 84, 85]), "topk@lr=2": ([84, 85, 85], [84, 85, 85]), "topk": ([80, 83, 84],),
        "fp16": ([80, 84, 85], [80, 83, 83]),
    }  # fmt: skip
    records = [training(name, seed, one) for name, seeds in scores.items() for seed, one in enumerate(seeds, 1)]
    times = {"noop": [[50.0]], "dense": [[400.0, 402.0], [398.0]], "topk": [[100.0]], "fp16": [[200.0]]}
    key = {**COMMON, "kind": "time", "rate": "1gbit"}
    records += [{**key, "contender": name, "milliseconds": turns} for name, turns in times.items()]
    ((title, rows),) = report.comparisons(pd.DataFrame(records))
    assert title == "mlp: 84 %, ddp, 4 hosts at 1gbit"
    seconds = rows.groupby("contender")["seconds"].apply(list)
    assert seconds["dense"] == [16.0, 16.0]
    assert seconds["topk"] == [2.0, 2.0]  # at the rate that was best on the first seed
    table = report.table(rows).set_index("contender")
    assert table.loc["topk", "of_dense"] == "0.12 (0.12 to 0.12)"
    assert pd.isna(table.loc["fp16", "seconds"])  # the second seed does not reach the target
