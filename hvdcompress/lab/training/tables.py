"""The result tables: the same columns for the terminal, for Markdown and for the page."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdcompress.lab.output import numbers
from hvdcompress.lab.training.report import Report, Row

__all__ = ["COLUMNS", "Column", "markdown", "show"]

MISSING = "–"


class Column(NamedTuple):
    """One figure of a :class:`Row`: how its head and its cells read, and how soon it gives way on a narrow screen."""

    key: str
    title: str
    cell: Callable[[Row], str]
    yields: int = 0


def _figure(key: str, form: Callable[[float], str]) -> Callable[[Row], str]:
    return lambda row: form(row.mean[key]) if key in row.mean and not math.isnan(row.mean[key]) else MISSING


def _measured(key: str, sign: str = "") -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if key not in row.mean:
            return MISSING
        places = 2 if row.unit == "%" else 3
        value = round(row.mean[key], places) + 0.0  # -0.001 is 0.00, not -0.00
        spread = f" ± {row.std[key]:.{places}f}" if len(row.finished) > 1 else ""
        return f"{value:{sign if value else ''}.{places}f}{spread}".replace("-", "−")

    return cell


def _loss(row: Row) -> str:
    if "loss" not in row.mean:
        return MISSING
    spread = f" ± {numbers.number(row.std['loss'], 2)}" if len(row.finished) > 1 else ""
    return numbers.number(row.mean["loss"]) + spread


COLUMNS = (
    Column("method", "method", lambda row: f"{row.method} ({row.remark})" if row.remark else row.method),
    Column("density", "density", lambda row: numbers.percent(row.density) if row.density else MISSING, yields=3),
    Column("rate", "rate", _figure("rate", numbers.rate_of)),
    Column("sent", "sent", _figure("sent", numbers.num_bytes)),
    Column("on_wire", "on wire", _figure("on_wire", numbers.num_bytes), yields=4),
    Column("total", "step", _figure("total", numbers.seconds_of)),
    Column("select", "select", _figure("select", numbers.seconds_of), yields=1),
    Column("communicate", "commun.", _figure("communicate", numbers.seconds_of), yields=1),
    Column("rest", "rest", _figure("rest", numbers.seconds_of), yields=2),
    Column("loss", "loss", _loss),
    Column("value", "held-out", _measured("value")),
    Column("difference", "vs none", _measured("difference", "+")),
)
LEGEND = (
    "rate = dense bytes ÷ bytes sent; sent, on wire = bytes per step and rank (handed to the collectives; transmitted "
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


def show(report: Report, console: Console) -> None:
    """Print the tables; columns give way on a narrow terminal."""
    left_out = False
    for rows in report.tasks().values():
        columns = list(COLUMNS)
        table = _table(rows, columns)
        for level in (4, 3, 2, 1):
            wanted = console.measure(table, options=console.options.update(max_width=1000)).maximum
            if wanted <= console.width:
                break
            columns = [column for column in columns if column.yields != level]
            table, left_out = _table(rows, columns), True
        console.print()
        console.print(table)
    console.print(f"[dim]{LEGEND}[/]", highlight=False)
    if left_out:
        console.print("[dim]This terminal is narrow: table.md has more columns.[/]", highlight=False)
    for note in report.notes:
        console.print(escape(note), highlight=False)


def _table(rows: list[Row], columns: list[Column]) -> Table:
    table = Table(title=heading(rows), title_justify="left", title_style="bold", header_style="bold", box=None)
    for column in columns:
        table.add_column(column.title, justify="left" if column.key == "method" else "right", no_wrap=True)
    for row in rows:
        style = "red" if any(r.status == "failed" for r in row.results) else "yellow" if row.remark else None
        table.add_row(*(escape(column.cell(row)) for column in columns), style=style)
    return table


def markdown(report: Report) -> str:
    """All tables as Markdown, with what must be known to read them."""
    lines = []
    for rows in report.tasks().values():
        lines += [f"**{heading(rows)}**", ""]
        lines.append("| " + " | ".join(column.title for column in COLUMNS) + " |")
        lines.append("|" + "|".join("---" if column.key == "method" else "---:" for column in COLUMNS) + "|")
        for row in rows:
            cells = (column.cell(row).replace("|", "\\|") for column in COLUMNS)
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    lines += [LEGEND, "", *(f"- {note}" for note in report.notes)]
    return "\n".join(lines) + "\n"
