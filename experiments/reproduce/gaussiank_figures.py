"""The figures of Gaussian-k's page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.ticker import FuncFormatter, NullFormatter

from experiments.output import plots
from experiments.phases import PHASES
from experiments.report.numbers import percent
from experiments.reproduce import gaussiank_measures as measures
from experiments.reproduce.claims import Picture
from experiments.reproduce.pictures import picture, seeds_of, style
from experiments.reproduce.rows import Row


def histograms(rows: Sequence[Row], net: str) -> Picture:
    """The histogram of all tensors in each phase, mean over steps and seeds, with Normal and Laplace curves."""
    those = [row for row in rows if row["net"] == net and row["tensor"] == measures.WHOLE and row["histogram"]]
    centres = (measures.EDGES[1:] + measures.EDGES[:-1]) / 2
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(3.6)
        axes = figure.add_subplot()
        curves = {
            "Normal": np.exp(-(centres**2) / 2) / math.sqrt(2 * math.pi),
            "Laplace": np.exp(-math.sqrt(2) * abs(centres)) / math.sqrt(2),
        }
        curves |= {
            phase: np.mean([row["histogram"] for row in those if row["phase"] == phase], axis=0)
            for phase in PHASES
            if any(row["phase"] == phase for row in those)
        }
        for number, (label, values) in enumerate(curves.items()):
            style(axes.plot(centres, values, color=plots.colour(number), linewidth=1.6, label=label)[0], number + 1)
        axes.set_yscale("log")
        axes.set_ylim(1e-5, 3)
        axes.set_xlabel("(u − mean)/standard deviation of a step's vector")
        axes.set_ylabel("density (logarithmic)")
        axes.legend(frameon=False, fontsize=9)
        n = those[0]["n"] if those else 0
        title = f"{net}: gradient + residual, all {n:,} elements, {seeds_of(those)}"
        return picture(
            figure,
            f"distribution-{net}",
            title,
            f"Histograms of gradient + residual of {net} in three phases of training.",
        )


def bounds(rows: Sequence[Row], densities: Sequence[float]) -> Picture:
    """What top-k leaves, every vector a point, against both bounds."""
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(3.4)
        axes = figure.add_subplot()
        nets = list(dict.fromkeys(row["net"] for row in rows))
        for number, net in enumerate(nets):
            those = [row for row in rows if row["net"] == net]
            for density in densities:
                ys = [row["left"][str(density)] for row in those]
                xs = density * (1 + 0.35 * (number - (len(nets) - 1) / 2)) * np.linspace(0.93, 1.07, len(ys))
                label = net if density == densities[0] else None
                axes.plot(xs, ys, ".", color=plots.colour(number + 1), markersize=2.5, label=label)
        xs = np.geomspace(min(densities) / 2, max(densities) * 2, 60)
        axes.plot(xs, 1 - xs, color=plots.colour(0), label="1 − k/n")
        axes.plot(xs, (1 - xs) ** 2, color=plots.colour(5), dashes=(5, 2), label="(1 − k/n)²")
        axes.set_xscale("log")
        axes.set_ylim(0, 1.03)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("k/n (logarithmic)")
        axes.set_ylabel("‖u − top_k(u)‖²/‖u‖²")
        axes.legend(frameon=False, fontsize=9, loc="lower left")
        title = f"What top-k leaves of gradient + residual: {len(rows)} vectors, {seeds_of(rows)}"
        return picture(
            figure, "bounds", title, "The energy that top-k leaves, against the two bounds, a point a vector."
        )


def curves(rows: Sequence[Row], net: str) -> Picture:
    """The theorem's curve for every tensor (median over steps and seeds), and its line."""
    those = [row for row in rows if row["net"] == net and row["curve"]["points"]]
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(3.2)
        axes = figure.add_subplot()
        places = np.linspace(0, 1, 41)
        for number, tensor in enumerate(dict.fromkeys(row["tensor"] for row in those)):
            found = np.median([row["curve"]["points"] for row in those if row["tensor"] == tensor], axis=0)
            style(axes.plot(places, found, color=plots.colour(number + 1), linewidth=1.5, label=tensor)[0], number + 1)
        axes.plot(places, 1 - places, color=plots.colour(0), label="1 − i/n")
        axes.set_xlabel("i/n, elements in descending order of magnitude")
        axes.set_ylabel("(|u|(i)/max |u|)²")
        axes.legend(frameon=False, fontsize=9)
        title = f"{net}: squared magnitudes against the theorem's line, {seeds_of(those)}"
        return picture(figure, f"curve-{net}", title, f"The theorem's curve of each tensor of {net}, below its line.")


def counts(rows: Sequence[Row], rules: Sequence[str], densities: Sequence[float]) -> Picture:
    """Count/k of each rule, a box a density."""
    least = 1e-3
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(3.4)
        panels = figure.subplots(1, len(densities), sharey=True)
        for axes, density in zip(np.atleast_1d(panels), densities, strict=True):
            found = [[max(row["counts"][str(density)][rule], least) for row in rows] for rule in rules]
            axes.axhspan(2 / 3, 4 / 3, color=plots.GRID)
            axes.boxplot(
                found,
                whis=(5, 95),
                showfliers=False,
                medianprops={"color": plots.colour(1), "linewidth": 2},
                boxprops={"color": plots.FAINT},
                whiskerprops={"color": plots.FAINT},
                capprops={"color": plots.FAINT},
            )
            axes.set_yscale("log")
            axes.set_xticks(range(1, len(rules) + 1), [rule.replace(" ", "\n") for rule in rules], fontsize=8)
            axes.set_xlabel(f"k/n = {percent(density)}")
        np.atleast_1d(panels)[0].set_ylabel(f"count/k (logarithmic; {least:g}: none)")
        title = f"Elements chosen by each rule: {len(rows)} vectors, {seeds_of(rows)}\n"
        title += "whiskers 5 to 95 %, shaded 2/3 to 4/3"
        return picture(figure, "counts", title, "Elements that each rule's threshold chooses, in units of k.")


def times(rows: Sequence[Row], names: Sequence[str]) -> Picture:
    """Seconds against n, a line per selector (values from a Laplace distribution; least to largest over seeds)."""
    those = [row for row in rows if row["draws"] == "laplace"]
    ns = sorted({row["n"] for row in those})
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(4.2)
        axes = figure.add_subplot()
        for number, name in enumerate(names):
            found = [[row["seconds"] * 1e3 for row in those if (row["n"], row["selector"]) == (n, name)] for n in ns]
            middle = [statistics.median(each) for each in found]
            style(axes.plot(ns, middle, color=plots.colour(number + 1), linewidth=1.7, label=name)[0], number + 1)
            axes.vlines(
                ns, [min(e) for e in found], [max(e) for e in found], color=plots.colour(number + 1), linewidth=1
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("n, elements (logarithmic)")
        axes.set_ylabel("milliseconds (logarithmic)")
        figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
        title = f"Selecting 0.1 % of n values (Laplace), one core, {seeds_of(those)} (median, least to largest)"
        return picture(figure, "times", title, "Selection time of each selector by the number of elements.")


def accuracies(rows: Sequence[Row], densities: Sequence[float], net: str) -> Picture:
    """Held-out accuracy against density, a line per method; least to largest over seeds."""
    those = [row for row in rows if row["net"] == net]
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(3.5)
        axes = figure.add_subplot()
        dense = [row["value"] for row in those if row["method"] == "none"]
        axes.axhline(statistics.median(dense), color=plots.colour(0), label="none (dense)")
        for number, method in enumerate(("topk", "gaussiank", "randomk"), 1):
            found = {
                d: [
                    r["value"] for r in those if (r["method"], r["density"]) == (method, d) and r["value"] == r["value"]
                ]
                for d in densities
            }
            some = {d: values for d, values in found.items() if values}
            xs = [d * (1 + 0.05 * (number - 2)) for d in some]
            middle = [statistics.median(values) for values in some.values()]
            ends = [[m - min(v) for m, v in zip(middle, some.values(), strict=True)],
                    [max(v) - m for m, v in zip(middle, some.values(), strict=True)]]  # fmt: skip
            axes.errorbar(xs, middle, yerr=ends, fmt="o-", color=plots.colour(number), capsize=3, label=method)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("k/n (logarithmic)")
        axes.set_ylabel("held-out accuracy, %")
        figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=4)
        title = f"{net} on Fashion-MNIST, 10 000 held-out pictures, {seeds_of(those)} (median, least to largest)"
        return picture(
            figure,
            f"accuracy-{net}",
            title,
            f"Held-out accuracy of {net} by density; trainings that diverged are left out.",
        )
