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
from matplotlib.figure import Figure

from experiments.cluster.rates import Rate
from experiments.report import plots, statistics, tables
from experiments.to_accuracy.contenders import DENSE, FP16, NOOP, baseline_of, parse, without_rate
from experiments.to_accuracy.races import RACES
from experiments.to_accuracy.run import best, reached

__all__ = ["comparisons", "outcomes", "picture", "table"]

SCORED = 5  #: the score is the mean of so many last evaluations
COMPARISON = ["race", "device", "driver", "rate"]
LABELS = {
    "dense": "dense",
    "fp16": "PyTorch's fp16 hook",
    "ddp_powersgd_r1": "PyTorch's PowerSGD hook, rank 1",
    "ddp_powersgd_r2": "PyTorch's PowerSGD hook, rank 2",
    "ddp_powersgd_r4": "PyTorch's PowerSGD hook, rank 4",
    "acpsgd@matrix_rank=8": "ACP-SGD, rank 8",
    "acpsgd_r4": "ACP-SGD, rank 4",
    "powersgd_r4": "PowerSGD, rank 4",
    "topk": "top-k, 1 %",
    "topk@values=qsgd4": "auto (top-k, 1 %, 4 bits)",
    "topk@density=0.002": "top-k, 0.2 %",
    "scalecom_48x": "ScaleCom, 48x",
}


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


def picture(frame: pd.DataFrame, race: str = "mlp", driver: str = "ddp", device: str = "cpu") -> Figure:
    """Draw seconds to the target: a panel per link, a bar per contender that arrives over every link, a mark per seed.

    Args:
        frame: see :func:`outcomes`.
        race: a key of ``RACES``.
        driver: who exchanged gradients.
        device: where the net computed.
    """
    found = outcomes(frame)
    found = found[(found["race"] == race) & (found["driver"] == driver) & (found["device"] == device)]
    links = sorted(found["rate"].unique(), key=lambda rate: Rate.parse(rate).slower)
    there = {link: arrivals(found[found["rate"] == link]) for link in links}
    names = [name for name in there[links[0]].index if name != NOOP and all(name in each for each in there.values())]
    drawn, panels = plots.figure(len(links), columns=len(links), height=0.24 * len(names) + 0.9, share_y=True)
    for axes, link in zip(panels, links, strict=True):
        means = there[link][names]
        shown = means[means < 4 * means.min()].max()  # longer bars are cut, with their seconds
        for line, (name, mean) in enumerate(means.items()):
            axes.barh(line, mean, color="C1" if baseline_of(name) else "C0", height=0.6)
            if mean > shown:
                axes.text(1.28 * shown, line, f"{mean:.0f} …", ha="right", va="center", fontsize=8, color="white")
                continue
            seconds = found[(found["rate"] == link) & (found["contender"] == name)]["seconds"]
            axes.scatter(seconds, [line] * len(seconds), color="black", s=5, zorder=3)
        axes.set(xlim=(0, 1.3 * shown), xlabel="seconds", title=str(Rate.parse(link)))
        axes.grid(visible=False, axis="y")
    panels[0].set_yticks(range(len(names)), [LABELS.get(name, name) for name in names])
    panels[0].invert_yaxis()
    return drawn
