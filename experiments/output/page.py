"""A report as one HTML file that needs nothing else: style, tables and plots are inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jinja2

from experiments.output import plots
from experiments.output.table import SERIES, Table

__all__ = ["Section", "legend", "render"]


@dataclass(frozen=True)
class Section:
    """A part of a page: a heading ("what: about it"), a table, and plots as (title, ``<svg>`` element)."""

    heading: str
    table: str
    plots: Sequence[tuple[str, str]] = ()

    @classmethod
    def of(cls, table: Table, drawn: Sequence[tuple[str, str]]) -> Section:
        """A section headed by its table's title."""
        return cls(table.title, table.html(), drawn)


def legend(labels: Sequence[str], dashed: bool = True) -> list[dict[str, object]]:
    """The legend's items: labels in the order of their colours."""
    return [
        {
            "label": label,
            "number": number % SERIES,
            "dashes": " ".join(map(str, plots.dashes(number))) if dashed else "",
        }
        for number, label in enumerate(labels)
    ]


def render(
    name: str,
    sections: Sequence[Section],
    legend: Sequence[dict[str, object]],
    key: str,
    notes: Sequence[str],
    details: Sequence[tuple[str, str]],
) -> str:
    """Fill in the page's template.

    Args:
        name: the heading.
        sections: tables and plots.
        legend: what :func:`legend` made.
        key: what the columns mean.
        notes: what a reader must know to read the figures correctly, below the heading.
        details: (word, text) of how the figures were made, at the end.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.get_template("report.html.j2")
    return template.render(name=name, sections=sections, legend=legend, key=key, notes=notes, details=details)
