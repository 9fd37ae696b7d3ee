"""The figures of a training's report: loss curves, what a method saves and costs, and where a step's time goes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from experiments.output import plots
from experiments.report import numbers
from experiments.training.results import Row


def _curve(row: Row, x: str) -> tuple[list[float], list[float]]:
    """The row's loss against ``x``, as the mean over seeds up to the last step that all of them have."""
    curves = [result.curve for result in row.results if result.curve.get("loss")]
    length = min((len(curve["loss"]) for curve in curves), default=0)
    return tuple([statistics.fmean(curve[key][i] for curve in curves) for i in range(length)] for key in (x, "loss"))  # type: ignore[return-value]


def _loss_axis(axes: Axes, losses: Sequence[float]) -> None:
    axes.set_ylabel("training loss")
    positive = [loss for loss in losses if loss > 0]
    if positive and max(positive) > 20 * min(positive):
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def loss(rows: Sequence[Row], order: Sequence[str], x: str, name: str) -> str:
    """Loss against ``x``: "step", or "bytes_sent" on a logarithmic axis."""
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(3.5)
        axes = figure.add_subplot()
        seen: list[float] = []
        sent = 0.0
        for row in rows:
            number = order.index(row.method)
            xs, ys = _curve(row, x)
            seen += ys
            sent += sum(xs)
            thick = number == 0
            line = axes.plot(xs, ys, color=plots.colour(number), linewidth=2.6 if thick else 1.7, label=row.method)[0]
            if plots.dashes(number):
                line.set_dashes(plots.dashes(number))
        _loss_axis(axes, seen)
        axes.set_xlabel("step")
        if x == "bytes_sent":
            axes.set_xscale("log" if sent else "linear")  # one rank alone sends nothing
            axes.set_xlabel("bytes sent by a rank (logarithmic)")
            axes.xaxis.set_major_formatter(
                FuncFormatter(lambda value, _: numbers.num_bytes(value).replace(".00", "").replace(".0", ""))
            )
            axes.xaxis.set_minor_formatter(NullFormatter())
        return plots.svg(figure, name, f"Training loss against {axes.get_xlabel()}, a line per method")


def outcome(rows: Sequence[Row], order: Sequence[str], name: str) -> str:
    """Side by side, a line per method: compression ratio, and the held-out measurement with its spread over seeds."""
    rows = [row for row in rows if "value" in row.mean]
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(0.9 + 0.36 * len(rows))
        left, right = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": (1, 1)})
        metric = next((row.finished[0].metric for row in rows), {"name": "held-out", "unit": ""})
        largest = max((row.mean["rate"] for row in rows if not math.isnan(row.mean["rate"])), default=1.0)
        for place, row in enumerate(rows):
            shade = plots.colour(order.index(row.method))
            rate, value, spread = row.mean["rate"], row.mean["value"], row.std["value"]
            if not math.isnan(rate):
                left.barh(place, max(rate, 1.02), color=shade, height=0.62)
                left.text(max(rate, 1.02) * 1.12, place, numbers.rate_of(rate), va="center", fontsize=9)
            right.errorbar(value, place, xerr=spread or None, fmt="o", color=shade, capsize=3, markersize=7)
            right.annotate(
                f"{value:.2f}", (value, place), (0, 7), textcoords="offset points", ha="center", fontsize=8.5
            )
        left.set_xscale("log")
        left.set_xlim(0.9, largest * 4)
        left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        left.xaxis.set_minor_formatter(NullFormatter())
        left.set_xlabel("compression ratio (logarithmic)")
        left.set_yticks(range(len(rows)), [row.method for row in rows], color=plots.INK)
        left.set_ylim(len(rows) - 0.4, -0.75)
        dense = next((row for row in rows if row.method.rpartition("/")[2] == "none"), None)
        if dense:
            right.axvline(
                dense.mean["value"], color=plots.colour(order.index(dense.method)), linewidth=1, dashes=(3, 3)
            )
        right.margins(x=0.18)
        better = "higher" if metric.get("higher_is_better") else "lower"
        right.set_xlabel(f"{metric['name']}, {metric['unit']}\n({better} is better)")
        for axes in (left, right):
            axes.tick_params(axis="y", length=0)
            axes.grid(visible=False, axis="y")
        return plots.svg(figure, name, "Compression ratio and held-out measurement of each method")


def time_split(rows: Sequence[Row], name: str) -> str:
    """Stacked bars: where a step's time goes."""
    rows = [row for row in rows if "total" in row.mean]
    parts: tuple[tuple[str, str, int], ...] = (
        ("rest", "forward, backward, optimizer", 0),
        ("select", "select (codec)", 1),
        ("communicate", "communicate", 2),
    )
    if any(math.isnan(row.mean["communicate"]) for row in rows):  # TensorFlow cannot tell it from the rest
        parts = (("other", "all but codec", 0), parts[1])
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(1.25 + 0.36 * len(rows))
        axes = figure.add_subplot()
        left = [0.0] * len(rows)
        for key, title, number in parts:
            widths = [1e3 * row.mean.get(key, row.mean["total"] - row.mean["select"]) for row in rows]
            axes.barh(range(len(rows)), widths, left=left, color=plots.shade(number), height=0.62, label=title)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for place, total in enumerate(left):
            axes.text(total + 0.012 * max(left), place, f"{numbers.number(total)} ms", va="center", fontsize=9)
        axes.set_yticks(range(len(rows)), [row.method for row in rows], color=plots.INK)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, 1.15 * max(left, default=1.0))
        axes.set_xlabel("milliseconds per step, mean over ranks")
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=9)
        return plots.svg(figure, name, "Time of a step of each method, split into codec, communication and the rest")
