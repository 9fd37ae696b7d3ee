"""The page of ``hvdcompress scale``: the report's style, with curves over the number of workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from hvdcompress.lab.output import numbers, page, plots
from hvdcompress.lab.scale.model import Row
from hvdcompress.lab.scale.report import MISSING, Prediction, notes, time_cells


class Head(NamedTuple):
    """A column, as the page wants it."""

    key: str
    title: str


def curves(
    rows: Sequence[Row],
    values: Callable[[Row], dict[int, float]],
    form: Callable[[float], str],
    name: str,
    title: str,
    legend: bool = False,
) -> str:
    """A line a method against the number of workers, both logarithmic; a cross where a method is no faster than
    dense."""
    with matplotlib.rc_context(plots.STYLE):
        figure = plots._figure(5.6 if legend else 4.4)
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
        return plots._svg(figure, name, title)


def _section(prediction: Prediction, number: int, rate: str, rows: list[Row]) -> dict[str, Any]:
    times = curves(rows, lambda row: row.seconds, numbers.seconds_of, f"s{number}a", "Seconds against workers")
    wire = curves(rows, lambda row: row.on_wire, numbers.num_bytes, f"s{number}b", "Bytes a rank against workers")
    cells = [(row, time_cells(prediction, row)) for row in rows]
    return {
        "heading": prediction.heading(rate),
        "plots": [("Time of an exchange (×: no faster than dense)", times), ("Bytes a rank sends", wire)],
        "rows": [
            {
                "number": at % plots.SERIES,
                "failed": bool(row.loses),
                "cells": [(head.key, cell) for head, cell in zip(_heads(prediction), found, strict=True)],
            }
            for at, (row, found) in enumerate(cells)
        ],
    }


def _heads(prediction: Prediction) -> list[Head]:
    return [
        Head("method", "method"),
        *(Head("workers", f"{p} workers") for p in prediction.workers),
        Head("loses", "loses"),
    ]


def pictures(prediction: Prediction) -> dict[str, str]:
    """Files' names and the plots of seconds in them, each by itself."""
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
    legend = [
        {"label": row.label, "number": i % plots.SERIES, "dashes": " ".join(map(str, plots.dashes(i)))}
        for i, row in enumerate(first)
    ]
    said = notes(prediction)
    return page.render(
        name=f"{prediction.name} at scale",
        sections=[_section(prediction, i, rate, rows) for i, (rate, rows) in enumerate(by_rate.items())],
        legend=legend,
        columns=_heads(prediction),
        key=" ".join(f"{row.label}: {row.formula}." for row in first if row.formula != MISSING),
        notes=said,
        details=[("command", prediction.command), ("constants", prediction.file)],
    )
