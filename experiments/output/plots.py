"""Plots as SVG inside of a page: text stays text, and colours are the page's own variables.

Colours are drawn as place-holders and replaced by CSS variables afterwards, so that the page can be light
or dark. A method has the same colour and dashes in every plot.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Sequence
from importlib import resources

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it says when it builds its font cache
import matplotlib  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from experiments.output.table import SERIES  # noqa: E402

INK, FAINT, GRID = "#010101", "#020202", "#030303"
DASHES: tuple[tuple[float, ...], ...] = ((), (), (5, 1.6), (1.4, 1.4), (6, 1.5, 1.5, 1.5), (3, 1.2), (8, 2))
STYLE = {
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": FAINT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "text.color": INK,
    "figure.constrained_layout.use": True,
}


def colour(number: int) -> str:
    """The place-holder of the n-th series."""
    return f"#0400{number % SERIES:02x}"


def dashes(number: int) -> tuple[float, ...]:
    """The dashes of the n-th series' lines; methods often lie on top of each other."""
    return DASHES[number % len(DASHES)]


def shade(number: int) -> str:
    """The place-holder of the n-th colour for parts of a whole."""
    return f"#0500{number:02x}"


def figure(height: float) -> Figure:
    """An empty figure of the page's width; ``height`` in inches."""
    return Figure(figsize=(6.2, height))


def spread(axes: Axes, place: int, middle: float, least: float, most: float, text: str) -> None:
    """Draw a line from the least to the most over a horizontal bar, with a text behind it."""
    axes.errorbar(middle, place, xerr=[[middle - least], [most - middle]], color=INK, linewidth=1)
    axes.annotate(text, (most, place), (5, 0), textcoords="offset points", va="center", fontsize=8.5)


def name_lines(axes: Axes, names: Sequence[str]) -> None:
    """Name the lines of horizontal bars, the first one at the top."""
    axes.set_yticks(range(len(names)), names, color=INK, fontsize=8.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def svg(figure: Figure, name: str, label: str) -> str:
    """Draw a figure as an ``<svg>`` element.

    Args:
        figure: what to draw, made within ``matplotlib.rc_context(STYLE)``.
        name: a prefix for its ids, which must differ from those of other plots of the page.
        label: what it shows, for screen readers.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"#0400([0-9a-f]{2})", lambda match: f"var(--c{int(match[1], 16)})", text)
    text = re.sub(r"#0500([0-9a-f]{2})", lambda match: f"var(--t{int(match[1], 16)})", text)
    for place_holder, variable in ((INK, "ink"), (FAINT, "faint"), (GRID, "grid")):
        text = text.replace(place_holder, f"var(--{variable})")
    text = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", text)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def alone(svg: str) -> str:
    """A plot as a file of its own: with the page's colours, light and dark, written into it."""
    colours = resources.files(__package__).joinpath("templates/colours.css").read_text(encoding="utf-8")
    look = "svg { background: var(--card); font-family: system-ui, sans-serif; }"
    return svg.replace(">", f"><style>{colours}{look}</style>", 1)
