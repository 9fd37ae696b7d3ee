"""Draw seconds to the target: a panel per link, a bar per contender, a mark per seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

from experiments.cluster.rates import Rate
from experiments.output import plots
from experiments.to_accuracy.contenders import NOOP, baseline_of
from experiments.to_accuracy.report import Comparison, Entry

LABELS = {
    "dense": "dense",
    "fp16": "PyTorch's fp16 hook",
    "ddp_powersgd_r1": "PyTorch's PowerSGD hook, rank 1",
    "ddp_powersgd_r2": "PyTorch's PowerSGD hook, rank 2",
    "ddp_powersgd_r4": "PyTorch's PowerSGD hook, rank 4",
    "acpsgd@matrix_rank=8": "ACP-SGD, rank 8",
    "acpsgd_r4": "ACP-SGD, rank 4",
    "powersgd_r4": "PowerSGD, rank 4",
    "topk": "top-k, 1 %",
    "topk@values=qsgd4": "auto (top-k, 1 %, 4 bits)",
    "topk@density=0.002": "top-k, 0.2 %",
    "scalecom_48x": "ScaleCom, 48x",
}


def draw(comparisons: Sequence[Comparison], file: Path) -> Path:
    """Write an SVG of the contenders that reach the target on every seed over every link of one race.

    Args:
        comparisons: of one race and driver, a panel each.
        file: where to write.
    """
    names = [
        name
        for name in comparisons[0].entries
        if name != NOOP and all(name in each.entries and each.entries[name].arrives for each in comparisons)
    ]
    names.sort(key=lambda name: comparisons[0].entries[name].mean)
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(0.24 * len(names) + 0.9)
        panels = figure.subplots(1, len(comparisons), sharey=True, squeeze=False)[0]
        for axes, comparison in zip(panels, comparisons, strict=True):
            _panel(axes, [comparison.entries[name] for name in names])
            axes.set_title(str(Rate.parse(comparison.rate)), fontsize=10)
        plots.name_lines(panels[0], [LABELS.get(name, name) for name in names])
        label = f"Seconds of training to the target: {comparisons[0].title}, and other links"
        drawn = plots.svg(figure, file.stem, label)
    file.write_text(plots.alone(drawn), encoding="utf-8")
    return file


def _panel(axes: Axes, entries: Sequence[Entry]) -> None:
    """Draw bars up to four times the shortest one; longer ones are cut, with their seconds."""
    shown = max(entry.mean for entry in entries if entry.mean < 4 * min(each.mean for each in entries))
    for line, entry in enumerate(entries):
        axes.barh(line, entry.mean, color=plots.colour(1 if baseline_of(entry.name) else 0), height=0.6)
        if entry.mean > shown:
            axes.text(1.28 * shown, line, f"{entry.mean:.0f} …", ha="right", va="center", fontsize=8, color=plots.GRID)
            continue
        seconds = list(entry.seconds.values())
        axes.scatter(seconds, [line] * len(seconds), color=plots.INK, s=5, zorder=3)
    axes.set_xlim(0, 1.3 * shown)
    axes.set_xlabel("seconds")
    axes.grid(visible=False, axis="y")
