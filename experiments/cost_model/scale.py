"""``python -m experiments scale``: predicted seconds and bytes of an exchange, by the number of workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from experiments import nets
from experiments.cluster.rates import Rate
from experiments.configfile import MethodEntry
from experiments.cost_model import model
from experiments.cost_model.fitted import Fitted
from experiments.report import numbers, plots, tables
from hvdcompress.plan import plan_of

__all__ = ["WORKERS", "draw", "notes", "predict", "table", "tensors_of"]

WORKERS = (2, 4, 8, 16, 64, 256, 1024, 4096)
DENSE = "dense"  #: stock Horovod's all-reduce, or ``none`` over mpi4py


def tensors_of(words: str) -> nets.Shapes:
    """Return the tensors to exchange.

    Args:
        words: the name of a net, a YAML file of shapes (name: [extents]), or a number of elements, which gives matrices
            of about a million elements.

    Raises:
        ValueError: it is none of these.
        FileNotFoundError: there is no such file.
    """
    if words.isdigit():
        elements, count = int(words), -(-int(words) // 10**6)
        side = max(1, math.isqrt(elements // count))
        made: nets.Shapes = {f"tensor{at}": (side, elements // count // side) for at in range(count)}
        rest = elements - nets.total(made)
        return {**made, "rest": (rest,)} if rest else made
    if not Path(words).suffix:
        return nets.get(words)
    given = yaml.safe_load(Path(words).read_text(encoding="utf-8"))
    try:
        return {str(name): tuple(int(extent) for extent in shape) for name, shape in given.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{words} must hold names and shapes, such as `conv1: [64, 3, 7, 7]`") from None


def predict(
    fitted: Fitted, entries: Sequence[MethodEntry], tensors: nets.Shapes, rates: Sequence[str], workers: Sequence[int]
) -> pd.DataFrame:
    """Predict an exchange of tensors, on machines like that of the fit with a core and a link for each rank.

    Args:
        fitted: the model.
        entries: the methods.
        tensors: shapes by name.
        rates: of the links, such as "1gbit".
        workers: numbers of ranks.

    Returns:
        One record per rate, method and number of workers: ``seconds``, their parts by the names of the constants, and
        ``on_wire`` (bytes that a rank transmits). "dense" comes first.

    Raises:
        ValueError: a rate or a number of workers is wrong.
    """
    if not workers or min(workers) < 2:
        raise ValueError(f"{list(workers)} workers: there must be 2 at least")
    speeds = {rate: Rate.parse(rate).slower for rate in rates}
    plans = {} if fitted.driver == "horovod" else {DENSE: plan_of("none")}
    plans |= {entry.label: entry.plan for entry in entries}
    works = []
    for p in sorted(set(workers)):
        if fitted.driver == "horovod":
            works.append({"method": DENSE, **model.stock(tensors, p)._asdict()})
        for label, plan in plans.items():
            works.append({"method": label, **model.work(plan, tensors, p, fitted.codec, fitted.driver)._asdict()})
    asked = pd.DataFrame({"rate_name": speeds.keys(), "rate": speeds.values()})
    points = asked.merge(pd.DataFrame(works), how="cross").assign(shared=1.0)
    parts = model.costs(fitted.constants, points)
    head = points[["rate_name", "method", "world_size", "on_wire"]].set_axis(
        ["rate", "method", "workers", "on_wire"], axis=1
    )
    return head.assign(seconds=parts.sum(axis=1)).join(parts)


def table(predicted: pd.DataFrame, rate: str, value: str = "seconds") -> str:
    """Return a Markdown table of one rate: methods by workers; ``*`` marks what is no faster than dense."""
    wide = predicted[predicted["rate"] == rate].pivot_table(value, "method", "workers", sort=False)
    form = numbers.seconds_of if value == "seconds" else numbers.num_bytes
    cells = wide.map(form)
    if value == "seconds":
        slow = wide.ge(wide.loc[DENSE], axis=1) & (wide.index != DENSE)[:, None]
        cells = cells.where(~slow, cells + r"\*")
    return tables.markdown(cells.reset_index())


def draw(predicted: pd.DataFrame) -> Figure:
    """Draw seconds over the number of workers, one panel per rate."""

    def logarithmic(ax: Axes, rows: pd.DataFrame) -> None:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ticks = sorted(rows["workers"].unique())
        ax.set_xticks(ticks[:: max(1, len(ticks) // 5)])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.seconds_of(value).replace(".00", "")))
        ax.yaxis.set_minor_formatter(NullFormatter())

    return plots.lines(predicted, "workers", "seconds", "method", "rate", decorate=logarithmic, height=3.2)


def notes(fitted: Fitted, rates: Sequence[str]) -> list[str]:
    """Return what a reader must know to read the predictions."""
    said = [
        f"Held out ({split}; {found['points']} exchanges): median error {100 * found['median']:.0f} %, worst "
        f"{100 * found['worst']:.0f} % ({found['which']})."
        for split, found in fitted.held_out.items()
    ]
    said.append(
        "*: no faster than dense. Collectives as rings, dense too; nothing overlaps with a backward pass; each rank "
        "has a core like that of the fit and a link for itself."
    )
    most, measured = fitted.points["world_size"].max(), fitted.points["rate"]
    said.append(f"Beyond {most} workers nothing was measured: those figures extrapolate the formulas.")
    for rate in rates:
        if not measured.min() <= Rate.parse(rate).slower <= measured.max():
            low, high = (f"{bits / 1e6:g} Mbit/s" for bits in (measured.min(), measured.max()))
            said.append(
                f"{rate} is beyond the fit, whose links had {low} to {high}: real times can be several times longer, "
                "as other limits than the link take over. `python -m experiments bench` measures them."
            )
    return said
