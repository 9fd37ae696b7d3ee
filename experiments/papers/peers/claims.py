"""Claims of the papers behind the methods that other libraries offer, too: what is measured, and the verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from experiments.papers import simulate
from experiments.papers.claims import Paper, Units, Verdict, against_dense, groups, judge, spread
from experiments.papers.peers import measures
from experiments.report import plots
from experiments.report.numbers import number, percent
from experiments.units import Unit

NETS = ("fnn3", "lenet5")
RANKS = 4
WORLDS = (2, 4, 8, 16, 64)  #: numbers of ranks among which sparse methods are counted
DENSITY = 0.01
POINTS = 1.0  #: of held-out accuracy, which count as no loss
EIGHTH = 1 / 8  #: natural compression's bound, Theorem 1
SAME = 0.1  #: relative change that counts as none
METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "int4": {"method": "blockwise", "values": "int4"},
    "natural": {"method": "natural"},
    "onebit": {"method": "onebit"},
    **{id: {"method": id, "density": DENSITY} for id in ("topk", "oktopk", "arctopk", "gtopk", "scalecom", "randomk")},
}
COUNTED = ("oktopk", "arctopk", "gtopk", "scalecom", "topk")
PAPER = Paper("peers", ["fashion_mnist"])


def task(net: str) -> dict[str, Any]:
    """Return the training of all claims, which is that of Gaussian-k's."""
    return simulate.training(net, 400)


def encoded() -> list[Unit]:
    """List dense trainings whose gradients are encoded."""
    return [Unit(measures.encoded, {"task": task(net), "ranks": RANKS}, {"net": net}) for net in NETS]


def counted() -> list[Unit]:
    """List exchanges of sparse methods among several numbers of ranks."""
    common = {"task": simulate.training("fnn3", 400)}
    return [
        Unit(measures.sent, {**common, "method": METHODS[id], "ranks": ranks}, {"method": id, "ranks": ranks})
        for id in COUNTED
        for ranks in WORLDS
    ]


def trained(*ids: str, densities: Sequence[float] = ()) -> Units:
    """Return the function that lists dense trainings and those of some methods, sparse ones at several densities."""
    every = [(id, METHODS[id]) for id in ("none", *ids)]
    every += [(id, {**given, "density": more}) for id, given in every if "density" in given for more in densities]

    def units() -> list[Unit]:
        return [
            Unit(
                simulate.accuracy,
                {"task": task(net), "method": given, "ranks": RANKS},
                {"net": net, "method": id, "density": given.get("density", 1.0)},
            )
            for net in NETS
            for id, given in every
        ]

    return units


@PAPER.claim("P1", "Rounding at random to powers of two leaves an eighth of the energy at most, on average.", encoded)
def eighth(rows: pd.DataFrame) -> Verdict:
    """Judge natural compression's squared error against its bound."""
    most = rows.groupby(["net", "seed"])["natural"].max()
    return Verdict(
        judge({net: list(most[net] <= EIGHTH) for net in NETS}, "the bound is broken for every net"),
        f"It leaves {spread(rows['natural'])} of the energy; the bound is {EIGHTH}.",
    )


@PAPER.claim("P2", "A Hadamard transform before rounding to 4 bits makes the error of a gradient smaller.", encoded)
def rotated(rows: pd.DataFrame) -> Verdict:
    """Judge the squared errors of four bits with and without the transform."""
    rows = rows.assign(less=rows["rotated"] / rows["int4"])
    medians = rows.groupby(["net", "tensor", "seed"], sort=False)["less"].median()
    places = dict.fromkeys((net, tensor) for net, tensor, _ in medians.index)
    cells = {f"{net}, {tensor}": list(medians[net][tensor] < 1) for net, tensor in places}
    phases = ", ".join(f"{phase} {number(some['less'].median())}" for (phase,), some in groups(rows, "phase"))
    return Verdict(
        judge(cells, "it is smaller for no tensor"),
        f"Of the squared error without it, with it there is {spread(list(rows['less']))}; medians by phase: {phases}.",
        plots.lines(
            rows, "int4", "rotated", "net", None, {"int4": "without transform", "rotated": "with it"}, _equal, "."
        ),
        "Squared errors of 4 bits in blocks of 256 over the gradient's energy; each tensor and step is a point.",
    )


def _equal(ax: Any, _: pd.DataFrame) -> None:
    ax.set(xscale="log", yscale="log")
    ax.axline((0.01, 0.01), (0.1, 0.1), color="k", lw=1)


def as_dense(id: str, named: str) -> Callable[[pd.DataFrame], Verdict]:
    """Return the function that judges whether a method trains as dense training does."""

    def judged(rows: pd.DataFrame) -> Verdict:
        rows = against_dense(rows, "net")
        some = rows[rows["method"] == id]
        cells = {net: list(some[some["net"] == net]["gap"] >= -POINTS) for net in NETS}  # NaN, diverged, is worse
        return Verdict(
            judge(cells, f"it ends more than {number(POINTS)} point below dense"),
            f"{named}, points from dense: {spread(list(some['gap']))}, at a compression ratio of "
            f"{spread(list(some['ratio']))}.",
        )

    return judged


for method, claim, text, named in (
    ("int4", "P3", "4 bits per value in blocks, summed in two shots, train as well as float32.", "int4 with residual"),
    ("natural", "P4", "9 bits per value, rounded without bias, train as well as float32.", "Natural compression"),
    ("onebit", "P5", "1 bit per value with a residual trains with almost no loss of accuracy.", "1-bit SGD"),
):
    PAPER.claim(claim, text, trained(method), trains=True)(as_dense(method, named))


@PAPER.claim("P6", "Ok-Topk transmits less than 6k words per rank, for any number of ranks.", counted)
def six_k(rows: pd.DataFrame) -> Verdict:
    """Judge the words that Ok-Topk's busiest rank transmits."""
    some = rows[rows["method"] == "oktopk"]
    cells = {f"{ranks} ranks": list(each["transmitted"] < 6) for (ranks,), each in groups(some, "ranks")}
    told = ", ".join(f"{number(each['transmitted'].median())} at {r}" for (r,), each in groups(some, "ranks"))
    return Verdict(
        judge(cells, "it transmits 6k words or more among any number of ranks"),
        f"Words that the busiest rank transmits per step, in units of k: {told}.",
        plots.lines(
            rows,
            "ranks",
            "transmitted",
            "method",
            None,
            {"ranks": "ranks", "transmitted": "words transmitted, in units of k"},
            lambda ax, _: ax.loglog(),
        ),
        "Words that the busiest rank transmits in a step, in units of k, by the number of ranks.",
    )


@PAPER.claim("P7", "A rank's bytes in ARC-Top-K's collectives do not depend on the number of ranks.", counted)
def constant(rows: pd.DataFrame) -> Verdict:
    """Judge how the words that a rank gives to collectives grow with the ranks, for each method."""
    first = rows[rows["ranks"] == min(WORLDS)].set_index(["method", "seed"])["given"]
    rows = rows.join(first.rename("first"), on=["method", "seed"])
    rows["grown"] = rows["given"] / rows["first"]
    some = rows[rows["method"] == "arctopk"]
    others = some[some["ranks"] > min(WORLDS)]
    cells = {f"{r} ranks": list((each["grown"] - 1).abs() <= SAME) for (r,), each in groups(others, "ranks")}
    most = rows[rows["ranks"] == max(WORLDS)]
    told = ", ".join(f"{id} {number(each['grown'].median())}" for (id,), each in groups(most, "method"))
    lost = ", ".join(f"{id} {percent(each['error'].median())}" for (id,), each in groups(most, "method"))
    return Verdict(
        judge(cells, "they grow at once"),
        f"Words of {max(WORLDS)} ranks over those of {min(WORLDS)}: {told}.",
        notes=f"Errors of the summed results among {max(WORLDS)} ranks, at equal density: {lost}.",
    )


def as_topk(id: str, named: str) -> Callable[[pd.DataFrame], Verdict]:
    """Return the function that judges whether a sparse method trains as top-k does; random-k is shown beside it."""

    def judged(rows: pd.DataFrame) -> Verdict:
        wide = rows[rows["method"] != "none"].pivot(index=["density", "net", "seed"], columns="method", values="value")
        gaps = wide.sub(wide["topk"], axis=0)  # NaN where a training diverged
        cells = {
            f"{net} at {percent(density)}": list(some >= -POINTS)
            for (density, net), some in gaps[id].groupby(["density", "net"])
        }
        told = [
            f"at {percent(density)} {named} {spread(list(some[id]))}, random-k {spread(list(some['randomk']))}"
            for density, some in gaps.groupby("density")
        ]
        return Verdict(
            judge(cells, f"it ends more than {number(POINTS)} point below top-k"),
            f"Points from top-k: {'; '.join(told)}.",
        )

    return judged


for method, claim, text, named, more in (
    ("oktopk", "P8", "Ok-Topk trains as well as top-k.", "Ok-Topk", ()),
    ("arctopk", "P9", "ARC-Top-K trains as well as top-k, without sending indices.", "ARC-Top-K", (0.2,)),
):
    PAPER.claim(claim, text, trained("topk", "randomk", method, densities=more), trains=True)(as_topk(method, named))
