"""The figures of FFT's page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.ticker import FuncFormatter, NullFormatter

from experiments.bench.formats import BITS, EXPONENTS
from experiments.cluster.rates import Rate
from experiments.output import plots
from experiments.reproduce.claims import Picture, Result
from experiments.reproduce.pictures import picture, seeds_of, style
from experiments.reproduce.rows import Row, grouped, over_seeds

CAUSES = {"kurtosis": "kurtosis of the elements (3: normal)", "correlation": "correlation of neighbours in memory"}
MARKS = "os^Dv"
LEAST = 1e-3  #: the least error that is drawn


def _plain(axis: Any) -> None:
    """Numbers as they are on a logarithmic axis."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def ratios(rows: Sequence[Row], rivals: Sequence[str], ratio: Callable[[Row], float]) -> Picture:
    """FFT's error divided by each rival's, by net and kind of layer; least to largest over seeds."""
    places = list(grouped(rows, "net", "kind"))
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(0.55 * len(places) + 1.6)
        axes = figure.add_subplot()
        for number, rival in enumerate(rivals):
            ys = [place + 0.11 * (number - (len(rivals) - 1) / 2) for place in range(len(places))]
            found = [
                over_seeds([r for r in rows if (r["net"], r["kind"], r["rival"]) == (*place, rival)], ratio)
                for place in places
            ]
            colour = plots.colour(number + 1)
            marker = MARKS[number % len(MARKS)]
            axes.plot([statistics.median(f) for f in found], ys, marker, color=colour, markersize=4, label=rival)
            axes.hlines(ys, [min(f) for f in found], [max(f) for f in found], color=colour, linewidth=1)
        axes.axvline(1.0, color=plots.INK, linewidth=1)
        axes.set_xscale("log")
        _plain(axes.xaxis)
        axes.set_yticks(range(len(places)), [f"{net},\n{kind}" for net, kind in places], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("FFT's error divided by the other's (logarithmic; left of 1 FFT errs less)")
        figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
        steps = len({(row["net"], row["seed"], row["step"]) for row in rows})
        title = f"Error of one exchange against others: {steps} steps, {seeds_of(rows)} (median, least to largest)"
        caption = "FFT's error divided by each competitor's, at equal bytes, and top-k's at equal θ."
        return picture(figure, "ratios", title, caption)


def _error(id: str, theta: str, row: Row) -> float:
    return max(row["thetas"][theta][id], LEAST)


def by_theta(results: Iterable[Result], thetas: Sequence[float]) -> Picture:
    """Error against θ of frequencies and of elements, a panel a kind of layer."""
    rows = [
        {"net": result.unit.settings["task"]["net"], "seed": result.unit.settings["seed"], **row}
        for result in results
        for row in result["tensors"]
    ]
    kinds = grouped(rows, "kind")
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(2.1 * math.ceil(len(kinds) / 3) + 0.9)
        panels = np.atleast_1d(figure.subplots(math.ceil(len(kinds) / 3), 3, sharex=True, sharey=True)).ravel()
        for axes in panels[len(kinds) :]:
            axes.set_axis_off()
        for axes, ((kind,), some) in zip(panels, kinds.items(), strict=False):
            for number, (id, label) in enumerate((("fft", "frequencies"), ("topk", "elements (top-k)")), 1):
                found = [over_seeds(some, partial(_error, id, str(theta))) for theta in thetas]
                xs = [1 - theta for theta in thetas]
                line = axes.plot(
                    xs, [statistics.median(f) for f in found], "o-", color=plots.colour(number), markersize=3
                )
                style(line[0], number)
                line[0].set_label(label)
                axes.vlines(xs, [min(f) for f in found], [max(f) for f in found], color=plots.colour(number))
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_title(f"{kind}, {len(grouped(some, 'net', 'tensor'))} tensors", fontsize=9)
            axes.set_xticks([1 - theta for theta in thetas], [f"{theta:g}" for theta in thetas], fontsize=7)
            axes.xaxis.set_minor_formatter(NullFormatter())
        panels[0].invert_xaxis()  # shared by all
        figure.supxlabel("θ, the share that is dropped (logarithmic in 1 − θ)", fontsize=10)
        figure.supylabel("error (logarithmic)", fontsize=10)
        panels[0].legend(frameon=False, fontsize=8)
        title = f"Error of one exchange at equal θ, values in full, {seeds_of(rows)} (median, least to largest)"
        caption = "Error of FFT and of top-k against θ, by kind of layer, over all nets."
        return picture(figure, "theta", title, caption)


def causes(rows: Sequence[Row], ratio: Callable[[Row], float], rival: str) -> Picture:
    """The ratio of errors against what might decide it, a point per tensor."""
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(3.6)
        panels = figure.subplots(1, len(CAUSES), sharey=True)
        for axes, (key, label) in zip(panels, CAUSES.items(), strict=True):
            for number, ((kind,), some) in enumerate(grouped(rows, "kind").items()):
                xs, ys = [row[key] for row in some], [min(ratio(row), 100.0) for row in some]
                axes.plot(xs, ys, MARKS[number % 5], color=plots.colour(number + 1), markersize=4, label=kind)
            axes.axhline(1.0, color=plots.INK, linewidth=1)
            axes.set_yscale("log")
            _plain(axes.yaxis)
            axes.set_xlabel(label, fontsize=9)
        panels[0].set_xscale("log")
        _plain(panels[0].xaxis)
        panels[0].set_ylabel("FFT's error / top-k's (logarithmic; at most 100)", fontsize=9)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside lower center", ncols=3)
        title = f"What decides against {rival}: {len(rows)} tensors, medians of steps and seeds"
        caption = "FFT's error divided by top-k's at equal θ, against the tails of the elements and their smoothness."
        return picture(figure, "causes", title, caption)


def losses(rows: Sequence[Row], net: str) -> Picture:
    """Training loss by step, the mean over seeds, a line per plan."""
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(4.0)
        axes = figure.add_subplot()
        for number, ((plan,), some) in enumerate(grouped(rows, "plan").items()):
            curves = [row["losses"] for row in some if row["losses"]]  # none where it diverged
            if not curves:
                continue
            mean = np.mean(curves, axis=0)
            xs = (np.arange(len(mean)) + 0.5) * some[0]["steps"] / len(mean)
            label = "dense" if plan == "none" else f"θ {plan}"
            style(axes.plot(xs, mean, color=plots.colour(number), linewidth=1.5, label=label)[0], number)
        axes.set_yscale("log")
        _plain(axes.yaxis)
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("step")
        axes.set_ylabel("training loss, nats (logarithmic)")
        figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
        title = f"{net}: training with θ by schedule, {seeds_of(rows)} (mean)"
        return picture(figure, f"losses-{net}", title, f"Training loss of {net} with θ by schedule.")


def formats(rows: Sequence[Row], what: str, words: str) -> Picture:
    """Error against bits, a line per family of formats; least to largest over seeds."""
    families: dict[str, Callable[[int], str]] = {
        "range float": lambda n: f"rangefloat{n}",
        "uniform": lambda n: "uniform",
        **{f"float, {e} bits of exponent": (lambda n, e=e: f"e{e}m{n - 1 - e}") for e in EXPONENTS},  # type: ignore[misc]
    }
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(3.6)
        axes = figure.add_subplot()
        for number, (label, name) in enumerate(families.items(), 1):
            found = [
                over_seeds([r for r in rows if (r["bits"], r["format"]) == (n, name(n))], lambda r: r[what])
                for n in BITS
            ]
            line = axes.plot(BITS, [statistics.median(f) for f in found], color=plots.colour(number), label=label)
            style(line[0], number)
            axes.vlines(BITS, [min(f) for f in found], [max(f) for f in found], color=plots.colour(number))
        axes.set_yscale("log")
        _plain(axes.yaxis)
        axes.set_xticks(BITS)
        axes.set_xlabel("bits per value")
        axes.set_ylabel("‖decoded − x‖/‖x‖ (logarithmic)")
        axes.legend(frameon=False, fontsize=8)
        steps = len({(row["net"], row["seed"], row["step"]) for row in rows})
        title = f"Number formats on {words}: {steps} steps, {seeds_of(rows)} (median, least to largest)"
        return picture(figure, f"formats-{what}", title, f"Error of number formats on {words}, by bits.")


def exchanges(rows: Sequence[Row], rates: Sequence[str], labels: Sequence[str], world_size: int) -> Picture:
    """Predicted seconds of AlexNet's exchange by link, a panel per host, a line per method."""
    hosts = grouped(rows, "host")
    speeds = [Rate.parse(rate).slower / 1e9 for rate in rates]
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(3.8)
        panels = np.atleast_1d(figure.subplots(1, len(hosts), sharey=True))
        for axes, ((host,), some) in zip(panels, hosts.items(), strict=True):
            for number, label in enumerate(labels):
                found = [[r["seconds"] for r in some if (r["rate"], r["method"]) == (rate, label)] for rate in rates]
                name = "dense" if label == "none" else label
                line = axes.plot(speeds, [statistics.median(f) for f in found], color=plots.colour(number), label=name)
                style(line[0], number)
                axes.vlines(speeds, [min(f) for f in found], [max(f) for f in found], color=plots.colour(number))
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xticks(speeds, [f"{speed:g}" for speed in speeds])
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_title(f"codec: {host}", fontsize=9)
            axes.set_xlabel("link, Gbit/s (logarithmic)")
        panels[0].set_ylabel("seconds (logarithmic), predicted")
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, frameon=False, fontsize=8, loc="outside lower center", ncols=3)
        title = (
            f"Model: AlexNet's exchange, 61 million elements, {world_size} ranks; codecs timed with {seeds_of(rows)}"
        )
        caption = "Predicted time of AlexNet's exchange by link, with the codec of one core and with a faster one."
        return picture(figure, "alexnet", title, caption)


def primitives(rows: Sequence[Row], names: Sequence[str]) -> Picture:
    """Nanoseconds per element of each primitive, by size; least to largest over seeds."""
    ns = sorted({row["n"] for row in rows})
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(4.0)
        axes = figure.add_subplot()
        for number, name in enumerate(names):
            found = [[1e9 * r["seconds"] / n for r in rows if (r["n"], r["primitive"]) == (n, name)] for n in ns]
            line = axes.plot(ns, [statistics.median(f) for f in found], color=plots.colour(number), label=name)
            style(line[0], number)
            axes.vlines(ns, [min(f) for f in found], [max(f) for f in found], color=plots.colour(number), linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _plain(axes.yaxis)
        axes.set_xlabel("n, elements (logarithmic)")
        axes.set_ylabel("nanoseconds per element (logarithmic)")
        figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
        title = f"FFT's primitives, one core, θ 0.85, {seeds_of(rows)} (median, least to largest)"
        return picture(figure, "primitives", title, "Time of FFT's primitives per element, by size.")
