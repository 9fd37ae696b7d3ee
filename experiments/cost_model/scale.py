"""``python -m experiments scale``: predicted seconds and bytes of an exchange, by the number of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from experiments import nets
from experiments.cluster.hosts import title
from experiments.configfile import MethodEntry
from experiments.cost_model import model
from experiments.cost_model.fitted import Fitted
from experiments.report import numbers, plots, results, tables
from hvdcompress.cli.numbers import bits_of
from hvdcompress.engine.nodes import Nodes
from hvdcompress.plan import plan_of

DENSE = "dense"  #: stock Horovod's all-reduce, or ``none`` over mpi4py


def predict(
    fitted: Fitted,
    entries: Sequence[MethodEntry],
    tensors: nets.Shapes,
    rates: Sequence[str],
    workers: Sequence[int],
    local_size: int = 1,
    inside: str = "80gbit",
) -> pd.DataFrame:
    """Predict an exchange of tensors, on machines like that of the fit with a core for each rank.

    Args:
        fitted: the model.
        entries: the methods.
        tensors: shapes by name.
        rates: of the hosts' links, such as "1gbit".
        workers: numbers of ranks.
        local_size: number of ranks of a host; with several, exchanges with two levels are predicted, too.
        inside: rate at which a rank sends to others of its host; by default that of shared memory.

    Returns:
        One record per rate, ``levels`` (1 or 2), method and number of workers: ``seconds``, their parts by the names of
        the constants, and bytes, as :class:`model.Work` has them. "dense" comes first.

    Raises:
        ValueError: a rate or a number of workers is wrong.
    """
    if not workers or min(workers) < 2 or any(p % local_size for p in workers):
        raise ValueError(f"{list(workers)} workers: there must be 2 at least, and {local_size} on each host")
    works = []
    plans = {DENSE: plan_of("none"), **{each.label: each.plan for each in entries}}
    codec, driver = fitted.codec, fitted.driver
    for p in sorted(set(workers)):
        flat = {label: model.work(plan, tensors, p, codec, driver, local_size) for label, plan in plans.items()}
        if driver == "horovod":
            flat[DENSE] = model.stock(tensors, p, local_size)
        works += [{"levels": 1, "method": label, **work._asdict()} for label, work in flat.items()]
        for label, plan in plans.items() if local_size > 1 else ():
            work = model.two_levels(plan, tensors, Nodes(p // local_size, local_size), codec, driver)
            works.append({"levels": 2, "method": label, **work._asdict()})
    frames = []
    for rate in rates:
        points = pd.DataFrame(works).assign(rate=bits_of(rate), shared=1.0)
        parts = model.costs(fitted.constants, points)
        if local_size > 1:
            passed = 8 * points["inside"].where(points["levels"] == 2, points["line"]) / bits_of(inside)
            at_once = parts["link"].where(points["levels"] == 1, 0)  # a ring is as fast as its slowest link
            parts["local"] = (passed - at_once).clip(lower=0) + model.INSIDE_LATENCY * points["hops"]
            parts.loc[points["world_size"] == local_size, "byte"] = 0  # of one host: the rate inside includes it
        head = points[["levels", "method", "world_size", "on_wire", "on_host", "inside"]]
        head = head.rename(columns={"world_size": "workers"})
        frames.append(head.assign(rate=rate, seconds=parts.sum(axis=1)).join(parts))
    return pd.concat(frames, ignore_index=True)


def table(predicted: pd.DataFrame, rate: str, value: str = "seconds") -> str:
    """Return a Markdown table of one rate: methods by workers; ``*`` marks what is no faster than dense."""
    wide = predicted[predicted["rate"] == rate].pivot_table(value, "method", "workers", sort=False)
    cells = wide.map(numbers.seconds_of if value == "seconds" else numbers.num_bytes)
    if value == "seconds":
        slow = wide.ge(wide.loc[DENSE], axis=1) & (wide.index != DENSE)[:, None]
        cells = cells.where(~slow, cells + r"\*")
    return tables.markdown(cells.reset_index())


def draw(predicted: pd.DataFrame, x: str = "workers") -> Figure:
    """Draw seconds over a number of workers or hosts, one panel per rate; with two levels solid, with one dashed."""
    levels = predicted["levels"]
    solid, dashed = predicted[levels == levels.max()], predicted[levels < levels.max()]

    def logarithmic(ax: Axes, rows: pd.DataFrame) -> None:
        same_rate = dashed[dashed["rate"] == rows["rate"].iloc[0]].set_index("method")
        for line in ax.get_lines() if len(dashed) else ():
            flat = same_rate.loc[line.get_label()]
            ax.plot(flat[x], flat["seconds"], "--", color=line.get_color(), linewidth=1)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ticks = sorted(rows[x].unique())
        ax.set_xticks(ticks[:: max(1, len(ticks) // 5)])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.seconds_of(value).replace(".00", "")))
        ax.yaxis.set_minor_formatter(NullFormatter())

    return plots.lines(solid, x, "seconds", "method", "rate", decorate=logarithmic, height=3.2)


def errors(fits: Mapping[str, Fitted]) -> pd.DataFrame:
    """Return a table of the errors of predictions of held-out exchanges, one column per fit."""

    def text(found: Mapping[str, Any]) -> str:
        return f"{100 * found['median']:.0f} % (worst {100 * found['worst']:.0f} %)"

    columns = {name: {split: text(found) for split, found in fit.held_out.items()} for name, fit in fits.items()}
    return pd.DataFrame(columns).rename_axis("held out").reset_index()


DRAWN = ["dense", "fp16", "scalecom 100x", "topk 0.5 %", "gtopk 0.5 %", "oktopk 0.5 %", "arctopk 0.5 %"]
DRAWN += ["powersgd rank 1", "qsgd 4 bits", "signsgd"]
SHOWN = (4, 16, 64, 256, 1024)


def context(page: str) -> dict[str, Any]:
    """Return the numbers, tables and the picture of ``docs/templates/scale.md``."""
    resnet = results.load("scale-resnet50")
    fits = {"Horovod": Fitted.open("horovod"), "MPI driver": Fitted.open("mpi4py")}
    drawn = resnet[resnet["method"].isin(DRAWN)]
    return {
        "seconds": draw(drawn.assign(levels=1, rate=drawn["rate"].map(title))),
        "predicted": table(drawn[drawn["workers"].isin(SHOWN)], "1gbit"),
        "errors": errors(fits),
    }
