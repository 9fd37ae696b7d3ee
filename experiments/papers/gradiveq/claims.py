"""The claims of GradiVeQ's paper (Yu et al. 2018, arXiv 1811.03617): what is measured for each, and its verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.cluster.hosts import problem
from experiments.papers import simulate
from experiments.papers.claims import Kind, Paper, Scale, Verdict, groups, judge, over_seeds, per_seed, spread
from experiments.papers.gradiveq import measures, rings
from experiments.papers.units import Unit
from experiments.report import plots
from experiments.report.numbers import number, rate_of, seconds_of

Settings = dict[str, Any]
RANKS = 2
LAYERS = {
    "lenet5": ("3.weight", "7.weight", "9.weight"),
    "resnet20": ("4.conv1.weight", "7.conv2.weight", "9.conv2.weight", "11.conv2.weight"),
    "digits_net": ("2.weight", "5.weight"),
}
FEW = ("dense", "default", "paper")  #: trainings of the small net with --quick
SIZES = [0, 64, 192]  #: elements of a slice; 0: the method's own choice
STAGES = ((16, 16, 10), (32, 16, 1), (32, 32, 9), (64, 32, 1), (64, 64, 9))  #: filters, depth and number of layers
#: layers whose rings are timed: the 3x3 convolutions of ResNet-32 but the first, the paper's net, and one of VGG's
RINGS = {
    "ResNet-32": [[f, d, 3, 3] for f, d, n in STAGES for _ in range(n)],
    "VGG layer": [[512, 512, 3, 3]],
}
LINKS = {None: "shared memory", "100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
#: GradiVeQ (elements per component, or 0) and QSGD (bits, or 0) alone and together: all that have a compression ratio
MIXES = pd.DataFrame(
    {"ratio": ratio, "elements": elements, "bits": bits}
    for ratio in (8, 16, 32)
    for elements in (0, 2, 4, 8, 16, 32)
    for bits in (0, 2, 4, 8)  # QSGD has no single bit, and with two it is not combined
    if ratio == (elements or 1) * (32 / bits if bits else 1) and not (elements and bits == 2)
)
MIXES["what"] = ["QSGD" if not e else "both" if bits else "GradiVeQ" for _, e, bits in MIXES.itertuples(index=False)]
MIXES["entry"] = [
    f"gradiveq {mix.elements}x{f', qsgd{mix.bits}' if mix.bits else ''}" if mix.elements else f"qsgd{mix.bits}"
    for mix in MIXES.itertuples()
]
#: the rings of a cycle's dense and compressed steps
SCHEMES = {
    "8x": ("dense", "gradiveq 8x"),
    "8x, 4-bit dense steps (the paper's)": ("qsgd4", "gradiveq 8x"),
    "8x and 8-bit values, 4-bit dense steps": ("qsgd4", "gradiveq 8x, qsgd8"),
    "compressed steps alone": ("", "gradiveq 8x"),
}
CYCLE = (100, 400)  #: Lt and Lc of the paper
CORRELATED = 0.3  #: the largest error of the best basis of rank n/8 for slices that count as correlated
LASTS = 1.2  #: times the oracle's error that a basis may have while it is used
POINTS = 1.0  #: of held-out accuracy, which count as no loss
FASTER = 5.0  #: times, for claims of speed and of the overall compression ratio

PAPER = Paper(
    "gradiveq",
    "GradiVeQ",
    'Yu et al., "GradiVeQ: Vector Quantization for Bandwidth-Efficient Gradient Aggregation in Distributed CNN '
    'Training", NeurIPS 2018 (arXiv 1811.03617).',
    "Filters of deep nets are correlated. Around a ring at 100 Mbit/s it is 5 to 15 times as fast, dense steps "
    "counted. If gradients do not vanish, a basis lasts, and 6.7x overall loses less than a point.",
    "LeNet-5 loses 2 points. At 1 Gbit/s the ring is 0.8 to 5 times as fast, over shared memory slower than dense. "
    "With QSGD it errs less, and takes longer.",
    ["fashion_mnist", "noisy_digits"],
)


# -- units ---------------------------------------------------------------------------------------


def task(net: str, scale: Scale) -> Settings:
    """Return the training of a net."""
    if net == "digits_net":
        steps = 3000 if scale.full else 600
        found = {"task": "noisy_digits", "net": net, "steps": steps, "batch_size": 32, "learning_rate": 0.02}
    else:
        steps = {"lenet5": (400, 4000), "resnet20": (200, 900)}[net][scale.full]
        batch = {"lenet5": (32, 32), "resnet20": (8, 16)}[net][scale.full]
        found = {"task": "fashion_mnist", "net": net, "steps": steps, "batch_size": batch, "learning_rate": 0.05}
    return {**found, "warmup_steps": steps // 10}


def gradiveq(net: str, dense: int, compressed: int, **more: object) -> Settings:
    """Return the method's settings, for all tensors of the small nets, whose convolutions are a part of them."""
    found = {"method": "gradiveq", "dense_steps": dense, "compressed_steps": compressed, **more}
    return found if net == "resnet20" else {**found, "tensors": "all"}


def windows(net: str, scale: Scale) -> Settings:
    """Return a training and the windows in which methods are watched: with the paper's Lt and Lc if time permits."""
    training = task(net, scale)
    paper = {"dense_steps": CYCLE[0], "compressed_steps": CYCLE[1], "every": 8}
    if net == "digits_net":
        return {"task": {**training, "steps": 1000, "warmup_steps": 100}, "starts": [200], **paper}
    if scale.full:
        return {"task": training, "starts": [0, 1200, 2400] if net == "lenet5" else [0, 400], **paper}
    if net == "lenet5":
        return {"task": {**training, "steps": 900, "warmup_steps": 90}, "starts": [0, 400], **paper}
    return {"task": training, "starts": [0, 100], "dense_steps": 40, "compressed_steps": 60, "every": 2}


def watched_in(net: str, scale: Scale, **settings: Any) -> list[Unit]:
    """List a dense training per seed, watched."""
    common = {**settings, "tensors": list(LAYERS[net]), "ranks": RANKS}
    labels = [{"net": net, "seed": seed} for seed in scale.seeds]
    return [Unit(measures.watched, {**common, "seed": each["seed"]}, each, 40) for each in labels]


def watched(scale: Scale) -> list[Unit]:
    """List dense trainings during which GradiVeQ reduces the same gradients."""
    units = []
    for net in LAYERS:
        found = windows(net, scale)
        lengths = found["dense_steps"], found["compressed_steps"]
        entries = {"default": gradiveq(net, *lengths), "paper": gradiveq(net, *lengths, paper=True)}
        units += watched_in(net, scale, **found, sizes=SIZES, entries=entries)
    return units


def quantized(scale: Scale) -> list[Unit]:
    """List the same with GradiVeQ, QSGD and both at equal ratios, in the 40 steps after 60 dense ones."""
    units = []
    for net in ("lenet5", "resnet20") if scale.full else ("lenet5",):
        entries: dict[str, Settings] = {}
        for mix in MIXES.itertuples():
            more = {"values": f"qsgd{mix.bits}"} if mix.bits else {}
            own = gradiveq(net, 60, 40, min_rate=mix.elements, lam=0.0, max_samples=512, **more)
            entries[str(mix.entry)] = own if mix.elements else {"method": "qsgd", "bits": mix.bits}
        window = {"starts": [200], "dense_steps": 60, "compressed_steps": 40, "every": 2, "sizes": []}
        units += watched_in(net, scale, **{**windows(net, scale), **window}, entries=entries)
    return units


def trainings(net: str, scale: Scale) -> dict[str, Settings]:
    """Return the methods that are trained with, by name; those with a ratio in their name might reach 5x overall."""
    tenth, twentieth = task(net, scale)["steps"] // 10, task(net, scale)["steps"] // 20

    def plan(warm: int, compressed: int, **more: object) -> Settings:
        # a basis is not fitted again when the learning rate has halved: in a cosine, most late steps would be dense
        return {**gradiveq(net, warm, compressed, **{"retrain_drop": 0.0, **more}), "warmup": {"steps": warm}}

    both: Settings = {"min_rate": 4.0, "values": "qsgd8"}
    mild: Settings = {"min_rate": 2.0, "lam": 0.0, "values": "qsgd8"}
    bits: Settings = {"dense_values": "qsgd4"}
    return {
        "dense": {"method": "none"},
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


def trained(scale: Scale) -> list[Unit]:
    """List dense trainings and those with GradiVeQ; ResNet-20 takes too long for short ones."""
    return [
        Unit(
            simulate.accuracy,
            {"task": task(net, scale), "method": method, "ranks": RANKS, "seed": seed},
            {"net": net, "method": name, "seed": seed},
            seconds=100 if scale.full else 10,
        )
        for net in (LAYERS if scale.full else ("lenet5", "digits_net"))
        for name, method in trainings(net, scale).items()
        if not (scale.few and net == "digits_net") or name in FEW
        for seed in scale.seeds
    ]


def timed(scale: Scale) -> list[Unit]:
    """List rings over every link; over those of emulated hosts if hosts can be emulated."""
    every = {mix.entry: [mix.elements, f"qsgd{mix.bits}" if mix.bits else "fp32"] for mix in MIXES.itertuples()}
    common = {"rounds": 2 if scale.few else 15 if scale.full else 3, "rings": {"dense": [0, "fp32"], **every}}
    return [
        Unit(
            rings.timed,
            {"layers": layers, "ranks": ranks, "rate": rate, "seed": seed, **common},
            {"net": net, "link": f"{LINKS[rate]}, {ranks} ranks", "seed": seed},
            seconds=12,
            alone=True,
        )
        for net, layers in RINGS.items()
        for ranks in ((2, 4) if scale.full else (2,))
        for rate in (LINKS if problem() is None else (None,))
        for seed in scale.seeds
    ]


# -- claims --------------------------------------------------------------------------------------


@PAPER.claim(
    "V1",
    "Slices of a convolution's gradient are strongly linearly correlated.",
    units=watched,
    where="the PCA spectrum of gradient slices",
    tested=f"{RANKS} simulated ranks, SGD with momentum 0.9. LeNet-5 (32 examples per rank) and ResNet-20 (8) on "
    "Fashion-MNIST at a learning rate of 0.05; `digits_net` (32) at 0.02 on digits, a fifth of whose labels are "
    "random, so that gradients do not vanish. All matrices are compressed, of ResNet-20 the convolutions. Trained "
    "dense; meanwhile methods see the same gradients in windows of Lt = 100 dense and Lc = 400 compressed steps: of "
    "LeNet-5 from steps 0 and 400 of 900, of `digits_net` from step 200 of 1000; of ResNet-20 with Lt = 40 and Lc = "
    "60 from steps 0 and 100 of 200. The best basis of rank n/8 for all slices of size n in a window (an oracle: "
    "without a mean, of the very slices that it is judged by). LeNet-5's two matrices are not judged.",
    rule=f"what the basis leaves, ‖g − UUᵀg‖/‖g‖, is below {CORRELATED:g} in every window.",
)
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
    table = over_seeds(rows, ["net", "tensor", "order", "size", "start"], ["error", "control"])
    long = rows.melt(["net", "size", "order"], ["error", "control"], "what", "left")
    long["what"] = long["order"].where(long["what"] == "error", "elements shuffled")
    labels = {"size": "elements of a slice, n", "left": "error at rank n/8"}
    drawn = plots.lines(long, "size", "left", "what", "net", labels, lambda ax, _: ax.set_xscale("log"), columns=3)
    return Verdict(
        judge(cells, f"the best basis of rank n/8 leaves {CORRELATED:g} or more of every layer in some seed"),
        "Error of the best basis of rank n/8 for convolutions, slices of the default size with whole filters (oihw) "
        f"and in the paper's order (hwio), slices of {max(SIZES)} and less, and the first with each slice's elements "
        f"shuffled: {'; '.join(told)}.",
        {"Error of the best basis": table},
        drawn,
        "The error of the best basis of rank n/8, by slice size: mean and range of layers, windows and seeds.",
        "A basis fits few slices well whatever they are; shuffled elements show how much of the fit that explains. "
        f"Sizes are left out if a layer has not {measures.ENOUGH} times as many slices as the basis has vectors.",
    )


@PAPER.claim(
    "V2",
    "A basis from Lt dense steps serves the Lc steps that follow.",
    units=watched,
    where="the training of the compressor, with Lt = 100 and Lc = 400",
    tested="Nets and windows of V1. Errors of GradiVeQ with the default and with the paper's settings, without "
    "feedback.",
    rule=f"the median error over steps is at most {LASTS:g} times the oracle's (median of the layers).",
)
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
    best = min(pd.Series(each).median() for each in ratios.values())
    late = [f"{spread(each)} for {net} with {entry} settings" for (net, start, entry), each in ratios.items() if start]
    return Verdict(
        judge(cells, f"the error is at best {number(best)} times the oracle's"),
        f"Error over the oracle's, windows in the middle of training: {', '.join(late)}.",
        {"Medians over steps and layers": over_seeds(medians, by, ["error", "oracle", "ratio"])},
        over_time(found),
        "Errors of steps after the dense ones, median of the layers, compared with the oracle's.",
        "The oracle is the best basis of rank n/8 for the very steps that are looked at. One slice per dense step, as "
        "in the paper, gives at most Lt − 1 components, which may be fewer. Dense from step 0 on, gradients shrink "
        "with every step, and the basis fits the first few.",
    )


def with_medians(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with the median ``error`` over steps."""
    return rows.assign(error=[pd.Series(each).median() for each in rows["errors"]])


def over_time(found: pd.DataFrame) -> Figure:
    """Draw the errors of each step after the dense ones, a panel per window."""
    steps = found.explode(["ages", "errors"]).astype({"ages": int, "errors": float})
    steps["window"] = steps["net"] + ", dense from step " + steps["start"].astype(str)
    medians = steps.groupby(["window", "seed", "entry", "ages"], as_index=False, sort=False)["errors"].median()
    labels = {"ages": "steps after the fit", "errors": "‖ĝ − ḡ‖/‖ḡ‖"}
    return plots.lines(medians, "ages", "errors", "entry", "window", labels, lambda ax, _: ax.set_ylim(0, 1.5))


@PAPER.claim(
    "V3",
    "Training loses no accuracy at 8x.",
    units=trained,
    where="convergence of ResNet-32 on CIFAR-100",
    tested="The nets and data of V1, ResNet-20 with --full alone. 400 steps of LeNet-5 (4000 with --full) and 600 of "
    "`digits_net` (3000), compressed from at most a fifth of the training on; the same learning rate for all of a net.",
    rule=f"it ends at most {POINTS:g} point of held-out accuracy below dense.",
    published="Top-1 accuracy falls from 0.676 to 0.666.",
)
def training(rows: pd.DataFrame) -> Verdict:
    """Does compressing from a fifth of the training on cost accuracy?"""
    dense = rows[rows["method"] == "dense"].set_index(["net", "seed"])["value"].rename("dense")
    rows = rows.join(dense, on=["net", "seed"])
    rows["gap"] = rows["value"] - rows["dense"]  # NaN if the training diverged
    gaps = {place: list(some["gap"]) for place, some in groups(rows, "net", "method")}
    nets = list(dict.fromkeys(rows["net"]))
    both = [(net, method) for net in nets for method in ("default", "paper")]
    cells = {", ".join(place): [gap >= -POINTS for gap in gaps[place]] for place in both}
    told = {method: "; ".join(f"{spread(gaps[net, method])} for {net}" for net in nets) for _, method in both[:2]}
    table = over_seeds(rows, ["net", "method"], ["value", "gap", "wire"])
    return Verdict(
        judge(cells, f"with both settings at least one seed loses more than {POINTS:g} point"),
        f"Against dense, in points: default settings {told['default']}; the paper's {told['paper']}. The highest "
        f"ratio of {FASTER:g}x at least overall, dense steps counted, within {POINTS:g} point in every seed: "
        f"{'; '.join(fastest(rows[rows['net'] == net], net) for net in nets)}.",
        {"Held-out accuracy, %, its gap to dense, and the overall ratio": table},
        tradeoff(rows[rows["method"] != "dense"]),
        "Points against the same seed's dense training by the overall compression ratio, one per training.",
        "“default” and “paper” repeat a tenth of the training dense (Lt) and four tenths compressed (Lc), “refreshed” "
        "a twentieth and four twentieths; the others keep one basis to the end. At 8x that is 3.33x overall, whatever "
        f"the network: {FASTER:g}x needs quantized or fewer dense steps, or a higher ratio.",
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


def tradeoff(rows: pd.DataFrame) -> Figure:
    """Draw the gap to dense against the overall compression ratio, a panel per net, a point per training."""
    drawn, axes = plots.figure(rows["net"].nunique(), height=3.6, share_y=True)
    for ax, (net, some) in zip(axes, rows.groupby("net", sort=False), strict=True):
        for method, each in some.groupby("method", sort=False):
            ax.plot(each["wire"], each["gap"], "o", markersize=4, label=method)
        ax.axhline(-POINTS, color="0.6", lw=1)
        ax.axvline(FASTER, color="0.6", lw=1)
        ax.set(title=str(net), xlabel="overall compression ratio", ylabel="points against dense")
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return drawn


def cycles(rows: pd.DataFrame) -> pd.DataFrame:
    """Return how many times as fast as the dense ring a mean step of a cycle is: by net, link and seed, per scheme."""
    wide = rows.pivot(index=["net", "link", "seed"], columns="ring", values="seconds")
    fit = rows.groupby(["net", "link", "seed"])["fit"].first()
    found = {}
    for scheme, (dense, compressed) in SCHEMES.items():
        whole = CYCLE[0] * wide[dense] + fit + CYCLE[1] * wide[compressed] if dense else sum(CYCLE) * wide[compressed]
        found[scheme] = wide["dense"] / (whole / sum(CYCLE))
    return pd.DataFrame(found).melt(var_name="scheme", value_name="speed-up", ignore_index=False).reset_index()


@PAPER.claim(
    "V4",
    "Around the ring, aggregation is more than 5 times as fast, dense steps counted.",
    units=timed,
    where="aggregation time around the ring",
    tested="The pipelined ring (Algorithm 1) over MPI, 2 ranks (with --full 4, too) on emulated hosts with links of "
    "100 Mbit/s and 1 Gbit/s (left out if hosts cannot be emulated), and over shared memory; the layers of ResNet-32, "
    "and one of VGG's (512 filters of 512×3×3).",
    rule=f"a cycle, its dense steps and its fit counted, is at least {FASTER:g} times as fast as dense steps.",
    published="500 iterations of ResNet-32 on 6 CPU nodes take 162 s, not 850 s; a training, 46 to 50 % less time.",
)
def aggregation(rows: pd.DataFrame) -> Verdict:
    """Is a whole cycle around the ring more than five times as fast as dense steps?"""
    found = cycles(rows)
    speed = {place: list(some["speed-up"]) for place, some in groups(found, "net", "link", "scheme")}
    judged = {place: each for place, each in speed.items() if SCHEMES[place[2]][0]}
    cells = {", ".join(place): [value >= FASTER for value in each] for place, each in judged.items()}
    net, link, scheme = max(judged, key=lambda place: pd.Series(judged[place]).median())
    best = spread(judged[net, link, scheme], rate_of)
    plain = max(pd.Series(each).median() for place, each in judged.items() if place[2] == "8x")
    steps = over_seeds(rows, ["net", "link", "ring", "sent"], ["seconds"])
    drawn = plots.lines(found, "link", "speed-up", "scheme", "net", {"link": ""}, columns=1)
    fits = ", ".join(f"{spread(some['fit'], seconds_of)} ({each})" for (each,), some in groups(rows, "net"))
    return Verdict(
        judge(cells, f"the fastest cycle is {best} as fast as dense"),
        f"The fastest cycle, {net} at {link} with {scheme}: {best} as fast as the dense ring; with dense steps as "
        f"they are {rate_of(plain)} at most.",
        {
            "Times faster than the dense ring, measured": over_seeds(found, ["net", "scheme", "link"], ["speed-up"]),
            "One step of each ring, layer after layer": steps,
        },
        drawn,
        "Speed-up of a cycle over the dense ring, by link: mean and range of seeds.",
        f"With dense steps as they are no cycle can be more than {number(sum(CYCLE) / CYCLE[0])} times as fast, and "
        f"at 8x {number(sum(CYCLE) / (CYCLE[0] + CYCLE[1] / 8))} times. The fit of all bases, once a cycle, takes the "
        f"busiest rank {fits}; it is part of the cycle, the broadcast of its result is not. Each layer is a ring of "
        "its own: with many small layers the messages decide, not the bytes.",
    )


@PAPER.claim(
    "V5",
    "With QSGD it is better than either alone at an equal compression ratio.",
    units=(quantized, timed),
    where="GradiVeQ combined with QSGD",
    tested="Errors of LeNet-5's layers as in V1, in the 40 steps after 60 dense ones from step 200 on, the basis from "
    "512 slices; times of the rings of V4. Without feedback; every slice keeps exactly its share (λ = 0).",
    rule="at least one combination of the ratio has a lower error and a shorter step than each alone.",
)
def together(rows: pd.DataFrame, ring: pd.DataFrame) -> Verdict:
    """At an equal compression ratio, are both together better than either alone, in error and in time?"""
    found = with_medians(rows[rows["entry"].isin(MIXES["entry"])].merge(MIXES, on="entry"))
    errors = found.groupby(["entry", "seed"])["error"].median().unstack("entry")  # the median of the layers
    names = {place: list(some["entry"]) for place, some in MIXES.groupby([MIXES["ratio"], MIXES["what"] == "both"])}
    cells, lower = {}, []
    for ratio in dict.fromkeys(MIXES["ratio"]):
        both, alone = names[ratio, True], names[ratio, False]
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
    drawn = errors.melt(ignore_index=False, value_name="error").reset_index().merge(MIXES, on="entry")
    drawn = drawn.merge(found.groupby("entry", as_index=False)["wire"].median())
    return Verdict(
        outcome,
        f"Errors at 8x: GradiVeQ {at8[0]}, QSGD {at8[1]}, both {at8[2]}. The best of both has the lower error "
        f"{', '.join(lower)}.",
        {
            "Errors, and ratios by bytes on the wire": over_seeds(drawn, ["ratio", "entry", "wire"], ["error"]),
            "Seconds of a step around the ring": over_seeds(ring, ["net", "link", "ring"], ["seconds"]),
        },
        plots.lines(drawn, "ratio", "error", "what", None, {"ratio": "compression ratio of compressed steps"}),
        "Errors of GradiVeQ, of QSGD and of both together, at equal ratios: mean and range of seeds and combinations.",
        "At 32x QSGD has no counterpart, as it has 2 bits at least. Errors of both are those of the method, whose "
        "sums are quantized twice; around the ring they are quantized at every hop, which is the same for 2 ranks.",
    )
