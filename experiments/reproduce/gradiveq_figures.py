"""The figures of GradiVeQ's page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.ticker import FuncFormatter, NullFormatter, ScalarFormatter

from experiments.output import plots
from experiments.reproduce.claims import Picture
from experiments.reproduce.pictures import picture, seeds_of, style
from experiments.reproduce.rows import Row, grouped

FASHION = "Fashion-MNIST, 10 000 pictures"
HELD_OUT = {"digits_net": "digits, 449 pictures"}


def spectra(rows: Sequence[Row], net: str) -> Picture:
    """The oracle's error against the rank, a line per layer and order, median over windows and seeds."""
    those = [row for row in rows if row["net"] == net and row["default"]]
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(3.8)
        axes = figure.add_subplot()
        for number, ((tensor, order), some) in enumerate(grouped(those, "tensor", "order").items(), 1):
            errors = np.median([np.sqrt(np.maximum(1 - np.array(row["energy"]), 0)) for row in some], axis=0)
            label = f"{tensor} {order}, slices of {some[0]['size']}"
            style(
                axes.plot(some[0]["ranks"], errors, color=plots.colour(number), linewidth=1.5, label=label)[0], number
            )
        axes.axvline(1 / 8, color=plots.FAINT, linewidth=1)
        axes.axhline(0.3, color=plots.FAINT, linewidth=1)
        axes.set_ylim(0, 1.02)
        axes.set_xlim(0, 0.5)
        axes.set_xlabel("rank of the basis / elements of a slice (n/8 is marked)")
        axes.set_ylabel("‖g − UUᵀg‖/‖g‖ (0.3 is marked)")
        axes.legend(frameon=False, fontsize=7.5)
        title = f"{net}: what the best basis of a rank leaves of the slices, {seeds_of(those)}"
        return picture(
            figure, f"spectrum-{net}", title, f"The error of the best basis by its rank, for layers of {net}."
        )


def by_slice(rows: Sequence[Row]) -> Picture:
    """The oracle's error at rank n/8 against the slice's size, every layer, window and seed a point."""
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(3.4)
        axes = figure.add_subplot()
        for number, ((net, order), some) in enumerate(grouped(rows, "net", "order").items(), 1):
            shift = 1.03 ** (number - 2.5)
            axes.plot(
                [row["size"] * shift for row in some],
                [row["error"] for row in some],
                "o+sx"[(number - 1) % 4],
                color=plots.colour(number),
                markersize=4,
                label=f"{net}, {order}",
            )
        sizes = sorted({row["size"] for row in rows})
        control = [statistics.median(row["control"] for row in rows if row["size"] == size) for size in sizes]
        axes.plot(sizes, control, color=plots.FAINT, dashes=(1.4, 1.4), label="elements shuffled (median)")
        axes.axhline(0.3, color=plots.FAINT, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_ylim(0, 1.25)
        axes.set_xlabel("elements of a slice, n (logarithmic)")
        axes.set_ylabel("error of the best basis of rank n/8")
        axes.legend(frameon=False, fontsize=8, ncols=2)
        title = f"Slices by size and order: {len(rows)} spectra, {seeds_of(rows)} (0.3 is marked)"
        return picture(figure, "slices", title, "The error of the best basis of rank n/8 by the size of the slices.")


def over_time(rows: Sequence[Row], net: str) -> Picture:
    """Errors in the steps after the dense ones, a panel a window; medians over layers and seeds."""
    those = [row for row in rows if row["net"] == net]
    starts = sorted({row["start"] for row in those})
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(3.4)
        panels = np.atleast_1d(figure.subplots(1, len(starts), sharey=True))
        for axes, start in zip(panels, starts, strict=True):
            for number, ((entry,), some) in enumerate(
                grouped([row for row in those if row["start"] == start], "entry").items(), 1
            ):
                middle = np.nanmedian([row["errors"] for row in some], axis=0)
                line = axes.plot(some[0]["ages"], middle, color=plots.colour(number), linewidth=1.4, label=entry)[0]
                style(line, number)
            axes.set_ylim(0, 1.5)
            axes.set_xlabel(f"steps after the fit\n(dense from step {start} on)")
        panels[0].set_ylabel("‖ĝ − ḡ‖/‖ḡ‖ of a step")
        panels[0].legend(frameon=False, fontsize=8)
        layers = len({row["tensor"] for row in those})
        title = f"{net}: errors while a basis is used, median of {layers} layers and {seeds_of(those)}"
        return picture(figure, f"carries-{net}", title, f"How long a basis lasts in {net}, compared with the oracle's.")


def accuracies(rows: Sequence[Row], net: str) -> Picture:
    """Points of accuracy against the same seed's dense training, by the overall compression ratio, one per training."""
    those = [row for row in rows if row["net"] == net and row["value"] == row["value"]]
    dense = {row["seed"]: row["value"] for row in those if row["method"] == "dense"}
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(4.4)
        axes = figure.add_subplot()
        others = [row for row in those if row["method"] != "dense"]
        for number, ((method,), some) in enumerate(grouped(others, "method").items(), 1):
            xs, ys = [row["wire"] for row in some], [row["value"] - dense[row["seed"]] for row in some]
            axes.plot(xs, ys, "o^sDvPX*<>"[number % 10], color=plots.colour(number), markersize=6, label=method)
        axes.axhline(0, color=plots.colour(0), linewidth=1)
        axes.axhline(-1, color=plots.FAINT, linewidth=1)
        axes.axvline(5, color=plots.FAINT, linewidth=1)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks([1, 2, 3, 5, 8, 12])
        axes.set_xlabel("compression ratio on the wire, dense steps counted (logarithmic; 5x is marked)")
        axes.set_ylabel("points against dense (−1 is marked)")
        figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=2)
        title = f"{net} on {HELD_OUT.get(net, FASHION)} held out: accuracy, {seeds_of(those)}"
        return picture(
            figure,
            f"accuracy-{net}",
            title,
            f"Held-out accuracy of {net} by the overall compression ratio, a point per training.",
        )


def speedups(rows: Sequence[Row], net: str) -> Picture:
    """How many times faster than dense a whole cycle is, by link, a bar per scheme."""
    those = [row for row in rows if row["net"] == net]
    links = list(dict.fromkeys(row["link"] for row in those))
    schemes = list(dict.fromkeys(row["scheme"] for row in those))
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(3.4)
        axes = figure.add_subplot()
        width = 0.8 / len(schemes)
        for number, scheme in enumerate(schemes):
            found = [[r["speedup"] for r in those if (r["link"], r["scheme"]) == (link, scheme)] for link in links]
            middle = [statistics.median(each) for each in found]
            ends = [
                [m - min(e) for m, e in zip(middle, found, strict=True)],
                [max(e) - m for m, e in zip(middle, found, strict=True)],
            ]
            xs = np.arange(len(links)) + (number - (len(schemes) - 1) / 2) * width
            axes.bar(
                xs,
                middle,
                width * 0.9,
                yerr=ends,
                capsize=2,
                ecolor=plots.FAINT,
                color=plots.colour(number + 1),
                label=scheme,
            )
        axes.axhline(5, color=plots.FAINT, linewidth=1)
        axes.axhline(1, color=plots.FAINT, linewidth=1, dashes=(2, 2))
        axes.set_xticks(range(len(links)), links)
        axes.set_ylabel("times as fast as the dense ring")
        figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=2)
        title = (
            f"{net}: a cycle of 100 dense and 400 compressed steps, pipelined ring, {seeds_of(those)} (5x is marked)"
        )
        slug = net.lower().replace(" ", "-")
        return picture(figure, f"cycle-{slug}", title, f"Aggregation of {net}: speed-up over the dense ring, by link.")


def mixes(rows: Sequence[Row]) -> Picture:
    """Errors against the compression ratio on the wire: GradiVeQ alone, QSGD alone, and both."""
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(3.4)
        axes = figure.add_subplot()
        for number, ((kind,), some) in enumerate(grouped(rows, "kind").items(), 1):
            points = []
            for (name,), each in grouped(some, "contender").items():
                values = [row["error"] for row in each]
                points.append((each[0]["wire"], statistics.median(values), min(values), max(values), name))
            points.sort()
            xs, ys = [p[0] for p in points], [p[1] for p in points]
            ends = [[p[1] - p[2] for p in points], [p[3] - p[1] for p in points]]
            axes.errorbar(xs, ys, yerr=ends, fmt="o", capsize=3, color=plots.colour(number), label=kind)
            for x, y, *_, name in points:
                place, side = {"both": ((5, -9), "left"), "QSGD alone": ((-5, -3), "right")}.get(kind, ((5, 4), "left"))
                axes.annotate(name, (x, y), xytext=place, ha=side, textcoords="offset points", fontsize=7)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks([8, 16, 32])
        axes.set_xlim(5.5, 55)
        axes.set_ylim(0, None)
        axes.set_xlabel("compression ratio of compressed steps, on the wire (logarithmic)")
        axes.set_ylabel("‖ĝ − ḡ‖/‖ḡ‖, median of layers and steps")
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        title = f"GradiVeQ, QSGD, and both at equal ratios, {seeds_of(rows)} (median, least to largest)"
        return picture(figure, "mixes", title, "Errors of GradiVeQ, of QSGD and of both together, at equal ratios.")
