"""The terminal: tables, and errors on one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdcompress.launchers import started


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
