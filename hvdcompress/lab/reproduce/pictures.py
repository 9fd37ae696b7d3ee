"""What the papers' figures have in common: how many seeds they say, a series' dashes, title and caption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdcompress.lab.output import plots
from hvdcompress.lab.reproduce.claims import Picture
from hvdcompress.lab.reproduce.rows import Row


def seeds_of(rows: Sequence[Row]) -> str:
    """``3 seeds``."""
    seeds = sorted({row["seed"] for row in rows})
    return f"{len(seeds)} seeds" if len(seeds) > 1 else "1 seed"


def style(line: Any, number: int) -> None:
    """The dashes of the n-th series."""
    if plots.dashes(number):
        line.set_dashes(plots.dashes(number))


def picture(figure: Any, name: str, title: str, caption: str) -> Picture:
    """A drawn figure, with its title on it."""
    figure.suptitle(title, fontsize=10)
    return Picture(name, caption, plots.svg(figure, name, caption.replace('"', "'")))
