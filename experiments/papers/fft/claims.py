"""The claims of FFT's paper (Wang et al., HPDC 2020, arXiv 1811.08596): what is measured for each, and its verdict."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from experiments import nets
from experiments.cluster.rates import Rate
from experiments.cost_model import model
from experiments.cost_model.fitted import Fitted
from experiments.papers import simulate
from experiments.papers.claims import Paper, Scale, Verdict, groups, judge, over_seeds, per_seed, spread
from experiments.papers.fft import measures
from experiments.papers.fft.formats import BITS
from experiments.papers.units import Unit
from experiments.report import plots
from experiments.report.numbers import number, percent, seconds_of
from experiments.training import loop
from hvdcompress.plan import load

Settings = dict[str, Any]
RANKS = 2
MOST = 0.8  #: share of the cells in which FFT has to err less
THETAS = (0.5, 0.7, 0.85, 0.95, 0.99)  #: at which values are sent in full
THETA = 0.85  #: the paper's, by which equal θ is judged
LARGE = 0.99  #: a large θ
HALVED = 0.5  #: what a large θ is lowered to
POINTS = 1.0  #: of held-out accuracy, which count as no loss
REGAINED = 0.9  #: share of what a large θ has lost
STAGES = 24  #: steps in which a diminishing θ falls
NET, TENSOR = "alexnet", "classifier.6.weight"
WORLD = 8  #: the paper's number of GPUs
LINKS = {"1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s", "56gbit": "56 Gbit/s"}  #: the last one is the paper's InfiniBand
FASTER = 50.0  #: a GPU's memory bandwidth is some fifty times one core's
EXCHANGED: dict[str, Settings] = {
    "fft": {"method": "fft"},
    "QSGD, 4 bits": {"method": "qsgd", "bits": 4},
    "TernGrad": {"method": "terngrad"},
    "top-k, 15 %": {"method": "topk", "density": 0.15, "feedback": "none"},
    "top-k, 1 %": {"method": "topk", "density": 0.01},
}
EQUAL = f"top-k at θ {THETA:g}"
DATA = {"raw": "gradients", "kept": "kept frequencies"}

PAPER = Paper(
    "fft",
    "FFT",
    'Wang et al., "FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks", HPDC 2020 '
    "(arXiv 1811.08596).",
    "It errs less than 2-bit QSGD and TernGrad at the same bytes. A large constant θ ends below dense training.",
    "Top-k with range floats errs less. A lower θ wins back 42 % of what was lost, not 90 %.",
    ["fashion_mnist", "noisy_digits", "bytes"],
)


# -- units ---------------------------------------------------------------------------------------


def task(id: str, net: str, steps: int, **more: Any) -> Settings:
    """Return a training."""
    return {"task": id, "net": net, "steps": steps, "warmup_steps": steps // 10, **more}


def watched(scale: Scale) -> list[Unit]:
    """List dense trainings, watched."""
    long = 10 if scale.full else 1
    text = {"batch_size": 8, "learning_rate": 0.6, "momentum": 0.7, "clip_norm": 1.0}
    tasks = [
        (task("fashion_mnist", "resnet20", 36 * long, batch_size=8, learning_rate=0.05), 15),
        (task("noisy_digits", "digits_net", 90 * long, batch_size=32, learning_rate=0.02), 6),
        (task("fashion_mnist", "fnn3", 90 * long, batch_size=32, learning_rate=0.05), 5),
        (task("bytes", "byte_lstm", 45 * long, **text), 14),
        (task("bytes", "byte_transformer", 45 * long, **text), 12),
    ]
    common = {"ranks": RANKS, "samples": 24 if scale.full else 6, "thetas": list(THETAS)}
    return [
        Unit(measures.watched, {"task": each, "seed": seed, **common}, {"net": each["net"], "seed": seed}, seconds)
        for each, seconds in tasks
        for seed in scale.seeds
    ]


def schedules(each: Settings) -> dict[str, Settings]:
    """Return the plans of F2 by name, for a training."""
    fft = {"method": "fft", "density": 1 - LARGE}
    half = {"density": {"steps": {each["steps"] // 2: 1 - HALVED}}}
    return {
        "none": {"method": "none"},
        **{f"constant {theta:g}": {"method": "fft", "density": 1 - theta} for theta in (THETA, LARGE)},
        **{f"diminishing from {theta:g}": diminishing(each, theta) for theta in (THETA, LARGE)},
        f"{LARGE:g}, then {HALVED:g}": {**fft, "schedule": half},
        f"{LARGE:g}, recovery": {**fft, "recovery": 4.0, "tolerance": 0.5},
        f"constant {LARGE:g}, feedback": {**fft, "feedback": "plain"},
    }


def diminishing(each: Settings, theta: float) -> Settings:
    """Return θ_t = sqrt(L·η_t), with the L by which it begins at ``theta``; the learning rate's warm-up is left out."""
    training = simulate.task_of(each)
    steps = [each["steps"] * stage // STAGES for stage in range(STAGES)]
    rates = {step: loop.learning_rate(training, max(step, training.warmup_steps)) for step in steps}
    follows = {"lipschitz": theta**2 / max(rates.values()), "learning_rate": {"steps": rates}}
    return {"method": "fft", "density": 1 - theta, "schedule": {"density": {"diminishing": follows}}}


def trained(scale: Scale) -> list[Unit]:
    """List trainings with θ by schedule."""
    steps = 3000 if scale.full else 300
    tasks = [task("fashion_mnist", net, steps, batch_size=32, learning_rate=0.05) for net in ("fnn3", "lenet5")]
    if scale.full:
        tasks.append(task("noisy_digits", "digits_net", steps, batch_size=32, learning_rate=0.02))
    return [
        Unit(
            simulate.accuracy,
            {"task": each, "method": method, "ranks": RANKS, "seed": seed},
            {"net": each["net"], "plan": plan, "seed": seed},
            seconds=steps / 50,
        )
        for each in tasks
        for plan, method in schedules(each).items()
        for seed in scale.seeds
    ]


def timed(scale: Scale) -> list[Unit]:
    """List the codecs of AlexNet's exchange."""
    common = {"net": NET, "small": TENSOR, "runs": 7 if scale.full else 3}
    return [
        Unit(
            measures.codecs,
            {"method": method, "seed": seed, **common},
            {"method": label, "seed": seed},
            seconds=30 if scale.full else 12,
            alone=True,
        )
        for label, method in EXCHANGED.items()
        for seed in scale.seeds
    ]


def primitives(scale: Scale) -> list[Unit]:
    """List the primitives of FFT's codec by size."""
    common = {"density": 1 - THETA, "rounds": 15 if scale.full else 3}
    return [
        Unit(measures.primitives, {"n": n, "seed": seed, **common}, {"n": n, "seed": seed}, 0.5 + n * 1e-6, alone=True)
        for n in (2**power for power in ((12, 14, 16, 18, 20, 22, 24) if scale.full else (16, 18, 20, 22)))
        for seed in scale.seeds
    ]


def logarithmic(ax: Axes, _: pd.DataFrame) -> None:
    """Make the y axis logarithmic."""
    ax.set_yscale("log")


# -- claims --------------------------------------------------------------------------------------


@PAPER.claim(
    "F1",
    "Dropping frequencies errs less than top-k, QSGD and TernGrad do.",
    units=watched,
    where="approximation errors of gradients",
    tested="Gradients of two ranks in dense trainings: ResNet-20 and FNN-3 on Fashion-MNIST, a convolutional net on "
    "noisy digits, an LSTM and a transformer on Python source. One exchange without feedback, ‖ĝ − ḡ‖/‖ḡ‖ of each "
    f"tensor of at least {measures.LEAST} elements, at 6 (24 with --full) steps. At equal bytes, FFT writes range "
    f"floats of 10 bits: top-k gets the bytes of FFT at θ {THETA:g}, and FFT those of the quantizers. At equal θ, "
    "both send values in full.",
    rule=f"in every seed, a lower median error in at least {percent(MOST)} of the cells (net, kind of layer, phase of "
    "training); a verdict for each competitor.",
)
def errors(rows: pd.DataFrame) -> Verdict:
    """Does FFT err less, by kind of layer and phase?"""
    rows = rows[rows["kind"] == "exchange"].assign(ratio=lambda each: each["fft"] / each["other"])
    rivals = [*measures.RIVALS, EQUAL]
    judged = rows[rows["rival"].isin(rivals)]
    place = ["net", "layers", "phase"]
    lower = judged.groupby(["rival", "seed", *place])["ratio"].median() < 1
    shares = lower.groupby(["rival", "seed"]).mean()
    found = {rival: list(shares[rival]) for rival in rivals}
    cells = judged[place].drop_duplicates()
    told = ", ".join(f"{rival} {spread(found[rival], percent)}" for rival in rivals)
    equal = rows[rows["rival"] == EQUAL].groupby(["net", "tensor"])[["ratio", "kurtosis", "correlation"]].median()
    ranked = equal.corr("spearman")["ratio"]
    usual = rows[rows["rival"] == "top-k, fp32"]
    by_step = judged.groupby(["net", "rival", "seed", "step"], as_index=False, sort=False)["ratio"].median()
    table = over_seeds(rows[rows["rival"].str.contains("θ")], ["layers", "rival"], ["fft", "other"])
    return Verdict(
        judge(
            {f"against {rival}": [share >= MOST for share in each] for rival, each in found.items()},
            f"FFT errs less in fewer than {percent(MOST)} of the cells against every method",
        ),
        f"Share of the {len(cells)} cells in which FFT errs less than: {told}.",
        {
            "FFT's error divided by the other's, by kind of layer": over_seeds(judged, ["layers", "rival"], ["ratio"]),
            "The same in each cell": over_seeds(judged, [*place, "rival"], ["ratio"]),
            f"FFT's own error, range floats of 10 bits, θ {THETA:g}": over_seeds(usual, place, ["fft"]),
            "Errors at equal θ, values in full": table,
        },
        plots.lines(by_step, "step", "ratio", "rival", "net", {"ratio": "FFT's error / other's"}, logarithmic),
        "FFT's error divided by each competitor's through training, at equal bytes, and top-k's at equal θ: median of "
        "the tensors, mean and range of seeds; below 1 FFT errs less.",
        f"At θ {THETA:g}, over {len(equal)} tensors, the rank correlation of FFT's error divided by top-k's with the "
        f"kurtosis of the elements is {number(ranked['kurtosis'], 2)}, and with the correlation of neighbours in "
        f"memory {number(ranked['correlation'], 2)}: heavy tails favour the elements, smoothness the frequencies.",
    )


@PAPER.claim(
    "F2",
    "Training converges with a diminishing θ, stalls with a large constant one, recovers when θ is lowered.",
    units=trained,
    where="convergence theorem and experiments with θ",
    tested=f"FNN-3 and LeNet-5 (with --full a convolutional net on noisy digits, too) on Fashion-MNIST, {RANKS} "
    "simulated ranks with 32 examples each, 300 steps (3000 with --full), SGD with momentum 0.9, a cosine to zero "
    f"from 0.05 (0.02), no feedback. θ_t = sqrt(L·η_t) follows it in {STAGES} stages.",
    rule=f"by held-out accuracy at the end: a constant θ of {LARGE:g} is more than {POINTS:g} point below dense; a "
    f"diminishing one, which begins there or at {THETA:g}, at most that; lowered to {HALVED:g} halfway, at least "
    f"{percent(REGAINED)} of what the large one lost is regained.",
)
def training(rows: pd.DataFrame) -> Verdict:
    """Does a large θ end worse than dense, does a diminishing one converge, a lower one recover?"""
    wide = rows.pivot(index=["net", "seed"], columns="plan", values="value")
    gaps = wide.sub(wide["none"], axis=0)  # NaN if the training diverged
    large, lowered = f"constant {LARGE:g}", f"{LARGE:g}, then {HALVED:g}"
    falling = [f"diminishing from {theta:g}" for theta in (THETA, LARGE)]
    regained = (gaps[lowered] - gaps[large]) / -gaps[large]
    cells = {}
    for net in dict.fromkeys(rows["net"]):
        words = f"with {net}"
        worse = f"a constant θ {LARGE:g} ends more than {POINTS:g} point below dense"
        cells[worse, words] = list(~(gaps[large][net] >= -POINTS))
        for plan in falling:
            cells[f"θ {plan} converges", words] = list(gaps[plan][net] >= -POINTS)
        cells["a lowered θ recovers", words] = list(regained[net] >= REGAINED)
    rows = rows.merge(gaps.stack().rename("gap").reset_index(), how="left")
    rows["loss"] = [each[-1] if each else math.nan for each in rows["losses"]]
    table = over_seeds(rows, ["net", "plan"], ["value", "gap", "loss", "ratio"])
    losses = rows.assign(part=[list(range(1, len(each) + 1)) for each in rows["losses"]]).explode(["part", "losses"])
    losses = losses.astype({"part": float, "losses": float})
    return Verdict(
        judge(cells, "no part of it is met in every seed"),
        f"Points against dense, over nets and seeds: constant θ {LARGE:g} {spread(gaps[large])}, diminishing from "
        f"{LARGE:g} {spread(gaps[falling[1]])}, from {THETA:g} {spread(gaps[falling[0]])}; lowered from {LARGE:g} to "
        f"{HALVED:g} halfway {spread(gaps[lowered])}, which regains {spread(regained, percent)}.",
        {"Held-out accuracy, %, its gap to dense, the last twentieth's loss, and the compression ratio": table},
        plots.lines(losses, "part", "losses", "plan", "net", {"part": "twentieth of the training"}, logarithmic),
        "Training loss with θ by schedule: mean and range of seeds.",
        "*recovery* is the method's own trigger: the density grows fourfold whenever a step's loss is more than half "
        "above the best so far. A single step's loss is noisy, so it acts often, and the ratio falls. *feedback* is "
        "not the paper's: what was not sent is kept and added to the next gradient. Halfway, a fifth of the sum of "
        "the learning rates is still to come.",
    )


@PAPER.claim(
    "F3",
    "Range floats err less than other formats of as many bits.",
    units=watched,
    where="range-based quantization",
    tested="The trainings of F1: rank 0's gradients, and the frequencies kept of them, each tensor coded by itself, "
    "with 6 to 10 bits: range floats, uniform codes, and floats with 3 to 5 bits of exponent (with 8 bits also the "
    "fp8 of today's hardware). With 16 bits: range floats, bf16 and fp16, not judged.",
    rule="in every seed, a lower median error in each of the five nets, with 6 to 10 bits.",
)
def numbers(rows: pd.DataFrame) -> Verdict:
    """Do range floats err less than other formats of as many bits?"""
    rows = rows[rows["kind"] == "format"].astype({"bits": int})
    judged = rows[rows["bits"].isin(BITS)]
    medians = judged.groupby(["bits", "format", "seed", "net"], sort=False)[list(DATA)].median()
    cells: dict[tuple[str, str], list[bool]] = {}
    wins = []
    for what, bits in product(DATA, BITS):
        table = medians.loc[bits][what].unstack("format")  # [seeds and nets, formats]
        better = table.drop(columns=f"rangefloat{bits}").gt(table[f"rangefloat{bits}"], axis=0)
        for rival, some in better.T.groupby(kind_of):
            place = f"than {rival} on {DATA[what]}"
            cells[place, f"at {bits} bits"] = list(some.all().groupby("seed").all())
            wins.append({"less": place, "bits": bits, "wins": int(some.sum().sum()), "of": some.size})
    long = judged.assign(what=judged["format"].map(kind_of)).melt(["bits", "what", "seed"], list(DATA), "data", "error")
    long = long.groupby(["bits", "what", "seed", "data"], as_index=False, sort=False)["error"].median()
    shown = {"rangefloat8": "range floats", "uniform": "the uniform code", "e3m4": "the float e3m4"}
    eight = judged[judged["bits"] == 8]
    told = "; ".join(
        f"on {words} "
        + ", ".join(f"{spread(per_seed(eight[eight['format'] == id], what))} with {name}" for id, name in shown.items())
        for what, words in DATA.items()
    )
    return Verdict(
        judge(cells, "some other format errs less at every number of bits"),
        f"Error at 8 bits: {told}.",
        {
            "How often the range float errs less: nets, seeds and formats of that kind": pd.DataFrame(wins),
            "‖decoded − x‖/‖x‖ over all tensors of a step": over_seeds(rows, ["bits", "format"], list(DATA)),
        },
        plots.lines(long.replace({"data": DATA}), "bits", "error", "what", "data", {}, logarithmic),
        "Error of number formats on gradients and on kept frequencies, by bits: mean and range of seeds.",
        "Other floats eEmM are scaled so that the largest value is their largest number, and have subnormal numbers: "
        "below the smallest exponent they go on in even steps, where a range float has nothing but zero. Gradients "
        "span many octaves, and most of their values are far below the largest one. A range float chooses its "
        "mantissa from a sample of the data, one per tensor.",
    )


def kind_of(name: str) -> str:
    """Return what a format competes as."""
    if name.startswith("rangefloat"):
        return "range floats"
    if name.startswith("e3"):
        return "floats with 3 bits of exponent"
    return "uniform codes" if name == "uniform" else "floats with 4 or 5 bits of exponent"


@PAPER.claim(
    "F4",
    "AlexNet's exchange is faster than dense, with QSGD, with TernGrad and with top-k.",
    units=(timed, primitives),
    where="end-to-end times on 8 GPUs, InfiniBand",
    tested="AlexNet's tensors (61 million elements). What a rank computes is measured on one core of this machine, on "
    f"drawn gradients with heavy tails; an exchange among {WORLD} ranks is *predicted* from that by the cost model "
    "that `python -m experiments scale` uses, for three links, with this codec and with a faster one.",
    rule="the predicted exchange is shorter with each seed's codec times.",
    published="On 8 GPUs 2.26 times as fast as dense, 1.31 times as with QSGD, 1.25 times as with TernGrad, 1.47 "
    "times as with top-k.",
)
def alexnet(rows: pd.DataFrame, parts: pd.DataFrame) -> Verdict:
    """Is AlexNet's exchange faster with FFT?"""
    fitted = Fitted.open("horovod")
    hosts = {"this core": 1.0, f"a codec {FASTER:g} times as fast": FASTER}
    predicted = pd.concat(
        predict(rows, fitted, rate, hosts[host]).assign(host=host) for host, rate in product(hosts, LINKS)
    )
    cells = {}
    for (host, link), some in groups(predicted, "host", "link"):
        wide = some.pivot(index="seed", columns="method", values="seconds")
        for method in ("dense", *list(EXCHANGED)[1:]):
            cells[f"than {method}", f"at {link} with {host}"] = list(wide["fft"] < wide[method])
    told = []
    for (host,), some in groups(predicted[predicted["link"] == "10 Gbit/s"], "host"):
        each = {method: spread(list(one["seconds"]), seconds_of) for (method,), one in groups(some, "method")}
        others = ", ".join(f"{method} {text}" for method, text in each.items() if method != "fft")
        told.append(f"with {host} {each['fft']}, and {others}")
    table = over_seeds(predicted, ["host", "link", "method"], ["seconds"])
    work = over_seeds(rows, ["method"], ["seconds", *measures.PARTS, "further"])
    middle = fitted.held_out["a method, in turn"]["median"]
    return Verdict(
        judge(cells, "FFT is predicted to be slower than every other method"),
        f"Predicted: {WORLD} ranks at 10 Gbit/s; {'; '.join(told)}.",
        {
            f"Model, not measured: seconds of AlexNet's exchange among {WORLD} ranks": table,
            "Measured: seconds of a rank's own work with two ranks, and for each further one": work,
            "Measured: seconds of primitives": over_seeds(parts, ["n", "primitive"], ["seconds"]),
        },
        plots.lines(predicted, "link", "seconds", "method", "host", {"link": ""}, logarithmic),
        "Predicted time of AlexNet's exchange by link, with the codec of one core and with a faster one.",
        "The model's seconds: messages, bytes on the link, collectives, and the codec's measured seconds times the "
        f"fitted factor {number(fitted.constants['codec'])}. Predictions of a method that the fit had not seen are "
        f"off by {percent(middle)} in the middle. Nothing is hidden behind the backward pass. {FASTER:g} times as "
        "fast is about what a GPU's memory bandwidth is to one core's: an assumption, no measurement.",
    )


def predict(rows: pd.DataFrame, fitted: Fitted, rate: str, faster: float) -> pd.DataFrame:
    """Return the seconds of AlexNet's exchange over links of a rate, with ``dense`` for stock Horovod.

    ``rows`` are what ``measures.codecs`` found, by method and seed; codecs take ``faster`` times less than that.
    """
    shapes = nets.get(NET)
    works = [
        {"method": "dense", "seed": seed, **model.stock(shapes, WORLD)._asdict()} for seed in rows["seed"].unique()
    ]
    for row in rows.itertuples():
        seconds = (row.seconds + (WORLD - measures.FEW) * row.further) / faster
        work = model.work(load(EXCHANGED[row.method]), shapes, WORLD)._replace(codec=seconds)
        works.append({"method": row.method, "seed": row.seed, **work._asdict()})
    frame = pd.DataFrame(works).assign(shared=1.0, rate=Rate.parse(rate).slower)
    seconds = model.costs(fitted.constants, frame).sum(axis=1)
    return frame[["method", "seed"]].assign(seconds=seconds, link=LINKS[rate])
