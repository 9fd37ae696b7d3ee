"""Variables and pictures of the pages that are about no single experiment: README and "Which method?"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.momentum import report as study
from experiments.report import plots, results
from experiments.to_accuracy import report

DOCS = Path(__file__).resolve().parent
#: contender of experiments/results/to-accuracy.json -> its name on the pages
NAMES = {
    "dense": "dense",
    "fp16": "PyTorch's fp16 hook",
    "ddp_powersgd_r4": "PyTorch's PowerSGD hook, rank 4",
    "acpsgd@matrix_rank=8": "ACP-SGD, rank 8",
    "auto": "auto",
    "noop": "no communication",
}
COMPRESSED = {"topk@values=qsgd4", "topk@values=qsgd4,beta1=0"}  #: what ``auto`` does where it is not given up
RACES = {
    "mlp": "MLP, 5.8 million parameters: 84 %",
    "cnn": "convolutions, 3.2 million: 80 %",
    "lstm": "LSTM, 2.0 million: 2.7 bits",
    "transformer": "transformer, 1.8 million, AdamW: 3.0 bits",
}
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}


def which_method(page: str) -> dict[str, Any]:
    """Return the tables, the numbers and the picture of "Which method?"."""
    frame = times()
    host = frame[(frame.device == "cpu") & (frame.driver == "ddp")]
    one = host[(host.rate == "1gbit") & host.race.isin(list(RACES))]
    mlp = host[host.race == "mlp"]
    return {
        "by_net": pivot(one, "race", RACES, "training"),
        "by_link": pivot(mlp, "rate", LINKS, "link"),
        "at": lambda race, contender: one[(one.race == race) & (one.contender == contender)].iloc[0],
        "seconds": picture(mlp),
    }


def readme(page: str) -> dict[str, Any]:
    """Return the numbers of README: those of "Which method?", without its picture."""
    return {name: value for name, value in which_method(page).items() if not isinstance(value, Figure)}


def times() -> pd.DataFrame:
    """Return a row per training, link and contender. ``assumed``: seconds are those of dense training's steps."""
    where = ["race", "driver", "rate", "device"]
    runs = report.outcomes(results.load("to-accuracy"))
    # auto is its method where compression is kept, and was timed as such where it is given up
    runs.loc[runs.contender.isin(COMPRESSED) & (runs.rate != "10gbit"), "contender"] = "auto"
    dense = runs[runs.contender == "dense"].set_index([*where, "seed"]).seconds.rename("dense_seconds")
    runs = runs.join(dense, on=[*where, "seed"])
    runs["of_dense"] = runs.seconds / runs.dense_seconds
    frame = runs.groupby([*where, "contender"], sort=False, as_index=False).agg(
        milliseconds=("milliseconds", "first"),
        seeds=("seed", "count"),
        seconds=("seconds", lambda seconds: seconds.mean(skipna=False)),
        of_dense=("of_dense", "mean"),
        score=("score", "mean"),
    )
    rows = frame[frame.contender == "dense"].set_index(where)
    frame = frame.join((rows.seconds / rows.milliseconds).rename("dense_steps"), on=where)
    frame["assumed"] = frame.contender.isin(["fp16", "auto", "noop"]) & frame.seconds.isna()
    frame.loc[frame.assumed, "seconds"] = frame.milliseconds * frame.dense_steps
    return frame


def pivot(frame: pd.DataFrame, index: str, names: dict[str, str], title: str) -> pd.DataFrame:
    """Return a table of seconds to the target: a row per value of ``index``, a column per contender."""
    out = []
    for value, name in names.items():
        rows = frame[frame[index] == value].set_index("contender", drop=False)
        cells = {title: name}
        for contender, label in NAMES.items():
            cells[label] = cell(rows.loc[contender]) if contender in rows.index else "–"
        cells["auto"] = f"**{cells['auto']}**"
        out.append(cells)
    return pd.DataFrame(out)


def cell(row: pd.Series) -> str:
    """Return seconds, with a star where the number of steps is that of dense training."""
    if pd.isna(row.seconds):
        return "not reached" if row.seeds else "–"
    return f"{row.seconds:.0f}{' *' if row.assumed and row.contender == 'fp16' else ''}"


def picture(frame: pd.DataFrame) -> Figure:
    """Draw seconds to the target against the link's speed."""
    drawn, (ax,) = plots.figure(1, height=3.2)
    for number, (contender, label) in enumerate(NAMES.items()):
        rows = frame[frame.contender == contender].set_index("rate").reindex(list(LINKS))
        grey = contender in ("dense", "noop")
        ax.plot(
            list(LINKS.values()),
            rows.seconds,
            color={"dense": "0.35", "noop": "0.65"}.get(contender, f"C{number - 1}"),
            linestyle="--" if grey else "-",
            linewidth=3 if contender == "auto" else 1.5,
            marker="o",
            markersize=4,
            label=label,
        )
    ax.set(yscale="log", xlabel="speed of the links", ylabel="seconds to 84 % (less is better)")
    ax.set_yticks([20, 50, 100, 200, 500], ["20", "50", "100", "200", "500"])
    ax.minorticks_off()
    drawn.legend(loc="outside lower center", ncols=3)
    return drawn


def momentum(page: str) -> dict[str, Any]:
    """Return the tables and the picture of "Momentum"."""
    gaps = results.load("momentum-gaps")
    bits = set(gaps.task[gaps.unit == "bits"])
    gaps["cell"] = [
        f"{row.score:g} {row.unit}"
        if pd.isna(row.gap)
        else interval(row.gap, row.high - row.gap, 3 if row.task in bits else 2, bool(row.passes))
        for row in gaps.itertuples()
    ]
    rates = results.load("momentum-largest-rate").dropna(subset="optimizer_momentum")
    rates["column"] = rates.net + ", " + rates.optimizer_momentum
    rates["cell"] = ["diverged" if row.diverged else signed(row.gap, 1) for row in rates.itertuples()]
    return {
        "gaps": wide(gaps, "contender", "task"),
        "largest_rate": wide(rates, "method", "column"),
        "scores": study.picture(results.load("momentum")),
    }


def results_page(page: str) -> dict[str, Any]:
    """Return the table of "Results": ratio and loss of each method on both tasks."""
    frame = results.load("training-all-methods")
    text, digits = (frame[frame.task == task].set_index("method") for task in ("bytes", "digits"))
    table = pd.DataFrame(
        {
            "method": method,
            "compression ratio": f"{row.ratio:.3g}x",
            "digits: points of accuracy": "" if pd.isna(row.gap) else signed(digits.gap[method], 2),
            "text: bits per byte": "" if pd.isna(row.gap) else signed(row.gap, 3),
        }
        for method, row in text.iterrows()
    )
    return {"methods_table": table.iloc[1:], "dense": {"digits": digits.score["none"], "text": text.score["none"]}}


def wide(frame: pd.DataFrame, index: str, columns: str) -> pd.DataFrame:
    """Return a table of the column ``cell``, with rows and columns in the order in which the frame has them."""
    rows, names = (list(dict.fromkeys(frame[name])) for name in (index, columns))
    table = frame.pivot(index=index, columns=columns, values="cell").loc[rows, names]
    table.columns.name = None
    return table.reset_index()


def signed(value: float, places: int) -> str:
    """Return a number with its sign: ``+0.5``, ``−0.5``, ``0.0``."""
    return f"{value:+.{places}f}".replace("-", "−") if value else f"{0:.{places}f}"


def interval(value: float, half: float, places: int, bold: bool) -> str:
    """Return a gap with half of its interval's width."""
    text = f"{signed(value, places)} ± {half:.{places}f}"
    return f"**{text}**" if bold else text


def reliability(page: str) -> dict[str, Any]:
    """Return how many launches with a fault there were, and the seconds of the slowest that ended with an error."""
    frame = results.load("chaos")

    def slowest(*faults: str) -> float:
        return float(frame[frame.fault.isin(faults)].slowest_error_s.max())

    return {**frame[["launches", "recovered", "error"]].sum().to_dict(), "slowest": slowest}
