"""One table: typed columns over rows of any kind, for terminals, Markdown, HTML, CSV and JSON.

>>> columns = [Column("name", "method", lambda row: row[0], align="left"),
...            Column("sent", "sent", lambda row: f"{row[1]} kB", value=lambda row: 1000 * row[1], unit="B")]
>>> print(Table(columns, [("topk", 80)]).markdown(), end="")
| method | sent |
|---|---:|
| topk | 80 kB |
>>> print(Table(columns, [("topk", 80)]).csv(), end="")
method,sent [B]
topk,80000
"""

from __future__ import annotations

import csv
import html
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

import rich.table
from rich.console import Console
from rich.markup import escape
from rich.text import Text

__all__ = ["MISSING", "SERIES", "Column", "Format", "Table", "as_json", "finite", "folded", "print_tables"]

MISSING = "–"  #: the cell of a figure that is not there
WRAPPED = 20  #: characters that are enough for a cell of several lines
GAP = 2  #: characters between columns
SERIES = 9  #: how many colours a page has
STYLES = {"failed": "red", "unfinished": "yellow", "best": "bold", "": None}  #: rich's, by a row's mark
R = TypeVar("R")


class Format(StrEnum):
    """How tables are printed."""

    text = "text"
    markdown = "markdown"
    csv = "csv"
    json = "json"


@dataclass(frozen=True)
class Column(Generic[R]):
    """One column of a table of rows ``R``.

    Args:
        key: the column's name in JSON, and its class in HTML.
        title: the head.
        text: a row's cell for readers.
        value: a row's value for programs, a number in ``unit`` or a string; the text unless given.
        unit: the value's, such as "s" or "B"; part of the head in CSV.
        align: "left" or "right".
        yields: how soon the column is left out on a narrow screen: 1 and up, higher ones first; 0 is never.
        wrap: whether cells may be broken into lines on a terminal.
        marked: whether a row's cell is to stand out, as a bad value does.
    """

    key: str
    title: str
    text: Callable[[R], str]
    value: Callable[[R], Any] | None = None
    unit: str = ""
    align: Literal["left", "right"] = "right"
    yields: int = 0
    wrap: bool = False
    marked: Callable[[R], bool] | None = None


@dataclass
class Table(Generic[R]):
    """Rows and their columns.

    Args:
        columns: from left to right; the first one names the row.
        rows: what the columns' functions are called with.
        title: a line above the table; empty for none.
        mark: a row's mark: "failed", "unfinished", "best" or "".
        colour: a row's colour in a page, by its number, which may exceed :data:`SERIES`; None without colours.
    """

    columns: Sequence[Column[R]]
    rows: Sequence[R]
    title: str = ""
    mark: Callable[[R], str] = lambda row: ""
    colour: Callable[[R], int] | None = None

    def filled(self) -> Table[R]:
        """A copy without the columns that have a figure in no row."""
        kept = [column for column in self.columns if any(column.text(row) != MISSING for row in self.rows)]
        return replace(self, columns=kept)

    # -- terminal --------------------------------------------------------------------------------

    def show(self, console: Console) -> bool:
        """Print the table; columns that may yield are left out until it fits the terminal.

        Returns:
            Whether columns were left out.
        """
        shown = self
        for level in range(max((column.yields for column in self.columns), default=0), 0, -1):
            if shown._width() <= console.width:
                break
            shown = replace(shown, columns=[column for column in shown.columns if column.yields < level])
        if self.title:
            console.print(Text(self.title, style="bold"))
        console.print(shown._rich())
        return len(shown.columns) < len(self.columns)

    def _width(self) -> int:
        """Characters of a line; cells that may be broken into lines need only so many."""
        widths = []
        for column in self.columns:
            widest = max([len(column.title), *(len(column.text(row)) for row in self.rows)])
            widths.append(max(len(column.title), min(widest, WRAPPED)) if column.wrap else widest)
        return sum(widths) + GAP * (len(widths) - 1)

    def _rich(self) -> rich.table.Table:
        table = rich.table.Table(header_style="bold", box=None, pad_edge=False)
        for column in self.columns:
            table.add_column(escape(column.title), justify=column.align, no_wrap=not column.wrap, overflow="fold")
        for row in self.rows:
            cells = [(escape(column.text(row)), column.marked and column.marked(row)) for column in self.columns]
            table.add_row(*(f"[red]{text}[/]" if bad else text for text, bad in cells), style=STYLES[self.mark(row)])
        return table

    # -- text ------------------------------------------------------------------------------------

    def markdown(self) -> str:
        """The table without its title, a line per row."""

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|").replace("*", "\\*") for cell in cells) + " |\n"

        rule = "|" + "|".join("---" if column.align == "left" else "---:" for column in self.columns) + "|\n"
        lines = [line([column.text(row) for column in self.columns]) for row in self.rows]
        return "".join([line([column.title for column in self.columns]), rule, *lines])

    def html(self) -> str:
        """A ``<table>`` element, in the classes of ``report.html.j2``."""
        heads = "".join(f'<th scope="col"{_left(column)}>{html.escape(column.title)}</th>' for column in self.columns)
        lines = [f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>"]
        for row in self.rows:
            failed = ' class="failed"' if self.mark(row) == "failed" else ""
            chip = (
                f'<span class="chip" style="background:var(--c{self.colour(row) % SERIES})"></span>'
                if self.colour
                else ""
            )
            first, *others = self.columns
            cells = [f'<th scope="row" style="text-align:left">{chip}{html.escape(first.text(row))}</th>']
            cells += [f'<td class="{c.key}"{_left(c)}>{html.escape(c.text(row))}</td>' for c in others]
            lines.append(f"<tr{failed}>{''.join(cells)}</tr>")
        return "\n".join([*lines, "</tbody>", "</table>"])

    # -- data ------------------------------------------------------------------------------------

    def records(self) -> list[dict[str, Any]]:
        """A dict for each row: values by the columns' keys."""
        return [{column.key: (column.value or column.text)(row) for column in self.columns} for row in self.rows]

    def csv(self) -> str:
        """Comma-separated values; heads have units in brackets, and values that are not there are empty."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([f"{column.title} [{column.unit}]" if column.unit else column.title for column in self.columns])
        for record in self.records():
            writer.writerow(["" if value in (None, MISSING) else value for value in finite(list(record.values()))])
        return stream.getvalue()

    def data(self) -> dict[str, Any]:
        """Plain data: title, units and rows."""
        units = {column.key: column.unit for column in self.columns if column.unit}
        rows = [{k: None if v == MISSING else v for k, v in record.items()} for record in self.records()]
        return {"title": self.title, "units": units, "rows": rows}

    def json(self) -> str:
        """An object with title, units and rows."""
        return as_json(self.data())

    def print(self, console: Console, form: str = Format.text) -> bool:
        """Print in a form; see :meth:`show` for what is returned.

        Raises:
            ValueError: there is no such form.
        """
        if form == Format.text:
            return self.show(console)
        forms = {Format.markdown: self.markdown, Format.csv: self.csv, Format.json: self.json}
        if form not in forms:
            raise ValueError(f"unknown format {form!r}; known: {', '.join(Format)}")
        console.out(forms[Format(form)](), end="", highlight=False)
        return False


def print_tables(tables: Sequence[Table[Any]], console: Console, form: str = Format.text) -> bool:
    """Print what may be several tables: JSON as one array of them, other forms one after the other.

    Returns:
        Whether columns were left out on a narrow terminal.
    """
    if form == Format.json:
        console.out(as_json([table.data() for table in tables]), end="", highlight=False)
        return False
    left_out = False
    for at, table in enumerate(tables):
        if form == Format.markdown and table.title:
            console.out(f"{'' if not at else chr(10)}**{table.title}**\n\n", end="", highlight=False)
        elif at or form == Format.text:
            console.out("")
        left_out |= table.print(console, form)
    return left_out


def folded(text: str, summary: str = "All figures") -> str:
    """Markdown that is shown on a click, on GitHub and on the site."""
    return f"<details>\n<summary>{summary}</summary>\n\n{text.strip()}\n\n</details>\n"


def _left(column: Column[Any]) -> str:
    return ' style="text-align:left"' if column.align == "left" else ""


def as_json(value: Any) -> str:
    """Indented JSON with a final line break; numbers that are not finite become null, as JSON has none."""
    return json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n"


def finite(value: Any) -> Any:
    """Plain data in which numbers that are not finite are replaced by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
