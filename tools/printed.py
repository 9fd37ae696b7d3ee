"""Figures of tables that are printed in the documentation: what is drawn from them cannot differ from them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "Mbit/s": 1e6, "Gbit/s": 1e9}


class Printed(NamedTuple):
    """A table: the words above it, and its rows by column."""

    heading: str
    rows: list[dict[str, str]]


def tables(page: Path) -> Iterator[Printed]:
    """All tables of a Markdown page, each with the heading or the line in bold above it."""
    heading, columns, rows = "", [], []
    for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if not columns:
                columns = cells
            elif set("".join(cells)) - set("-:"):
                rows.append(dict(zip(columns, cells, strict=True)))
        elif columns:
            yield Printed(heading, rows)
            columns, rows = [], []
        if line.startswith(("#", "**")):
            heading = line.strip("#* ")


def figure(cell: str) -> float:
    """The first number of a cell, in seconds or bits per second where it has such a unit: ``274 ms`` → 0.274."""
    found = re.match(r"\**([−+-]?[\d.]+)\s*([^\s()*]*)", cell)
    if not found:
        raise ValueError(f"no number in {cell!r}")
    return float(found[1].replace("−", "-")) * UNITS.get(found[2], 1.0)
