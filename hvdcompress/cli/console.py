"""The terminal: tables, numbers with units, and errors on one line."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdcompress.cli.started import started


def console_of(stderr: bool = False) -> Console:
    """Return a console for standard output or standard error.

    A spinner needs a terminal that only this process writes to. A launcher gives each of its ranks a pseudo-terminal
    and mixes their output, so a rank never counts as interactive.
    """
    terminal = (sys.stderr if stderr else sys.stdout).isatty() and started() is None
    colours = "auto" if terminal or not os.environ.get("FORCE_COLOR") else "standard"
    # rich assumes 80 columns without a terminal, which would cut tables in log files
    width = None if terminal or "COLUMNS" in os.environ else 160
    return Console(stderr=stderr, force_terminal=terminal, color_system=colours, width=width)  # type: ignore[arg-type]


def fail(message: object, code: int = 2) -> typer.Exit:
    """Print an error, and return the exception that ends the command with this exit status."""
    console_of(stderr=True).print(f"[red]error:[/] {escape(str(message))}", highlight=False, soft_wrap=True)
    return typer.Exit(code)


def print_table(rows: Sequence[Mapping[str, str]], are_numbers: bool = False) -> None:
    """Print a table, a row for each {title: cell}. Numbers are aligned right, and lines of numbers are never broken."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    titles = list(dict.fromkeys(title for row in rows for title in row))
    for title in titles:
        is_first = title == titles[0]
        table.add_column(
            title, justify="right" if are_numbers and not is_first else "left", no_wrap=are_numbers or is_first
        )
    for row in rows:
        table.add_row(*(escape(row.get(title, "")) or "–" for title in titles))
    console = console_of()
    if are_numbers:
        unlimited = console.options.update(max_width=1000)
        console.width = max(console.width, console.measure(table, options=unlimited).maximum)
    console.print(table, highlight=False)


def number(value: float) -> str:
    """Return a number with three significant digits, without an exponent: ``1234``, ``12.3``, ``0.0123``."""
    if not math.isfinite(value):
        return str(value)
    value = float(f"{value:.3g}")
    places = 2 - math.floor(math.log10(abs(value))) if value else 2
    return f"{value:.{min(max(places, 0), 8)}f}"


def duration(seconds: float) -> str:
    """Return seconds as text: ``850 µs``, ``12.3 ms``, ``4.56 s``."""
    unit, factor = ("s", 1.0) if seconds >= 0.9995 else ("ms", 1e3) if seconds >= 0.9995e-3 else ("µs", 1e6)
    return f"{number(seconds * factor)} {unit}"


def size(num_bytes: float) -> str:
    """Return bytes as text: ``999 B``, ``5.12 kB``, ``1.23 GB``; 1 kB is 1000 bytes, as networks count."""
    units = ["B", "kB", "MB", "GB"]
    while num_bytes >= 999.5 and len(units) > 1:
        num_bytes /= 1000
        units.pop(0)
    return f"{num_bytes:.0f} B" if units[0] == "B" else f"{number(num_bytes)} {units[0]}"
