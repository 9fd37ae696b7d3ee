"""The report of ``python -m experiments scale`` as an HTML page, with curves over the number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import matplotlib
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from experiments.output import page, plots
from experiments.output.page import Section
from experiments.output.table import MISSING
from experiments.report import numbers
from experiments.scale.prediction import Row
from experiments.scale.report import Prediction, notes, time_table


def curves(
    rows: Sequence[Row],
    values: Callable[[Row], dict[int, float]],
    form: Callable[[float], str],
    name: str,
    title: str,
    legend: bool = False,
) -> str:
    """Draw a line per method against the number of workers, both logarithmic.

    Args:
        rows: the methods.
        values: a row's values by the number of workers; seconds get a cross where a method is no faster than dense.
        form: writes a value.
        name: see :func:`plots.svg`.
        title: what the plot shows.
        legend: draw a legend.
    """
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(5.6 if legend else 4.4)
        axes = figure.add_subplot()
        for number, row in enumerate(rows):
            found = values(row)
            line = axes.plot(
                list(found),
                list(found.values()),
                color=plots.colour(number),
                linewidth=2.6 if row.is_dense else 1.5,
                label=row.label,
            )[0]
            if plots.dashes(number):
                line.set_dashes(plots.dashes(number))
            if found is row.seconds:
                axes.plot(row.loses, [found[p] for p in row.loses], "x", color=plots.colour(number), markersize=7)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        workers = list(values(rows[0]))
        axes.set_xticks(workers[:: max(1, len(workers) // 6)])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value).replace(".00", "").replace(".0", "")))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("workers (both axes logarithmic)")
        if legend:
            figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=8.5)
        return plots.svg(figure, name, title)


def _plots(number: int, rows: Sequence[Row]) -> list[tuple[str, str]]:
    times = curves(rows, lambda row: row.seconds, numbers.seconds_of, f"s{number}a", "Seconds against workers")
    wire = curves(rows, lambda row: row.on_wire, numbers.num_bytes, f"s{number}b", "Bytes per rank against workers")
    return [("Time of an exchange (×: no faster than dense)", times), ("Bytes per rank sends", wire)]


def pictures(prediction: Prediction) -> dict[str, str]:
    """Plots of seconds against workers, by the names of their files."""
    made = {}
    for rate, rows in prediction.by_rate().items():
        name = f"seconds-{rate.replace('/', '-')}"
        title = prediction.heading(rate)
        made[f"{name}.svg"] = plots.alone(
            curves(rows, lambda row: row.seconds, numbers.seconds_of, name, title, legend=True)
        )
    return made


def html(prediction: Prediction) -> str:
    """The page: one file that needs nothing else."""
    by_rate = prediction.by_rate()
    first = next(iter(by_rate.values()))
    sections = [
        Section.of(time_table(prediction, rate), _plots(i, rows)) for i, (rate, rows) in enumerate(by_rate.items())
    ]
    return page.render(
        f"{prediction.name} at scale",
        sections,
        page.legend([row.label for row in first]),
        " ".join(f"{row.label}: {row.formula}." for row in first if row.formula != MISSING),
        notes(prediction),
        [("command", prediction.command), ("constants", prediction.file)],
    )
