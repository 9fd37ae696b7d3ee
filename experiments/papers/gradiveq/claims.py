"""The claims of GradiVeQ's paper (Yu et al. 2018, arXiv 1811.03617): what is measured for each, and its verdict."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from experiments import nets
from experiments.cluster.hosts import problem
from experiments.papers import simulate
from experiments.papers.claims import Kind, Paper, Verdict, against_dense, groups, judge, per_seed, spread
from experiments.papers.gradiveq import measures, rings
from experiments.report import plots
from experiments.report.numbers import number, rate_of, seconds_of
from experiments.units import Unit

Settings = dict[str, Any]
RANKS = 2
LAYERS = {
    "lenet5": ("3.weight", "7.weight", "9.weight"),
    "resnet20": ("4.conv1.weight", "7.conv2.weight", "9.conv2.weight", "11.conv2.weight"),
    "digits_net": ("2.weight", "5.weight"),
}
CYCLE = (100, 400)  #: Lt and Lc of the paper
USUAL = {"dense_steps": CYCLE[0], "compressed_steps": CYCLE[1], "every": 8}
#: the steps of the trainings in which methods are watched, and the windows
WINDOWS: dict[str, tuple[int, Settings]] = {
    "lenet5": (900, {"starts": [0, 400], **USUAL}),
    "resnet20": (200, {"starts": [0, 100], "dense_steps": 40, "compressed_steps": 60, "every": 2}),
    "digits_net": (1000, {"starts": [200], **USUAL}),
}
STEPS = {"lenet5": 400, "digits_net": 600}  #: of trainings that are judged by their accuracy
SIZES = [0, 64, 192]  #: elements of a slice; 0: the method's own choice
#: layers whose rings are timed: the 3x3 convolutions of ResNet-32 but the first, the paper's net, and one of VGG's
RINGS = {
    "ResNet-32": [shape for shape in nets.get("resnet32").values() if shape[2:] == (3, 3)][1:],
    "VGG layer": [(512, 512, 3, 3)],
}
LINKS = {None: "shared memory, 2 ranks", "100mbit": "100 Mbit/s, 2 ranks", "1gbit": "1 Gbit/s, 2 ranks"}
#: GradiVeQ (elements per component; 0: without) and QSGD (format of the values), alone and together, by compression
#: ratio; QSGD has 2 bits at least
MIXES: dict[int, dict[str, tuple[int, str]]] = {
    8: {"gradiveq 8x": (8, "fp32"), "qsgd4": (0, "qsgd4"), "gradiveq 2x, qsgd8": (2, "qsgd8")},
    16: {
        "gradiveq 16x": (16, "fp32"),
        "qsgd2": (0, "qsgd2"),
        "gradiveq 2x, qsgd4": (2, "qsgd4"),
        "gradiveq 4x, qsgd8": (4, "qsgd8"),
    },
    32: {"gradiveq 32x": (32, "fp32"), "gradiveq 4x, qsgd4": (4, "qsgd4"), "gradiveq 8x, qsgd8": (8, "qsgd8")},
}
#: the rings of a cycle's dense and compressed steps
SCHEMES = {
    "8x": ("dense", "gradiveq 8x"),
    "8x, 4-bit dense steps (the paper's)": ("qsgd4", "gradiveq 8x"),
    "8x and 8-bit values, 4-bit dense steps": ("qsgd4", "gradiveq 8x, qsgd8"),
    "compressed steps alone": ("", "gradiveq 8x"),
}
CORRELATED = 0.3  #: the largest error of the best basis of rank n/8 for slices that count as correlated
LASTS = 1.2  #: times the oracle's error that a basis may have while it is used
POINTS = 1.0  #: of held-out accuracy, which count as no loss
FASTER = 5.0  #: times, for claims of speed and of the overall compression ratio

PAPER = Paper("gradiveq", ["fashion_mnist", "noisy_digits"])


def gradiveq(net: str, dense: int, compressed: int, **more: object) -> Settings:
    """Return the method's settings, for all tensors of the small nets, whose convolutions are a part of them."""
    found = {"method": "gradiveq", "dense_steps": dense, "compressed_steps": compressed, **more}
    return found if net == "resnet20" else {**found, "tensors": "all"}


def watched() -> list[Unit]:
    """List dense trainings during which GradiVeQ reduces the same gradients."""
    units = []
    for net, (steps, window) in WINDOWS.items():
        lengths = window["dense_steps"], window["compressed_steps"]
        entries = {"default": gradiveq(net, *lengths), "paper": gradiveq(net, *lengths, paper=True)}
        moved = {"starts": list(window["starts"])}
        task = simulate.training(net, steps)
        common = {"ranks": RANKS, "tensors": list(LAYERS[net]), "sizes": SIZES, "entries": entries}
        units.append(Unit(measures.watched, {"task": task, **window, **moved, **common}, {"net": net}))
    return units


def quantized() -> list[Unit]:
    """List the same of LeNet-5 with GradiVeQ, QSGD and both at equal ratios, in the 40 steps after 60 dense ones."""
    lenet5, net = watched()[0], "lenet5"
    entries = {
        entry: gradiveq(net, 60, 40, min_rate=elements, lam=0.0, max_samples=512, values=values)
        if elements
        else {"method": "qsgd", "bits": int(values.removeprefix("qsgd"))}
        for mixes in MIXES.values()
        for entry, (elements, values) in mixes.items()
    }
    window = {"starts": [200], "dense_steps": 60, "compressed_steps": 40, "every": 2, "sizes": [], "entries": entries}
    return [replace(lenet5, settings=lenet5.settings | window)]


def trainings(net: str, steps: int) -> dict[str, Settings]:
    """Return the methods that are trained with, by name; those with a ratio in their name might reach 5x overall."""
    tenth, twentieth = steps // 10, steps // 20

    def plan(warm: int, compressed: int, **more: object) -> Settings:
        # a basis is not fitted again when the learning rate has halved: in a cosine, most late steps would be dense
        return {**gradiveq(net, warm, compressed, **{"retrain_drop": 0.0, **more}), "warmup": {"steps": warm}}

    both: Settings = {"min_rate": 4.0, "values": "qsgd8"}
    mild: Settings = {"min_rate": 2.0, "lam": 0.0, "values": "qsgd8"}
    bits: Settings = {"dense_values": "qsgd4"}
    return {
        "none": {"method": "none"},
        "default": plan(tenth, 4 * tenth),
        "paper": plan(tenth, 4 * tenth, paper=True),
        "default, trained again as the rate falls": plan(tenth, 4 * tenth, retrain_drop=0.5),
        "paper, 4-bit dense steps": plan(tenth, 4 * tenth, paper=True, **bits),
        "4x, 8-bit values, 4-bit dense steps, refreshed": plan(twentieth, 4 * twentieth, **bits, **both),
        "2x, 8-bit values, 4-bit dense steps, refreshed": plan(twentieth, 4 * twentieth, **bits, **mild),
        "4x, 8-bit values": plan(twentieth, 20 * twentieth, **both),
        "8x, 4-bit dense steps": plan(twentieth, 20 * twentieth, **bits),
        "8x, 4-bit dense steps, feedback": plan(twentieth, 20 * twentieth, **bits, feedback="plain"),
        "16x": plan(twentieth, 20 * twentieth, min_rate=16.0),
    }


def trained() -> list[Unit]:
    """List dense trainings and those with GradiVeQ; ResNet-20 takes too long."""
    tasks = {net: simulate.training(net, steps) for net, steps in STEPS.items()}
    return [
        Unit(simulate.accuracy, {"task": task, "method": method, "ranks": RANKS}, {"net": net, "method": name})
        for net, task in tasks.items()
        for name, method in trainings(net, task["steps"]).items()
    ]


def timed() -> list[Unit]:
    """List rings over every link; over those of emulated hosts if hosts can be emulated."""
    mixes = {name: mix for mixes in MIXES.values() for name, mix in mixes.items()}
    common = {"ranks": RANKS, "rings": {"dense": (0, "fp32"), **mixes}}
    links = LINKS if problem() is None else (None,)
    return [
        Unit(rings.timed, {"layers": RINGS[net], "rate": rate, **common}, {"net": net, "link": LINKS[rate]}, alone=True)
        for net, rate in product(RINGS, links)
    ]


@PAPER.claim("V1", "Slices of a convolution's gradient are strongly linearly correlated.", watched)
def correlated(rows: pd.DataFrame) -> Verdict:
    """Do slices fit into an eighth of their dimensions?"""
    rows = rows[rows["kind"] == "spectrum"]
    judged = rows[rows["convolution"].astype(bool)]
    cells, told = {}, []
    for (net, tensor, order, size), some in groups(judged, "net", "tensor", "order", "size"):
        met = some.groupby("seed")["error"].max() < CORRELATED
        cells[f"in order {order}, slices of {size:g}:", f"{net} {tensor}"] = list(met)
    for (net,), some in groups(judged, "net"):
        own = some[some["default"].astype(bool)]
        small = some[some["size"] <= max(SIZES)]
        filters = own[own["order"] == "oihw"]
        kinds = [(filters, "error"), (own[own["order"] == "hwio"], "error"), (small, "error"), (filters, "control")]
        told.append(f"{net} {', '.join(spread(per_seed(part, column)) for part, column in kinds)}")
    long = rows.melt(["net", "size", "order"], ["error", "control"], "what", "left")
    long["what"] = long["order"].where(long["what"] == "error", "elements shuffled")
    drawn = plots.lines(
        long,
        "size",
        "left",
        "what",
        "net",
        {"size": "elements of a slice, n", "left": "error at rank n/8"},
        lambda ax, _: ax.set_xscale("log"),
        columns=3,
    )
    return Verdict(
        judge(cells, f"the best basis of rank n/8 leaves {CORRELATED:g} or more of every layer in some seed"),
        "Error of the best basis of rank n/8 for convolutions, slices of the default size with whole filters (oihw) "
        f"and in the paper's order (hwio), slices of {max(SIZES)} and less, and the first with each slice's elements "
        f"shuffled: {'; '.join(told)}.",
        drawn,
        "The error of the best basis of rank n/8, by slice size: mean and range of layers, windows and seeds.",
    )


@PAPER.claim("V2", "A basis from Lt dense steps serves the Lc steps that follow.", watched)
def carries(rows: pd.DataFrame) -> Verdict:
    """Is a basis of the dense steps as good as the oracle's in the steps that follow?"""
    # where a layer has too few slices for a spectrum, the oracle's basis would fit each of them
    spectra = rows[(rows["kind"] == "spectrum") & (rows["default"] == True)]  # noqa: E712 (NaN in rows of errors)
    enough = set(spectra[["net", "tensor", "order"]].itertuples(index=False, name=None))
    found = with_medians(rows[rows["kind"] == "errors"])
    wide = found.pivot(index=["net", "start", "seed", "tensor"], columns="entry", values="error").reset_index()
    parts = []
    for entry, order in (("default", "oihw"), ("paper", "hwio")):
        layers = [(net, tensor, order) in enough for net, tensor in zip(wide["net"], wide["tensor"], strict=True)]
        part = wide[layers].assign(entry=entry, error=wide[entry], oracle=wide[f"oracle {order}"])
        parts.append(part.assign(ratio=part["error"] / part["oracle"]))
    by = ["net", "start", "entry"]
    # the median of the layers
    medians = pd.concat(parts).groupby([*by, "seed"], sort=False)[["error", "oracle", "ratio"]].median().reset_index()
    ratios = {place: list(some["ratio"]) for place, some in groups(medians, *by)}
    cells = {
        f"{net}, dense from step {start:g} on, {entry}": [ratio <= LASTS for ratio in each]
        for (net, start, entry), each in ratios.items()
    }
    steps = found.explode(["ages", "errors"]).astype({"ages": int, "errors": float})
    steps["window"] = steps["net"] + ", dense from step " + steps["start"].astype(str)
    steps = steps.groupby(["window", "seed", "entry", "ages"], as_index=False, sort=False)["errors"].median()
    best = min(pd.Series(each).median() for each in ratios.values())
    late = [f"{spread(each)} for {net} with {entry} settings" for (net, start, entry), each in ratios.items() if start]
    return Verdict(
        judge(cells, f"the error is at best {number(best)} times the oracle's"),
        f"Error over the oracle's, windows in the middle of training: {', '.join(late)}.",
        plots.lines(
            steps,
            "ages",
            "errors",
            "entry",
            "window",
            {"ages": "steps after the fit", "errors": "‖ĝ − ḡ‖/‖ḡ‖"},
            lambda ax, _: ax.set_ylim(0, 1.5),
        ),
        "Errors of steps after the dense ones, median of the layers, compared with the oracle's.",
    )


def with_medians(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with the median ``error`` over steps."""
    return rows.assign(error=[pd.Series(each).median() for each in rows["errors"]])


@PAPER.claim("V3", "Training loses no accuracy at 8x.", trained)
def training(rows: pd.DataFrame) -> Verdict:
    """Does compressing from a fifth of the training on cost accuracy?"""
    rows = against_dense(rows, "net")
    gaps = {place: list(some["gap"]) for place, some in groups(rows, "net", "method")}
    names = list(dict.fromkeys(rows["net"]))
    both = [(net, method) for net in names for method in ("default", "paper")]
    cells = {", ".join(place): [gap >= -POINTS for gap in gaps[place]] for place in both}
    told = {method: "; ".join(f"{spread(gaps[net, method])} for {net}" for net in names) for _, method in both[:2]}
    return Verdict(
        judge(cells, f"with both settings at least one seed loses more than {POINTS:g} point"),
        f"Against dense, in points: default settings {told['default']}; the paper's {told['paper']}. The highest "
        f"ratio of {FASTER:g}x at least overall, dense steps counted, within {POINTS:g} point in every seed: "
        f"{'; '.join(fastest(rows[rows['net'] == net], net) for net in names)}.",
        plots.lines(
            rows[rows["method"] != "none"],
            "wire",
            "gap",
            "method",
            "net",
            {"wire": "overall compression ratio", "gap": "points against dense"},
            _limits,
            "o",
            height=3.6,
            share_y=True,
        ),
        "Points against the same seed's dense training by the overall compression ratio, one per training.",
    )


def fastest(rows: pd.DataFrame, net: str) -> str:
    """Name the highest overall ratio that is large enough and loses too little in every seed."""
    found = rows.groupby("method", sort=False).agg(
        least=("wire", "min"), wire=("wire", "median"), worst=("gap", lambda gaps: gaps.min(skipna=False))
    )
    within = found[(found["least"] >= FASTER) & (found["worst"] >= -POINTS)]
    if within.empty:
        return f"none for {net}"
    name = within["wire"].idxmax()
    gaps = spread(rows[rows["method"] == name]["gap"])
    return f"{net} with “{name}”, {rate_of(float(within['wire'][name]))} at {gaps} points"


def _limits(ax: Axes, _: pd.DataFrame) -> None:
    ax.axhline(-POINTS, color="0.6", lw=1)
    ax.axvline(FASTER, color="0.6", lw=1)


def cycles(rows: pd.DataFrame) -> pd.DataFrame:
    """Return how many times as fast as the dense ring a mean step of a cycle is: by net, link and seed, per scheme."""
    wide = rows.pivot(index=["net", "link", "seed"], columns="ring", values="seconds")
    fit = rows.groupby(["net", "link", "seed"])["fit"].first()
    found = {}
    for scheme, (dense, compressed) in SCHEMES.items():
        whole = CYCLE[0] * wide[dense] + fit + CYCLE[1] * wide[compressed] if dense else sum(CYCLE) * wide[compressed]
        found[scheme] = wide["dense"] / (whole / sum(CYCLE))
    return pd.DataFrame(found).melt(var_name="scheme", value_name="speed-up", ignore_index=False).reset_index()


@PAPER.claim("V4", "Around the ring, aggregation is more than 5 times as fast, dense steps counted.", timed)
def aggregation(rows: pd.DataFrame) -> Verdict:
    """Is a whole cycle around the ring more than five times as fast as dense steps?"""
    found = cycles(rows)
    speed = {place: list(some["speed-up"]) for place, some in groups(found, "net", "link", "scheme")}
    judged = {place: each for place, each in speed.items() if SCHEMES[place[2]][0]}
    cells = {", ".join(place): [value >= FASTER for value in each] for place, each in judged.items()}
    net, link, scheme = max(judged, key=lambda place: pd.Series(judged[place]).median())
    best = spread(judged[net, link, scheme], rate_of)
    plain = max(pd.Series(each).median() for place, each in judged.items() if place[2] == "8x")
    fits = ", ".join(f"{spread(some['fit'], seconds_of)} ({each})" for (each,), some in groups(rows, "net"))
    return Verdict(
        judge(cells, f"the fastest cycle is {best} as fast as dense"),
        f"The fastest cycle, {net} at {link} with {scheme}: {best} as fast as the dense ring; with dense steps as "
        f"they are {rate_of(plain)} at most.",
        plots.lines(found, "link", "speed-up", "scheme", "net", {"link": ""}, columns=1),
        "Speed-up of a cycle over the dense ring, by link: mean and range of seeds.",
        f"The fit of all bases, once a cycle, takes the busiest rank {fits}.",
    )


@PAPER.claim("V5", "With QSGD it is better than either alone at an equal compression ratio.", quantized, timed)
def together(rows: pd.DataFrame, ring: pd.DataFrame) -> Verdict:
    """At an equal compression ratio, are both together better than either alone, in error and in time?"""
    found = with_medians(rows[~rows["entry"].str.startswith("oracle")])
    errors = found.groupby(["entry", "seed"])["error"].median().unstack("entry")  # the median of the layers
    cells, lower, kinds = {}, [], []
    for ratio, mixes in MIXES.items():
        both = [entry for entry, (elements, values) in mixes.items() if elements and values != "fp32"]
        alone = [entry for entry in mixes if entry not in both]
        for entry, (elements, _) in mixes.items():
            what = "both" if entry in both else "GradiVeQ" if elements else "QSGD"
            kinds.append({"entry": entry, "ratio": ratio, "what": what})
        for (net, link), some in groups(ring, "net", "link"):
            seconds = some.pivot(index="seed", columns="ring", values="seconds")
            lower_error = errors[both].lt(errors[alone].min(axis=1), axis=0)
            shorter_step = seconds[both].lt(seconds[alone].min(axis=1), axis=0)
            cells[f"{ratio}x, {net}, {link}"] = list((lower_error & shorter_step).any(axis=1))
        wins = errors[both].min(axis=1) < errors[alone].min(axis=1)
        lower.append(f"at {ratio}x in {wins.sum()} of {len(wins)} seeds")
    outcome = judge(cells, "no combination has both a lower error and a shorter step than each alone")
    if outcome.kind is Kind.FAILS:
        told = f"its error alone is the lower {', '.join(lower)}, but quantizing takes time"
        outcome = replace(outcome, because=f"{outcome.because}; {told}")
    at8 = [spread(errors[name]) for name in ("gradiveq 8x", "qsgd4", "gradiveq 2x, qsgd8")]
    drawn = errors.melt(ignore_index=False, value_name="error").reset_index().merge(pd.DataFrame(kinds))
    drawn = drawn.merge(found.groupby("entry", as_index=False)["wire"].median())
    return Verdict(
        outcome,
        f"Errors at 8x: GradiVeQ {at8[0]}, QSGD {at8[1]}, both {at8[2]}. The best of both has the lower error "
        f"{', '.join(lower)}.",
        plots.lines(drawn, "ratio", "error", "what", None, {"ratio": "compression ratio of compressed steps"}),
        "Errors of GradiVeQ, of QSGD and of both together, at equal ratios: mean and range of seeds and combinations.",
    )
