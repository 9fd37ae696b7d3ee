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

from experiments.cluster.rates import Rate
from experiments.momentum.contenders import DENSE, without_rate
from experiments.report import statistics, tables
from experiments.to_accuracy.contenders import FP16, NOOP, baseline_of, parse
from experiments.to_accuracy.races import RACES
from experiments.to_accuracy.run import best, reached

__all__ = ["comparisons", "outcomes", "table"]

SCORED = 5  #: the score is the mean of so many last evaluations
COMPARISON = ["race", "device", "driver", "rate"]


def outcomes(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per race, link, contender and seed: ``milliseconds`` of a step, ``step``, ``seconds``, ``score``.

    A contender that was timed but not trained has one row without a seed. Of several learning rates, the one counts
    that reached the target first on the first seed.

    Args:
        frame: records of :mod:`run`, or ``results.load("to-accuracy")``.
    """
    trained: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    # accuracy per step does not depend on the link: of two trainings, the one without a link comes last, and counts
    for record in frame[frame["kind"] == "train"].sort_values("rate").to_dict("records"):
        key = record["race"], record["driver"], without_rate(record["contender"])
        trained.setdefault(key, []).append(record)
    rows = []
    times = frame[frame["kind"] == "time"].drop_duplicates([*COMPARISON, "contender"], keep="last")
    for record in times.to_dict("records"):
        name, race = record["contender"], RACES[record["race"]]
        row = {key: record[key] for key in (*COMPARISON, "contender")}
        row["milliseconds"] = float(np.median(np.concatenate(record["milliseconds"])))
        # all drivers exchange the same, so trainings under DDP serve for Horovod's times, too
        runs = trained.get((record["race"], record["driver"], name)) or trained.get((record["race"], "ddp", name), [])
        first = [run for run in runs if run["seed"] == min(each["seed"] for each in runs)]
        chosen = best(first)["contender"] if runs else name
        seeds = {run["seed"]: run for run in runs if run["contender"] == chosen}
        for seed, run in sorted(seeds.items()):
            step = reached(run) or math.nan
            score = np.mean([score for _, _, score in run["evaluations"][-SCORED:]])
            more = {"lr": parse(chosen, race.task).lr, "seed": seed, "step": step, "score": float(score)}
            rows.append({**row, **more, "seconds": step * row["milliseconds"] / 1000})
        if not seeds:
            rows.append(row)
    return pd.DataFrame(rows)


def comparisons(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the title and the outcomes of each race, driver and link; the slowest links first."""
    found = outcomes(frame)
    order = {race: number for number, race in enumerate(RACES)}
    keys = found[COMPARISON].drop_duplicates()
    keys["order"], keys["speed"] = keys["race"].map(order), keys["rate"].map(lambda rate: Rate.parse(rate).slower)
    for _, key in keys.sort_values(["order", "device", "driver", "speed"]).iterrows():
        rows = found[(found[COMPARISON] == key[COMPARISON]).all(axis=1)]
        race = RACES[key["race"]]
        target = f"{race.target:g} {'%' if race.task.metric.higher_is_better else 'bits'}"
        on = ", on a GPU" if key["device"] == "cuda" else ""
        yield f"{key['race']}: {target}, {key['driver']}, {race.task.ranks} hosts at {key['rate']}{on}", rows


def arrivals(rows: pd.DataFrame) -> pd.Series:
    """Return the mean seconds of a comparison's contenders that reach the target on every seed, the first one first."""
    seconds = rows.dropna(subset="seed").groupby("contender")["seconds"].agg(lambda each: each.mean(skipna=False))
    return seconds.dropna().sort_values()


def table(rows: pd.DataFrame) -> str:
    """Return the Markdown table of a comparison, the first contender to arrive at the top."""
    there = arrivals(rows)
    others = [name for name in there.index if baseline_of(name) not in (None, NOOP) and "@" not in name]
    references = {"of the best alternative": others[0] if others else "", "of dense": DENSE, "of fp16": FP16}
    digits = 1 if RACES[rows["race"].iloc[0]].task.metric.higher_is_better else 3
    out = []
    for name, group in rows.groupby("contender", sort=False):
        trained = group.dropna(subset="seed")
        row = {"contender": name, "ms per step": f"{group['milliseconds'].iloc[0]:.0f}"}
        row["rate"] = f"{trained['lr'].iloc[0]:g}" if len(trained) else None
        row["steps"] = ", ".join(tables.MISSING if math.isnan(s) else f"{s:.0f}" for s in trained["step"]) or None
        row["seconds"] = f"{there[name]:.1f}" if name in there else "not reached" if len(trained) else None
        for title, reference in references.items():
            base = rows[rows["contender"] == reference].set_index("seed")["seconds"]
            ratios = (trained.set_index("seed")["seconds"] / base).dropna() if name in there else []
            if len(ratios):
                mean, low, high = statistics.interval(ratios)
                row[title] = f"{mean:.2f}" + (f" ({low:.2f} to {high:.2f})" if len(ratios) > 1 else "")
        row["score at the end"] = f"{trained['score'].mean():.{digits}f}" if len(trained) else None
        out.append({**row, "_order": -1.0 if name == NOOP else there.get(name, math.inf)})
    columns = ["contender", "ms per step", "rate", "steps", "seconds", *references, "score at the end"]
    return tables.markdown(pd.DataFrame(out).sort_values("_order", kind="stable").reindex(columns=columns))
