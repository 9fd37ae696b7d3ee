"""The claims of FFT's paper (Wang et al., HPDC 2020, arXiv 1811.08596): what is measured for each, and its verdict."""

from __future__ import annotations

from itertools import product
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from experiments import nets
from experiments.cluster.hosts import title
from experiments.cost_model import model
from experiments.cost_model.fitted import Fitted
from experiments.papers import simulate
from experiments.papers.claims import Paper, Verdict, against_dense, groups, judge, per_seed, spread
from experiments.papers.fft import measures
from experiments.papers.fft.measures import BITS
from experiments.report import plots
from experiments.report.numbers import number, percent, seconds_of
from experiments.training import loop
from experiments.training.experiment import Task
from experiments.units import Unit
from hvdcompress.cli.numbers import bits_of
from hvdcompress.plan import load_plan

Settings = dict[str, Any]
RANKS = 2
MOST = 0.8  #: share of the cells in which FFT has to err less
THETA = 1 - measures.USUAL  #: the paper's
LARGE = 0.99  #: a large θ
HALVED = 0.5  #: what a large θ is lowered to
POINTS = 1.0  #: of held-out accuracy, which count as no loss
REGAINED = 0.9  #: share of what a large θ has lost
STAGES = 24  #: steps in which a diminishing θ falls
NET, TENSOR = "alexnet", "classifier.6.weight"
WORLD = 8  #: the paper's number of GPUs
LINKS = ("1gbit", "10gbit", "56gbit")  #: the last one is the paper's InfiniBand
FASTER = 50.0  #: a GPU's memory bandwidth is some fifty times one core's
EXCHANGED: dict[str, Settings] = {
    "fft": {"method": "fft"},
    "QSGD, 4 bits": {"method": "qsgd", "bits": 4},
    "TernGrad": {"method": "terngrad"},
    "top-k, 15 %": {"method": "topk", "density": 0.15, "feedback": "none"},
    "top-k, 1 %": {"method": "topk", "density": 0.01},
}
DATA = {"raw": "gradients", "kept": "kept frequencies"}

PAPER = Paper("fft", ["fashion_mnist", "noisy_digits", "bytes"])


def watched() -> list[Unit]:
    """List dense trainings, watched."""
    steps = {"resnet20": 36, "digits_net": 90, "fnn3": 90, "byte_lstm": 45, "byte_transformer": 45}
    tasks = {net: simulate.training(net, count) for net, count in steps.items()}
    return [Unit(measures.watched, {"task": task, "ranks": RANKS}, {"net": net}) for net, task in tasks.items()]


def schedules(each: Settings) -> dict[str, Settings]:
    """Return the plans of F2 by name, for a training."""
    fft = {"method": "fft", "density": 1 - LARGE}
    return {
        "none": {"method": "none"},
        **{f"constant {theta:g}": {"method": "fft", "density": 1 - theta} for theta in (THETA, LARGE)},
        **{f"diminishing from {theta:g}": diminishing(each, theta) for theta in (THETA, LARGE)},
        f"{LARGE:g}, then {HALVED:g}": {**fft, "schedule": {"density": {"steps": {each["steps"] // 2: 1 - HALVED}}}},
        f"{LARGE:g}, recovery": {**fft, "recovery": 4.0, "tolerance": 0.5},
        f"constant {LARGE:g}, feedback": {**fft, "feedback": "plain"},
    }


def diminishing(each: Settings, theta: float) -> Settings:
    """Return θ_t = sqrt(L·η_t), with the L by which it begins at ``theta``; the learning rate's warm-up is left out."""
    training = Task.model_validate(each)
    steps = [each["steps"] * stage // STAGES for stage in range(STAGES)]
    rates = {step: loop.learning_rate(training, max(step, training.warmup_steps)) for step in steps}
    follows = {"lipschitz": theta**2 / max(rates.values()), "learning_rate": {"steps": rates}}
    return {"method": "fft", "density": 1 - theta, "schedule": {"density": {"diminishing": follows}}}


def trained() -> list[Unit]:
    """List trainings with θ by schedule."""
    tasks = {net: simulate.training(net, 300) for net in ("fnn3", "lenet5")}
    return [
        Unit(simulate.accuracy, {"task": task, "method": plan, "ranks": RANKS}, {"net": net, "method": name})
        for net, task in tasks.items()
        for name, plan in schedules(task).items()
    ]


def timed() -> list[Unit]:
    """List the codecs of AlexNet's exchange."""
    return [
        Unit(measures.codecs, {"net": NET, "small": TENSOR, "method": method}, {"method": name}, alone=True)
        for name, method in EXCHANGED.items()
    ]


def logarithmic(ax: Axes, _: pd.DataFrame) -> None:
    """Make the y axis logarithmic."""
    ax.set_yscale("log")


@PAPER.claim("F1", "Dropping frequencies errs less than top-k, QSGD and TernGrad do.", watched)
def errors(rows: pd.DataFrame) -> Verdict:
    """Does FFT err less, by kind of layer and phase?"""
    rows = rows[rows["kind"] == "exchange"].assign(ratio=lambda each: each["fft"] / each["other"])
    place = ["net", "layers", "phase"]
    lower = rows.groupby(["rival", "seed", *place], sort=False)["ratio"].median() < 1
    shares = lower.groupby(["rival", "seed"], sort=False).mean()
    found = {rival: list(each) for rival, each in shares.groupby("rival", sort=False)}
    cells = rows[place].drop_duplicates()
    told = ", ".join(f"{rival} {spread(each, percent)}" for rival, each in found.items())
    equal = (
        rows[rows["rival"] == measures.EQUAL].groupby(["net", "tensor"])[["ratio", "kurtosis", "correlation"]].median()
    )
    ranked = equal.corr("spearman")["ratio"]
    by_step = rows.groupby(["net", "rival", "seed", "step"], as_index=False, sort=False)["ratio"].median()
    return Verdict(
        judge(
            {f"against {rival}": [share >= MOST for share in each] for rival, each in found.items()},
            f"FFT errs less in fewer than {percent(MOST)} of the cells against every method",
        ),
        f"Share of the {len(cells)} cells in which FFT errs less than: {told}.",
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
    trained,
)
def training(rows: pd.DataFrame) -> Verdict:
    """Does a large θ end worse than dense, does a diminishing one converge, a lower one recover?"""
    rows = against_dense(rows, "net")
    gaps = rows.pivot(index=["net", "seed"], columns="method", values="gap")
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
    losses = rows.assign(part=[list(range(1, len(each) + 1)) for each in rows["losses"]]).explode(["part", "losses"])
    losses = losses.astype({"part": float, "losses": float})
    return Verdict(
        judge(cells, "no part of it is met in every seed"),
        f"Points against dense, over nets and seeds: constant θ {LARGE:g} {spread(gaps[large])}, diminishing from "
        f"{LARGE:g} {spread(gaps[falling[1]])}, from {THETA:g} {spread(gaps[falling[0]])}; lowered from {LARGE:g} to "
        f"{HALVED:g} halfway {spread(gaps[lowered])}, which regains {spread(regained, percent)}.",
        plots.lines(losses, "part", "losses", "method", "net", {"part": "twentieth of the training"}, logarithmic),
        "Training loss with θ by schedule: mean and range of seeds.",
    )


@PAPER.claim("F3", "Range floats err less than other formats of as many bits.", watched)
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
        plots.lines(long.replace({"data": DATA}), "bits", "error", "what", "data", {}, logarithmic),
        "Error of number formats on gradients and on kept frequencies, by bits: mean and range of seeds.",
    )


def kind_of(name: str) -> str:
    """Return what a format competes as."""
    if name.startswith("rangefloat"):
        return "range floats"
    if name.startswith("e3"):
        return "floats with 3 bits of exponent"
    return "uniform codes" if name == "uniform" else "floats with 4 or 5 bits of exponent"


@PAPER.claim("F4", "AlexNet's exchange is faster than dense, with QSGD, with TernGrad and with top-k.", timed)
def alexnet(rows: pd.DataFrame) -> Verdict:
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
    middle = fitted.held_out["a method, in turn"]["median"]
    return Verdict(
        judge(cells, "FFT is predicted to be slower than every other method"),
        f"Predicted: {WORLD} ranks at 10 Gbit/s; {'; '.join(told)}.",
        plots.lines(predicted, "link", "seconds", "method", "host", {"link": ""}, logarithmic),
        "Predicted time of AlexNet's exchange by link, with the codec of one core and with a faster one.",
        "The model's seconds: messages, bytes on the link, collectives, and the codec's measured seconds times the "
        f"fitted factor {number(fitted.constants['codec'])}. Predictions of a method that the fit had not seen are "
        f"off by {percent(middle)} in the middle.",
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
        work = model.work(load_plan(EXCHANGED[row.method]), shapes, WORLD)._replace(codec=seconds)
        works.append({"method": row.method, "seed": row.seed, **work._asdict()})
    frame = pd.DataFrame(works).assign(shared=1.0, rate=bits_of(rate))
    seconds = model.costs(fitted.constants, frame).sum(axis=1)
    return frame[["method", "seed"]].assign(seconds=seconds, link=title(rate))
