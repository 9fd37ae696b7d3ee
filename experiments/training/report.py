"""The report of a training: its tables, on a terminal and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape

from experiments.output.table import MISSING, Column, Table
from experiments.report import numbers
from experiments.training.results import Report, Row

__all__ = ["COLUMNS", "LEGEND", "heading", "markdown", "show", "order_of", "tables"]


def _mean(key: str) -> Callable[[Row], Any]:
    return lambda row: row.mean.get(key)


def _figure(key: str, title: str, form: Callable[[float], str], unit: str, yields: int = 0) -> Column[Row]:
    def text(row: Row) -> str:
        return form(row.mean[key]) if key in row.mean and not math.isnan(row.mean[key]) else MISSING

    return Column(key, title, text, _mean(key), unit, yields=yields)


def _measured(key: str, title: str, sign: str = "") -> Column[Row]:
    def text(row: Row) -> str:
        if key not in row.mean:
            return MISSING
        places = 2 if row.unit == "%" else 3
        value = round(row.mean[key], places) + 0.0  # -0.001 is 0.00, not -0.00
        spread = f" ± {row.std[key]:.{places}f}" if len(row.finished) > 1 else ""
        return f"{value:{sign if value else ''}.{places}f}{spread}".replace("-", "−")

    return Column(key, title, text, _mean(key))


def _method(row: Row) -> str:
    return f"{row.method} ({row.remark})" if row.remark else row.method


def _density(row: Row) -> str:
    return numbers.percent(row.density) if row.density else MISSING


def _loss(row: Row) -> str:
    if "loss" not in row.mean:
        return MISSING
    spread = f" ± {numbers.number(row.std['loss'], 2)}" if len(row.finished) > 1 else ""
    return numbers.number(row.mean["loss"]) + spread


COLUMNS: tuple[Column[Row], ...] = (
    Column("method", "method", _method, align="left"),
    Column("density", "density", _density, lambda row: row.density, yields=3),
    _figure("rate", "ratio", numbers.rate_of, ""),
    _figure("sent", "sent", numbers.num_bytes, "B"),
    _figure("on_wire", "on wire", numbers.num_bytes, "B", yields=4),
    _figure("total", "step", numbers.seconds_of, "s"),
    _figure("select", "select", numbers.seconds_of, "s", yields=1),
    _figure("communicate", "commun.", numbers.seconds_of, "s", yields=1),
    _figure("rest", "rest", numbers.seconds_of, "s", yields=2),
    Column("loss", "loss", _loss, _mean("loss")),
    _measured("value", "held-out"),
    _measured("difference", "vs none", "+"),
)
LEGEND = (
    "ratio = dense bytes ÷ bytes sent; sent, on wire = bytes per step and rank (handed to the collectives; transmitted "
    "if they run as rings); step = select (codec work) + communicate (waiting in synchronize) + rest (forward, "
    "backward, optimizer); loss = training loss over the last 5 % of the steps."
)


def heading(rows: list[Row]) -> str:
    """``digits: 600 steps, 123 690 parameters, held-out accuracy in %``."""
    started = next((r for row in rows for r in row.results if r.start), None)
    metric = next((r.metric for row in rows for r in row.results if r.metric), None)
    words = [f"{rows[0].results[0].steps} steps"]
    if started:
        words.append(f"{started.start['parameters']:,} parameters".replace(",", " "))
    if metric:
        words.append(metric["name"] if metric["unit"] in metric["name"] else f"{metric['name']} in {metric['unit']}")
    return f"{rows[0].task}: {', '.join(words)}"


def _mark(row: Row) -> str:
    if any(result.status == "failed" for result in row.results):
        return "failed"
    return "unfinished" if row.remark else ""


def tables(report: Report) -> list[Table[Row]]:
    """A table for each task, in the experiment's order; a method has the same colour in all of them."""
    order = order_of(report)
    return [
        Table(COLUMNS, rows, heading(rows), _mark, lambda row: order.index(row.method))
        for rows in report.tasks().values()
    ]


def order_of(report: Report) -> list[str]:
    """Methods in the order of their colours: the dense baseline first, whose colour is the neutral one."""
    order = report.methods()
    return sorted(order, key=lambda method: method != "none")


def show(report: Report, console: Console) -> None:
    """Print the tables, the legend and the notes."""
    left_out = False
    for table in tables(report):
        console.print()
        left_out |= table.show(console)
    console.print(f"[dim]{LEGEND}[/]", highlight=False)
    if left_out:
        console.print("[dim]This terminal is narrow: table.md has more columns.[/]", highlight=False)
    for note in report.notes:
        console.print(escape(note), highlight=False)


def markdown(report: Report) -> str:
    """All tables, the legend and the notes as Markdown."""
    parts = [f"**{table.title}**\n\n{table.markdown()}\n" for table in tables(report)]
    return "".join([*parts, f"{LEGEND}\n\n", *(f"- {note}\n" for note in report.notes)])
