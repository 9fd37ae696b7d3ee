"""The report of a benchmark as an HTML page: bars of where the time goes and of how much is gained."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from experiments.bench.report import LEGEND, tables
from experiments.bench.results import PARTS, Result, Row
from experiments.output import page, plots
from experiments.output.page import Section
from experiments.report import numbers

SHADES = {"encode": 2, "wire": 1, "wait": 0, "decode": 5, "other": 4}  # of the page's colours
WHOLE = 6  # of a bar that cannot be split
BASELINE, METHOD = 0, 1  # grey for Horovod's and DDP's own, a colour for our methods


def time_split(rows: Sequence[Row], name: str) -> str:
    """Stacked bars, a line per method: where the time of an exchange goes."""
    rows = sorted((row for row in rows if row.time), key=lambda row: row.time.middle if row.time else 0.0)
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(1.35 + 0.3 * len(rows))
        axes = figure.add_subplot()
        for place, row in enumerate(rows):
            assert row.time
            left = 0.0
            parts = {what: row.parts[what] for what in PARTS if what in row.parts} or {"whole": row.time.middle}
            for what, seconds in parts.items():
                axes.barh(place, seconds, left=left, color=plots.colour(SHADES.get(what, WHOLE)), height=0.66)
                left += seconds
            plots.spread(axes, place, *row.time, numbers.seconds_of(row.time.middle))
        for what, title in (*((what, what) for what in PARTS), ("whole", "not told apart (DDP)")):
            axes.barh([0], [0], color=plots.colour(SHADES.get(what, WHOLE)), label=title)
        _named(axes, rows)
        axes.set_xlim(0, 1.16 * max((row.time.most for row in rows if row.time), default=1.0))
        axes.set_xlabel("seconds per exchange (bar: median; line: least to most)")
        axes.set_title("Where the time of an exchange goes, the fastest first", loc="left", fontsize=10)
        figure.legend(loc="outside upper left", ncols=6, frameon=False, fontsize=8.5)
        return plots.svg(figure, name, "Where the time of an exchange goes, a bar per method")


def speed_up(rows: Sequence[Row], name: str) -> str:
    """Bars, a line per method: how many times faster than the best dense all-reduce."""
    rows = sorted((row for row in rows if row.speed_up), key=lambda row: -row.speed_up.middle if row.speed_up else 0.0)
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(0.95 + 0.3 * len(rows))
        axes = figure.add_subplot()
        for place, row in enumerate(rows):
            assert row.speed_up
            middle = row.speed_up.middle
            axes.barh(place, middle, color=plots.colour(BASELINE if row.is_baseline else METHOD), height=0.66)
            plots.spread(axes, place, *row.speed_up, numbers.rate_of(middle))
        _named(axes, rows)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        low = min((row.speed_up.least for row in rows if row.speed_up), default=1.0)
        axes.set_xlim(0.7 * min(low, 1.0), 2.2 * max((row.speed_up.most for row in rows if row.speed_up), default=1.0))
        axes.axvline(1, color=plots.INK, linewidth=0.8)
        axes.set_xlabel("times faster than the best dense all-reduce (line: over the rounds)")
        axes.set_title("Speed-up: methods in blue, baselines in grey", loc="left", fontsize=10)
        return plots.svg(figure, name, "Speed-up over the best dense all-reduce, a bar per method")


def _named(axes: Axes, rows: Sequence[Row]) -> None:
    plots.name_lines(axes, [row.shown for row in rows])
    for row, label in zip(rows, axes.get_yticklabels(), strict=True):
        label.set_color(plots.FAINT if row.is_baseline else plots.INK)


def _plots(number: int, rows: Sequence[Row]) -> list[tuple[str, str]]:
    return [
        ("Where the time goes", time_split(rows, f"b{number}a")),
        ("What is gained", speed_up(rows, f"b{number}b")),
    ]


def html(result: Result) -> str:
    """The page: one file that needs nothing else."""
    launch = result.launch
    details = [(word, launch[word]) for word in ("command", "commit") if launch.get(word)]
    sections = [Section.of(table, _plots(number, table.rows)) for number, table in enumerate(tables(result))]
    legend = page.legend(["baselines", "methods"], dashed=False)
    return page.render(result.name, sections, legend, LEGEND, result.notes, details)
