"""Seconds to the target: steps of the trainings times milliseconds of the timings, and how contenders compare.

Contenders of a seed start from the same weights and draw the same batches. Intervals are those of a t-test at 90 % over
the seeds; a ratio's is that of the seeds' paired ratios.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from experiments.attach import DENSE
from experiments.momentum.contenders import without_rate
from experiments.to_accuracy.races import RACES, parse
from experiments.to_accuracy.run import best, reached
from hvdcompress.cli.numbers import mean_interval

SCORED = 5  #: the score is the mean of so many last evaluations
COMPARISON = ["race", "device", "driver", "rate"]
TRAINED = ["lr", "seed", "step", "score", "seconds", "evaluations"]


def outcomes(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per race, link, contender and seed: ``milliseconds`` of a step, ``step``, ``seconds``, ``score``.

    ``p95`` and ``longest`` are the 95th percentile and the maximum of the milliseconds; ``processor`` is the mean of
    those of rank 0 on a processor.

    A contender that was timed but not trained has one row without a seed. Of several learning rates, the one counts
    that reached the target first on the first seed.

    Args:
        frame: records of :mod:`run`, or ``results.load("to-accuracy")``.
    """
    trained: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in frame[frame["kind"] == "train"].to_dict("records"):
        key = record["race"], record["driver"], without_rate(record["contender"])
        trained.setdefault(key, []).append(record)
    rows = []
    times = frame[frame["kind"] == "time"].drop_duplicates([*COMPARISON, "contender"], keep="last")
    for record in times.to_dict("records"):
        name, race = record["contender"], RACES[record["race"]]
        row = {key: record[key] for key in (*COMPARISON, "contender")}
        times_of_steps = np.concatenate(record["milliseconds"])
        # a mean, where few steps have all the communication
        usual = np.mean if parse(name, race.task).local else np.median
        row["milliseconds"], row["p95"] = float(usual(times_of_steps)), float(np.percentile(times_of_steps, 95))
        row["longest"] = float(times_of_steps.max())
        if isinstance(record.get("processor"), list):
            row["processor"] = float(np.concatenate(record["processor"]).mean())
        # all drivers exchange the same, so trainings under DDP serve for Horovod's times, too
        runs = trained.get((record["race"], record["driver"], name)) or trained.get((record["race"], "ddp", name), [])
        first = [run for run in runs if run["seed"] == min(each["seed"] for each in runs)]
        chosen = best(first)["contender"] if runs else name
        seeds = {run["seed"]: run for run in runs if run["contender"] == chosen}
        for seed, run in sorted(seeds.items()):
            step = reached(run) or math.nan
            more = {"lr": parse(chosen, race.task).lr, "seed": seed, "step": step, "evaluations": run["evaluations"]}
            rows.append(
                {**row, **more, "score": score_of(run["evaluations"]), "seconds": step * row["milliseconds"] / 1000}
            )
        if not seeds:
            rows.append(row)
    return pd.DataFrame(
        rows, columns=[*COMPARISON, "contender", "milliseconds", "p95", "longest", "processor", *TRAINED]
    )


def score_of(evaluations: list[list[float]], steps: float = math.inf) -> float:
    """Return the mean score of the last evaluations in the first steps; NaN if there are none."""
    return float(pd.Series([score for step, _, score in evaluations if step <= steps][-SCORED:]).mean())


def comparisons(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the title and the outcomes of each race, device, driver and link."""
    for (name, device, driver, rate), rows in outcomes(frame).groupby(COMPARISON):
        race = RACES[name]
        target = f"{race.target:g} {'%' if race.task.metric.higher_is_better else 'bits'}"
        on = ", on a GPU" if device == "cuda" else ""
        yield f"{name}: {target}, {driver}, {race.ranks} hosts at {rate}{on}", rows


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per contender of a comparison, the first one to arrive at the top.

    Steps and seconds are means over the seeds, and NaN if one of them has not reached the target. ``at_equal_time`` is
    the score at the time when the contender with the fastest steps ends its training. The last column is the seconds as
    a share of those of dense training: mean and 90 % interval over the seeds.
    """

    def mean(values: pd.Series) -> float:
        return float(values.mean(skipna=False))

    def spread(values: pd.Series) -> str:
        return "{:.2f} ({:.2f} to {:.2f})".format(*mean_interval(values.dropna().tolist()))

    dense = rows[rows["contender"] == DENSE].set_index("seed")["seconds"]
    trained = rows.dropna(subset="evaluations")
    end = min((row.evaluations[-1][0] * row.milliseconds for row in trained.itertuples()), default=math.nan)
    equal = pd.Series({row.Index: score_of(row.evaluations, end / row.milliseconds) for row in trained.itertuples()})
    rows = rows.assign(of_dense=rows["seconds"] / rows["seed"].map(dense), at_equal_time=equal)
    found = rows.groupby("contender", sort=False)
    table = found.agg(
        milliseconds=("milliseconds", "first"),
        p95=("p95", "first"),
        longest=("longest", "first"),
        processor=("processor", "first"),
        rate=("lr", "first"),
        seeds=("seed", "count"),
        steps=("step", mean),
        seconds=("seconds", mean),
        score=("score", "mean"),
        at_equal_time=("at_equal_time", "mean"),
        of_dense=("of_dense", spread),
    )
    return table.sort_values("seconds").reset_index()
