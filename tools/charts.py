"""Line charts on logarithmic axes, as SVG: the same input gives the same file, with any version of any library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, LEFT, TOP, BOTTOM = 620, 62, 56, 52
STYLE = (
    "svg{font-family:system-ui,sans-serif;font-size:13px;background:#fff}text{fill:#1c2b3a}.title{font-size:15px;"
    "font-weight:600}.grid{stroke:#e3e8ee}.axis{fill:#43566a}.line{fill:none;stroke-width:2.2}.under{fill:#43566a}"
)
DENSE = "#5c6670"  # baselines are grey, methods coloured
COLOURS = ("#0b6bcb", "#c2410c", "#0f8a5f", "#8b3fc7", "#b4870b")


class Line(NamedTuple):
    """A line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    dense: bool = False


class Axis(NamedTuple):
    """An axis: what it shows, and its ticks with their words."""

    title: str
    ticks: Sequence[float]
    word: Callable[[float], str]


def _spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions at least ``gap`` apart, near those wanted, in the same order."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [0.0] * len(wanted)
    last = -math.inf
    for i in order:
        last = places[i] = max(wanted[i], last + gap)
    excess = [places[i] - wanted[i] for i in order]
    shift = max(excess, default=0.0) / 2
    return [place - shift for place in places]


def lines(title: str, under: str, x: Axis, y: Axis, drawn: Sequence[Line], height: int = 400, margin: int = 150) -> str:
    """Draw lines over logarithmic axes, each with its name at its right end.

    Args:
        title: what the chart shows.
        under: a line of small print below the title.
        x: the horizontal axis; its first and last ticks are its limits.
        y: the vertical axis, likewise.
        drawn: the lines; baselines are grey and dashed.
        height: of the picture, in pixels.
        margin: space for the names, in pixels.
    """
    right, low = WIDTH - margin, height - BOTTOM

    def across(value: float) -> float:
        first, last = math.log(x.ticks[0]), math.log(x.ticks[-1])
        return LEFT + (right - LEFT) * (math.log(value) - first) / (last - first)

    def up(value: float) -> float:
        first, last = math.log(y.ticks[0]), math.log(y.ticks[-1])
        return low - (low - TOP) * (math.log(value) - first) / (last - first)

    parts = [f'<text x="16" y="24" class="title">{escape(title)}</text>']
    parts.append(f'<text x="16" y="42" class="under">{escape(under)}</text>')
    for tick in y.ticks:
        at = up(tick)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" class="axis" text-anchor="end">{escape(y.word(tick))}</text>'
        )
    for tick in x.ticks:
        at = across(tick)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{low}" class="grid"/>')
        parts.append(
            f'<text x="{at:.1f}" y="{low + 18}" class="axis" text-anchor="middle">{escape(x.word(tick))}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + right) / 2:.0f}" y="{height - 12}" class="axis" text-anchor="middle">{x.title}</text>'
    )
    colours = iter(COLOURS)
    names = _spread([up(line.points[-1][1]) + 4 for line in drawn], 17)
    for line, place in zip(drawn, names, strict=True):
        colour = DENSE if line.dense else next(colours)
        path = " ".join(f"{across(px):.1f},{up(py):.1f}" for px, py in line.points)
        dash = ' stroke-dasharray="6 4"' if line.dense else ""
        parts.append(f'<polyline points="{path}" class="line" stroke="{colour}"{dash}/>')
        if len(line.points) < 8:
            parts += [
                f'<circle cx="{across(px):.1f}" cy="{up(py):.1f}" r="3.5" fill="{colour}"/>' for px, py in line.points
            ]
        parts.append(f'<text x="{right + 10}" y="{place:.1f}" style="fill:{colour}">{escape(line.name)}</text>')
    size = f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])
