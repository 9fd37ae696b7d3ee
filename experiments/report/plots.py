"""Plots: one style (``style.mplstyle``), small multiples of lines, and SVG files that are equal for equal data."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it says when it builds its font cache
import matplotlib  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

matplotlib.use("Agg")
plt.style.use(Path(__file__).with_name("style.mplstyle"))


def figure(panels: int = 1, columns: int = 2, height: float = 2.6, share_y: bool = False) -> tuple[Figure, list[Axes]]:
    """Make a figure of the page's width with so many panels.

    Args:
        panels: how many.
        columns: at most so many beside each other.
        height: of a row of panels, in inches.
        share_y: whether all panels have one y axis.
    """
    columns = min(columns, panels)
    rows = -(-panels // columns)
    drawn, axes = plt.subplots(rows, columns, figsize=(6.2, height * rows), sharey=share_y, squeeze=False)
    for unused in axes.flat[panels:]:
        unused.set_visible(False)
    return drawn, list(axes.flat[:panels])


def lines(
    frame: pd.DataFrame,
    x: str,
    y: str,
    by: str,
    panel: str | None = None,
    labels: Mapping[str, str] | None = None,
    decorate: Callable[[Axes, pd.DataFrame], object] | None = None,
    marker: str = "",
    **options: object,
) -> Figure:
    """Draw small multiples of lines: the mean of ``y`` over ``x``, and the range over other columns such as seeds.

    Args:
        frame: one row per measurement.
        x: the column of the x axis.
        y: the column of the y axis.
        by: column whose values are the lines; a value has the same colour in every panel.
        panel: column whose values are the panels; None: one panel.
        labels: axis labels by column, where the column's name is not enough.
        decorate: is called with each panel and its rows, for scales, limits and reference lines.
        marker: draw each measurement as a point instead, such as "o".
        options: of :func:`figure`.
    """
    names = list(dict.fromkeys(frame[by]))
    parts = list(frame.groupby(panel, sort=False)) if panel else [("", frame)]
    drawn, axes = figure(len(parts), **options)  # type: ignore[arg-type]
    for ax, (title, rows) in zip(axes, parts, strict=True):
        for number, name in enumerate(names):
            some = rows[rows[by] == name]
            if marker:
                ax.plot(some[x], some[y], marker, markersize=3, color=f"C{number % 9}", label=str(name))
                continue
            over = some.groupby(x)[y]
            mean = over.mean()
            if mean.empty:
                continue
            ax.plot(mean.index, mean, color=f"C{number % 9}", label=str(name))
            ax.fill_between(mean.index, over.min(), over.max(), color=f"C{number % 9}", alpha=0.15, linewidth=0)
        ax.set(title=str(title), xlabel=(labels or {}).get(x, x), ylabel=(labels or {}).get(y, y))
        if decorate:
            decorate(ax, rows)
    handles = {text: line for ax in axes for line, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    fit = max(1, 84 // (8 + max(map(len, handles), default=0)))  # columns that the width has room for
    drawn.legend(handles.values(), handles, loc="outside lower center", ncols=min(4, fit, len(handles)))
    return drawn


def save(drawn: Figure, path: Path) -> Path:
    """Write a figure as SVG, without the date, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(drawn), encoding="utf-8")
    return path


def svg(drawn: Figure) -> str:
    """Return a figure as SVG, without the date, and close it."""
    file = io.StringIO()
    drawn.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(drawn)
    return file.getvalue()
