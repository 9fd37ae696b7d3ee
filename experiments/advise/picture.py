"""Pictures: a step's time against the link's speed, a line per candidate; predicted against measured steps."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.ticker import FuncFormatter, NullFormatter

from experiments.advise.choose import Candidate, Case
from experiments.advise.outcome import Outcome
from experiments.cluster.rates import speed
from experiments.output import plots
from experiments.report import numbers

__all__ = ["steps", "truth"]

FASTEST, POINTS = 1e11, 61
ALLOWED = 0.15  # the error that the adviser may have on average


def steps(case: Case, candidates: list[Candidate], title: str) -> str:
    """An SVG file: seconds of a step against bits per second of the link, both logarithmic.

    Args:
        case: what is predicted.
        candidates: the dense one first.
        title: what the plot shows.
    """
    slowest = min(1e8, case.link.speed / 10)
    rates = np.geomspace(slowest, max(FASTEST, case.link.speed * 10), POINTS).tolist()
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(4.6)
        axes = figure.add_subplot()
        for number, one in enumerate(candidates):
            seconds = [case.predict(one.plan, rate * case.link.share).seconds for rate in rates]
            colour = plots.colour(number)
            line = axes.plot(rates, seconds, color=colour, linewidth=2.6 if number == 0 else 1.5, label=one.label)[0]
            if plots.dashes(number):
                line.set_dashes(plots.dashes(number))
            if rates[0] < one.break_even < rates[-1]:
                at = case.predict(one.plan, one.break_even * case.link.share).seconds
                axes.plot([one.break_even], [at], "o", color=colour, markersize=6)
        axes.axhline(case.times.alone, color=plots.FAINT, linewidth=0.8, linestyle=":") if case.times.alone else None
        axes.axvline(case.link.speed, color=plots.FAINT, linewidth=0.8)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: speed(value)))
        axes.yaxis.set_major_formatter(FuncFormatter(_seconds))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(title, fontsize=9.5)
        axes.set_xlabel("speed of the links (upright line: given; dots: break-even; dotted: no exchange)")
        axes.set_ylabel("time of a step")
        figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=8.5)
        return plots.alone(plots.svg(figure, "advise", title))


def _seconds(value: float, _: object) -> str:
    """A mark of an axis: ``10 s``, where a table has ``10.0 s``."""
    number, unit = numbers.seconds_of(value).split()
    return f"{float(number):g} {unit}"


def truth(found: Sequence[Outcome]) -> str:
    """An SVG file: predicted against measured steps, a colour a net and a mark a link; both axes logarithmic."""
    nets, rates = list(dict.fromkeys(o.net for o in found)), list(dict.fromkeys(o.rate for o in found))
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.figure(4.6)
        axes = figure.add_subplot()
        ends = [min(o.measured for o in found) / 1.5, max(o.measured for o in found) * 1.5]
        axes.plot(ends, ends, color=plots.FAINT, linewidth=0.8)
        for off in (1 - ALLOWED, 1 + ALLOWED):
            axes.plot(ends, [off * end for end in ends], color=plots.FAINT, linewidth=0.8, linestyle=":")
        for number, net in enumerate(nets):
            for mark, rate in zip("osv^D*"[: len(rates)], rates, strict=True):
                here = [o for o in found if (o.net, o.rate) == (net, rate)]
                axes.plot(
                    [o.measured for o in here],
                    [o.predicted for o in here],
                    mark,
                    color=plots.colour(number),
                    markersize=5,
                    label=f"{net}, {rate}",
                )
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(_seconds))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"a measured step (dotted: {100 * ALLOWED:.0f} % off)")
        axes.set_ylabel("predicted")
        figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=8)
        return plots.alone(plots.svg(figure, "truth", "Predicted against measured steps, a mark a plan"))
