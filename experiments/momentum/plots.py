"""Draw the study: scores over the steps, and the gap to dense training against the density."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from experiments.momentum.contenders import DENSE
from experiments.momentum.report import Group
from experiments.output import plots
from experiments.output.paired import Gap

FORMS = ("plain", "default", "cancelled")
LABELS = {"plain": "momentum kept", "default": "adapted", "cancelled": "cancelled"}
PANEL = 2.6  #: inches, the height of a row of two panels


def draw(groups: Sequence[Group], method: str, file: Path) -> list[Path]:
    """Draw what the groups have runs for.

    Args:
        groups: of the report.
        method: the contender whose forms are drawn over the steps.
        file: of the curves, an SVG. The plot over densities, of groups with three or more, goes to the same
            name with "-density" at its end.

    Returns:
        The files that were written.
    """
    curves = [group for group in groups if any(group.done(named(method, form)) for form in FORMS)]
    gaps = [group for group in groups if len(densities_of(group, FORMS[0])) > 2]
    written = []
    if curves:
        label = f"Held-out scores over the steps: dense, and {method} with momentum kept, adapted and cancelled"
        written.append(_write(curves, lambda axes, group: _curves(axes, group, method), label, file))
    if gaps:
        label = "Gap to dense training against the density of top-k"
        written.append(_write(gaps, _gaps, label, file.with_stem(f"{file.stem}-density")))
    return written


def named(method: str, form: str) -> str:
    """Return the name of a method's contender in a form."""
    return method if form == "default" else f"{method}:{form}"


def densities_of(group: Group, form: str) -> dict[float, Gap]:
    """Return the gaps of top-k in a form by density, without contenders that change anything else."""
    found = {}
    for name in group.runs:
        for run in group.done(name).values():
            contender = run["contender"]
            changed = contender["lr"] != 1 or contender["momentum"] is not None
            only_density = contender["settings"].keys() == {"method", "density"}
            if contender["settings"]["method"] == "topk" and contender["form"] == form and only_density and not changed:
                found[run["density"]] = group.gap(name)
    return {density: found[density] for density in sorted(found)}


def _write(groups: Sequence[Group], panel: Callable[[Axes, Group], None], label: str, file: Path) -> Path:
    """Draw one panel per group, two side by side."""
    columns = min(2, len(groups))
    rows = math.ceil(len(groups) / columns)
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(PANEL * rows + 0.3)
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, group in zip(panels, groups, strict=False):
            panel(axes, group)
        for axes in panels[len(groups) :]:
            axes.set_visible(False)
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)
        drawn = plots.svg(figure, file.stem, label)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(plots.alone(drawn), encoding="utf-8")
    return file


def _curves(axes: Axes, group: Group, method: str) -> None:
    """Draw the mean over the seeds, with a band from the least to the most."""
    lines = [(DENSE, DENSE), *((named(method, form), LABELS[form]) for form in FORMS)]
    late = []  # extremes without the first steps, which would hide the differences later on
    for number, (contender, label) in enumerate(lines):
        runs = list(group.done(contender).values())
        if not runs:
            continue
        steps = [step for step, _ in runs[0]["evaluations"]]
        values = np.array([[value for _, value in run["evaluations"]] for run in runs])
        colour = plots.colour(number)
        axes.plot(steps, values.mean(0), color=colour, dashes=plots.dashes(number), label=label, linewidth=1.5)
        axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)
        late += [values[:, len(steps) // 5 :].min(), values[:, len(steps) // 5 :].max()]
    margin = 0.15 * (max(late) - min(late)) or 1.0
    axes.set_ylim(min(late) - margin, max(late) + margin)
    axes.set_title(group.name, fontsize=10)
    axes.set_xlabel("step")
    axes.set_ylabel("accuracy, %" if group.task.metric.higher_is_better else "bits per byte")


def _gaps(axes: Axes, group: Group) -> None:
    """Draw the mean gap of top-k by density, with its interval where there is one."""
    for number, form in enumerate(FORMS, start=1):
        found = densities_of(group, form)
        gaps = [gap.mean for gap in found.values()]
        margins = [0.0 if math.isnan(gap.high) else gap.high - gap.mean for gap in found.values()]
        colour = plots.colour(number)
        percents = [100 * density for density in found]
        axes.errorbar(
            percents, gaps, yerr=margins, color=colour, marker="o", markersize=3, label=LABELS[form], linewidth=1.5
        )
    axes.axhline(0, color=plots.INK, linewidth=0.8)
    axes.set_xscale("log")
    shown = [density for form in FORMS for density in densities_of(group, form)]
    axes.set_xticks([100 * density for density in shown], [f"{100 * density:g}" for density in shown])
    axes.minorticks_off()
    axes.set_title(group.name, fontsize=10)
    axes.set_xlabel("density, %")
    unit = "points" if group.task.metric.higher_is_better else "bits"
    axes.set_ylabel(f"gap to dense, {unit}")
