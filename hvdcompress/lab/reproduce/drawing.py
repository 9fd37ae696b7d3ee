"""What the papers' figures have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdcompress.lab.output import plots
from hvdcompress.lab.reproduce.claims import Picture


def seeds(rows: Sequence[dict[str, Any]]) -> str:
    """How many seeds the rows are of: "3 seeds"."""
    found = {row["seed"] for row in rows}
    return f"{len(found)} seeds" if len(found) > 1 else "1 seed"


def style(line: Any, number: int) -> None:
    """Give a line the dashes of the n-th series."""
    if plots.dashes(number):
        line.set_dashes(plots.dashes(number))


def picture(figure: Any, name: str, title: str, caption: str) -> Picture:
    """A drawn figure with its title above and its caption below."""
    figure.suptitle(title, fontsize=10)
    return Picture(name, caption, plots.svg(figure, name, caption.replace('"', "'")))
