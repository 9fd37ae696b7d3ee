"""What the papers' figures have in common: how many seeds they say, a series' dashes, title and caption."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

from experiments.output import plots
from experiments.reproduce.claims import Picture
from experiments.reproduce.rows import Row

LINE = 76  #: characters of a title that a figure of the page's width has room for, in the widest of its fonts


def seeds_of(rows: Sequence[Row]) -> str:
    """``3 seeds``."""
    seeds = sorted({row["seed"] for row in rows})
    return f"{len(seeds)} seeds" if len(seeds) > 1 else "1 seed"


def style(line: Any, number: int) -> None:
    """The dashes of the n-th series."""
    if plots.dashes(number):
        line.set_dashes(plots.dashes(number))


def entitled(figure: Any, title: str) -> None:
    """Put a title on a figure, in as many lines as it needs: longer ones were cut off at both ends."""
    together = re.sub(r"(\d) (seeds?\b)", "\\1\N{NO-BREAK SPACE}\\2", title)
    figure.suptitle(textwrap.fill(together, LINE), fontsize=10)


def picture(figure: Any, name: str, title: str, caption: str) -> Picture:
    """A drawn figure, with its title on it."""
    entitled(figure, title)
    return Picture(name, caption, plots.svg(figure, name, caption.replace('"', "'")))
