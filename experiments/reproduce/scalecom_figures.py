"""The figures of ScaleCom's page."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np

from experiments.output import plots
from experiments.reproduce.claims import Picture, Result
from experiments.reproduce.pictures import entitled, seeds_of
from experiments.reproduce.rows import grouped
from experiments.reproduce.scalecom_settings import beta_of

Row = dict[str, Any]


@contextlib.contextmanager
def drawing(height: float, name: str, title: str, caption: str, into: list[Picture]) -> Iterator[Any]:
    """A figure to draw on; it is made into a picture, and that put into the list, at the end."""
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(height)
        yield figure
        entitled(figure, title)
        into.append(Picture(name, caption, plots.svg(figure, name, caption.replace('"', "'"))))


def line(axes: Any, xs: Sequence[float], seeds: Sequence[Sequence[float]], number: int, label: str | None) -> None:
    """The median over seeds, with bars from the least to the largest."""
    middle = np.nanmedian(seeds, axis=0)
    drawn = axes.plot(xs, middle, color=plots.colour(number), linewidth=1.6, marker=".", label=label)[0]
    if plots.dashes(number):
        drawn.set_dashes(plots.dashes(number))
    axes.vlines(xs, np.nanmin(seeds, axis=0), np.nanmax(seeds, axis=0), color=plots.colour(number), linewidth=1)


def distances(rows: Sequence[Row], net: str) -> Picture:
    """The distance of residuals and the leader's share of energy over the steps: medians over seeds, at batch 32."""
    those = [row for row in rows if row["net"] == net and row["batch"] == 32]
    rates = sorted({row["rate"] for row in those})
    found: list[Picture] = []
    title = f"{net}, 4 ranks with 32 examples each, k/n = 1 %, {len({row['seed'] for row in those})} seeds"
    caption = f"How alike the residuals of {net} are, and what the leader's selection is worth, over the training."
    with drawing(4.6, f"alike-{net}", title, caption, found) as figure:
        panels = figure.subplots(2, len(rates), sharex=True, sharey="row", squeeze=False)
        for column, rate in enumerate(rates):
            for axes, key, limit in zip(panels[:, column], ("distance", "share"), (0.3, 0.8), strict=True):
                axes.axhline(limit, color=plots.FAINT, linewidth=1, dashes=(2, 2))
                for number, (select, beta) in enumerate((s, b) for s in ("exact", "chunk") for b in (1.0, 0.1)):
                    some = [r for r in those if (r["select"], r["beta"], r["rate"]) == (select, beta, rate)]
                    steps = sorted({row["step"] for row in some})
                    values = [[row[key] for row in some if row["step"] == step] for step in steps]
                    middle = [statistics.median(each) for each in values]
                    drawn = axes.plot(steps, middle, color=plots.colour(number + 1), label=f"{select}, β {beta:g}")[0]
                    if plots.dashes(number + 1):
                        drawn.set_dashes(plots.dashes(number + 1))
                axes.set_ylim(0, 1.05)
            panels[0, column].set_title(f"learning rate {rate:g}", fontsize=9)
            panels[1, column].set_xlabel("step")
        panels[0, 0].set_ylabel("cosine distance")
        panels[1, 0].set_ylabel("share of best energy")
        panels[0, 0].legend(frameon=False, fontsize=8)
    return found[0]


def quantiles(results: Sequence[Result]) -> Picture:
    """Quantiles of rank 1's residual against rank 0's, at the last step that was looked at."""
    found: list[Picture] = []
    caption = "Quantiles of two ranks' residuals against each other: on the diagonal they are distributed alike."
    title = f"Residuals of rank 1 against rank 0, last step, {seeds_of([r.unit.settings for r in results])}"
    with drawing(3.4, "quantiles", title, caption, found) as figure:
        panels = figure.subplots(1, 2, squeeze=False)[0]
        for axes, net in zip(panels, ("fnn3", "lenet5"), strict=True):
            for number, (select, beta) in enumerate((s, b) for s in ("exact", "chunk") for b in (1.0, 0.1)):
                label: str | None = f"{select}, β {beta:g}"
                for r in results:
                    task, method = r.unit.settings["task"], r.unit.settings["method"]
                    wanted = (net, select, beta, 32, 0.05)
                    given = (task["net"], method["select"], beta_of(method))
                    if (*given, task["batch_size"], task["learning_rate"]) == wanted and len(r["quantiles"]) == 2:
                        axes.plot(*r["quantiles"], ".", color=plots.colour(number + 1), markersize=3, label=label)
                        label = None
            low, high = axes.get_xlim()
            axes.plot([low, high], [low, high], color=plots.FAINT, linewidth=1)
            axes.set_title(net, fontsize=9)
            axes.set_xlabel("rank 0, standard deviations")
        panels[0].set_ylabel("rank 1, standard deviations")
        panels[0].legend(frameon=False, fontsize=8)
    return found[0]


def bounds(rows: Sequence[Row]) -> Picture:
    """What a leader's selection leaves against the bound, a point a vector."""
    found: list[Picture] = []
    title = f"Lemma 1: {len(rows)} vectors, {len({row['seed'] for row in rows})} seeds"
    caption = "What the leader's selection leaves of the ranks' mean against Lemma 1's bound: below the line it holds."
    with drawing(3.6, "lemma", title, caption, found) as figure:
        axes = figure.add_subplot()
        for number, select in enumerate(("exact", "chunk"), 1):
            some = [row for row in rows if row["select"] == select]
            axes.plot([row["bound"] for row in some], [row["left"] for row in some], ".", markersize=2.5,
                      color=plots.colour(number), label=select)  # fmt: skip
        axes.plot([0, 1], [0, 1], color=plots.FAINT, linewidth=1, label="the bound")
        axes.set_xlabel("d/k + (1 − d/k)·γ0")
        axes.set_ylabel("‖ȳ − CLT(ȳ)‖²/‖ȳ‖²")
        axes.legend(frameon=False, fontsize=9)
    return found[0]


def sweep(
    values: Mapping[tuple[int, str], Mapping[int, float]],
    factors: Sequence[int],
    names: Sequence[str],
    base: float,
    workers: int,
) -> Picture:
    """Held-out accuracy by learning rate and β."""
    found: list[Picture] = []
    seeds = len(next(iter(values.values())))
    title = f"FNN-3 on Fashion-MNIST, {workers} workers with 8 examples each, {seeds} seeds (least to largest)"
    caption = f"Held-out accuracy with {workers} workers by learning rate and β; trainings that diverged are missing."
    with drawing(3.2, f"large-{workers}", title, caption, found) as figure:
        axes = figure.add_subplot()
        for number, name in enumerate(names):
            for column, factor in enumerate(factors):
                some = [v for v in values[factor, name].values() if v == v]
                if not some:
                    continue
                x, middle = column + 0.12 * (number - 1.5), statistics.median(some)
                ends = [[middle - min(some)], [max(some) - middle]]
                label = name if not column else None
                axes.errorbar([x], [middle], yerr=ends, fmt="o", color=plots.colour(number), capsize=3, label=label)
        axes.set_xticks(range(len(factors)), [f"learning rate {base * factor:g} (x{factor})" for factor in factors])
        axes.set_ylabel("held-out accuracy, %")
        axes.legend(frameon=False, fontsize=9)
    return found[0]


def losses(rows: Sequence[Row], tasks: Sequence[str]) -> Picture:
    """What each setting loses against dense, a panel a task."""
    found: list[Picture] = []
    names = [m for m in dict.fromkeys(row["method"] for row in rows) if m != "none"]
    at = [rate for rate in dict.fromkeys(row["at"] for row in rows) if rate]
    caption = "What is lost against dense training, by compression ratio, selection and β; a cross is a seed's."
    title = f"Held-out loss against dense training, 2 ranks, a cross for each of {seeds_of(rows)}"
    with drawing(1.3 + 1.15 * len(tasks), "losses", title, caption, found) as figure:
        panels = figure.subplots(len(tasks), 1, sharex=True, squeeze=False)[:, 0]
        for axes, task in zip(panels, tasks, strict=True):
            for number, rate in enumerate(at):
                some = [row for row in rows if row["task"] == task and row["at"] == rate and row["loss"] == row["loss"]]
                xs = [names.index(row["method"]) + 0.2 * (number - 1) for row in some]
                axes.plot(xs, [row["loss"] for row in some], "x", color=plots.colour(number + 1), markersize=5,
                          label=rate)  # fmt: skip
            axes.axhline(0, color=plots.FAINT, linewidth=1)
            axes.set_title(task, fontsize=9)
            axes.set_ylabel(unit_of(task))
        panels[-1].set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=8)
        panels[0].legend(frameon=False, fontsize=8, ncols=len(at))
    return found[0]


def unit_of(task: str) -> str:
    """What a task's losses are in."""
    return "bits per byte" if "text" in task else "points"


def ratios(rows: Sequence[Row], tasks: Sequence[str], methods: Sequence[str], most: Mapping[str, float]) -> Picture:
    """What is lost by the overall compression ratio: why not further. The rule's limit is a dashed line."""
    found: list[Picture] = []
    caption = (
        "What is lost against dense training by the overall compression ratio, and the most that the rule allows "
        "(dashed); median, least to largest over seeds."
    )
    title = f"Held-out loss by overall ratio, 2 ranks, {seeds_of(rows)} (median, least to largest)"
    lines = (len(tasks) + 1) // 2
    with drawing(1 + 1.9 * lines, "ratios", title, caption, found) as figure:
        panels = figure.subplots(lines, 2, squeeze=False).flatten()
        for axes in panels[len(tasks) :]:
            axes.set_axis_off()
        for axes, task in zip(panels, tasks, strict=False):
            for number, method in enumerate(methods, 1):
                those = [row for row in rows if (row["task"], row["method"]) == (task, method)]
                at = grouped([row for row in those if row["loss"] == row["loss"]], "at").values()
                xs = [statistics.median(row["rate"] for row in some) for some in at]
                values = [[row["loss"] for row in some] for some in at]
                middle = [statistics.median(each) for each in values]
                ends = [[m - min(v) for m, v in zip(middle, values, strict=True)],
                        [max(v) - m for m, v in zip(middle, values, strict=True)]]  # fmt: skip
                if xs:
                    axes.errorbar(xs, middle, yerr=ends, color=plots.colour(number), marker=".", linewidth=1.3,
                                  capsize=2, label=method)  # fmt: skip
            axes.axhline(most[task], color=plots.FAINT, linewidth=1, dashes=(3, 2))
            axes.set_title(task, fontsize=9)
            axes.set_ylabel(f"{unit_of(task)} lost")
            axes.set_xlim(0, 1.06 * axes.get_xlim()[1])
            axes.set_xlabel("overall compression ratio")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside lower center", ncols=4)
    return found[0]


def convergence(squares: Mapping[str, Sequence[Sequence[float]]], lengths: Sequence[int]) -> Picture:
    """The mean of ‖∇f‖² by the number of steps."""
    found: list[Picture] = []
    title = f"Two layers on digits, 4 ranks, {len(squares['none'])} seeds (median, least to largest)"
    caption = "The mean of ‖∇f‖² over trainings of T steps, by T; the grey line falls as 1/√T."
    with drawing(3.4, "convergence", title, caption, found) as figure:
        axes = figure.add_subplot()
        for number, (name, seeds) in enumerate(squares.items()):
            line(axes, lengths, seeds, number, name)
        start = float(np.median([each[0] for each in squares["none"]]))
        axes.plot(lengths, [start * (lengths[0] / T) ** 0.5 for T in lengths], color=plots.FAINT, dashes=(2, 2))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("T, steps (logarithmic)")
        axes.set_ylabel("mean ‖∇f‖² (logarithmic)")
        axes.legend(frameon=False, fontsize=9)
    return found[0]


def traffic(found: Mapping[str, Sequence[Row]], world_sizes: Sequence[int], n: int) -> Picture:
    """Bytes on the wire, and the share of the result that is not zero, by the number of ranks."""
    into: list[Picture] = []
    title = f"One exchange of n = {n:,}, k/n = 1 %, {len(next(iter(found.values())))} seeds"
    caption = "Bytes that a rank transmits, and how much of the result is not zero, by the number of ranks."
    with drawing(3.2, "traffic", title, caption, into) as figure:
        left, right = figure.subplots(1, 2)
        for number, (name, each) in enumerate(found.items(), 1):
            line(left, world_sizes, [one["wire"] for one in each], number, name)
            line(right, world_sizes, [one["union"] for one in each], number, name)
        for axes, label in ((left, "bytes (logarithmic)"), (right, "share not zero (logarithmic)")):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("ranks")
            axes.set_ylabel(label)
        left.legend(frameon=False, fontsize=9)
    return into[0]
