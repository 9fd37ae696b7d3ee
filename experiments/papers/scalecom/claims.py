"""The claims of ScaleCom's paper (Chen et al. 2020, arXiv 2104.11125): what is measured for each, and its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from experiments.papers import simulate
from experiments.papers.claims import Paper, Verdict, against_dense, exploded, groups, judge, per_seed, spread
from experiments.papers.scalecom import measures
from experiments.report import plots
from experiments.report.numbers import number, percent, rate_of
from experiments.units import Unit

Row = dict[str, Any]
TEXT = "transformer, text"
CLIPPED = f"{TEXT}, clipped before"
#: nets, and what differs from their usual training; the learning rates are those that serve dense training best
TEXTS: dict[str, tuple[str, Row]] = {
    TEXT: ("byte_transformer", {}),
    CLIPPED: ("byte_transformer", {"clip": "before"}),
    "LSTM, text": ("byte_lstm", {"learning_rate": 4.8}),
}
PICTURES: dict[str, tuple[str, Row]] = {
    "FNN-3, Fashion-MNIST": ("fnn3", {}),
    "FNN-3, learning rate 0.01": ("fnn3", {"learning_rate": 0.01}),
    "LeNet-5, Fashion-MNIST": ("lenet5", {}),
    "convolutions, noisy digits": ("digits_net", {"learning_rate": 0.05, "weight_decay": 0.0005}),
}
#: by the compression ratio of a large tensor with exact selection; biases and the like stay dense
RATIOS: dict[str, Row] = {"48x": {"density": 1 / 60}, "over 100x": {"density": 0.0085, "values": "fp16"}}
BETAS = (1.0, 0.1)
SELECTIONS = ("exact", "chunk")
RATES = (0.05, 0.2)  #: at which ranks are compared
WORKERS = (16, 64)
FACTORS = (1, 4)  #: of the learning rate with many workers
WARM, HALF = "exact, β 1, warm-up", "exact, β 1, fp16"
MAIN = {("none", ""), ("topk", "48x"), ("exact, β 1", "48x"), (HALF, "48x"), ("chunk, β 0.1", "48x")}
OVER = ("exact, β 1", "over 100x")
#: what text, which is slow, is learnt with: method and ratio, by task
TEXT_METHODS = {
    TEXT: {*MAIN, OVER, ("chunk, β 1", "48x"), ("exact, β 1", "80x")},
    CLIPPED: MAIN - {("chunk, β 0.1", "48x")} | {("chunk, β 1", "48x")},
    "LSTM, text": {*MAIN, OVER},
}


def scalecom(select: str, beta: float, **more: Any) -> Row:
    """Return ScaleCom's settings, all that matter written out."""
    feedback = {"feedback": "plain"} if beta == 1 else {"feedback": "lowpass", "beta": beta}
    return {"method": "scalecom", "select": select, **feedback, **more}


def mixed(**sparse: Any) -> dict[str, Row]:
    """Return ScaleCom with both selections, with the filter and without it, by name."""
    return {f"{select}, β {beta:g}": scalecom(select, beta, **sparse) for select, beta in product(SELECTIONS, BETAS)}


def methods(steps: int) -> dict[tuple[str, str], Row]:
    """Return what pictures are learnt with, by name and ratio: dense, top-k, selections and β, 16 bits, a warm-up."""
    found: dict[tuple[str, str], Row] = {("none", ""): {"method": "none"}}
    for ratio, sparse in RATIOS.items():
        both = {"topk": {"method": "topk", **sparse}, **mixed(**sparse)}
        found |= {(name, ratio): settings for name, settings in both.items()}
    found[HALF, "48x"] = scalecom("exact", 1.0, density=1 / 35, values="fp16")  # shorter values, and more of them
    found["exact, β 1", "80x"] = scalecom("exact", 1.0, density=0.01)
    found[WARM, "over 100x"] = scalecom("exact", 1.0, **RATIOS["over 100x"], warmup={"steps": steps // 10})
    return found


def watched() -> list[Unit]:
    """List trainings whose ranks are compared: two nets, learning rates, selections and β."""
    return [
        Unit(
            measures.likeness,
            {
                "task": simulate.training(net, 100, learning_rate=rate),
                "method": scalecom(select, beta, density=0.01),
                "ranks": 4,
            },
            {"net": net, "rate": rate, "select": select, "β": beta},
        )
        for net, select, rate, beta in product(("fnn3", "lenet5"), SELECTIONS, RATES, BETAS)
    ]


def large() -> list[Unit]:
    """List trainings with many workers, at a learning rate and at four times as much; the paper's selection."""
    filters = {f"β {beta:g}": scalecom("chunk", beta, density=0.01) for beta in (1.0, 0.3, 0.1)}
    return [
        Unit(
            simulate.accuracy,
            {
                "task": simulate.training("fnn3", 100, batch_size=8, learning_rate=0.05 * factor),
                "method": method,
                "ranks": workers,
            },
            {"workers": workers, "factor": factor, "method": name},
        )
        for workers, factor in product(WORKERS, FACTORS)
        for name, method in {"none": {"method": "none"}, **filters}.items()
    ]


def converging() -> list[Unit]:
    """List trainings of several lengths."""
    common = {"world_size": 4, "lengths": [100, 200, 400, 800], "rate": 2.0}
    tried = {"none": {"method": "none"}, **mixed(density=0.02)}
    return [
        Unit(measures.convergence, {"method": method, **common}, {"method": name}) for name, method in tried.items()
    ]


def travelling() -> list[Unit]:
    """List exchanges among more and more workers."""
    tried = {select: scalecom(select, 1.0, density=0.01) for select in SELECTIONS}
    tried["topk"] = {"method": "topk", "density": 0.01}
    common = {"world_sizes": [2, 4, 8, 16, 32, 64, 128, 256], "n": 16384}
    return [Unit(measures.traffic, {"method": method, **common}, {"method": name}) for name, method in tried.items()]


def trained() -> list[Unit]:
    """List trainings of each task: of pictures with all methods, of text with some."""
    units = []
    for task, (net, changed) in (PICTURES | TEXTS).items():
        settings = simulate.training(net, 500 if task in TEXTS else 300, **changed)
        tried = methods(settings["steps"])
        for name, ratio in tried:
            if (name, ratio) in TEXT_METHODS.get(task, tried):
                units.append(
                    Unit(
                        simulate.accuracy,
                        {"task": settings, "method": tried[name, ratio], "ranks": 2},
                        {"task": task, "at": ratio, "method": name},
                    )
                )
    return units


NEAR, ENERGY, OFTEN = 0.3, 0.8, 0.8  #: largest distance, least share of energy, share of the steps
BITS, POINTS = 0.05, 0.5  #: bits per byte and points of accuracy that count as no loss
LARGE_POINTS = 1.0  #: of accuracy, with many workers
LEAST_RATIOS = {"48x": 40.0, "over 100x": 100.0}  #: with what stays dense, for the ratio's claim to be judged
SLOPES = 0.1  #: by which an exponent may differ from the dense one's
PAPER = Paper("scalecom", ["fashion_mnist", "noisy_digits", "bytes"])


@PAPER.claim("S1", "The ranks' residuals are alike, so that one rank's selection serves all.", watched)
def alike(rows: pd.DataFrame) -> Verdict:
    """Judge the distance between residuals, and the leader's share of the best energy."""
    rows = rows.assign(near=(rows["distance"] < NEAR) * 1.0, enough=(rows["share"] > ENERGY) * 1.0)
    places = ["net", "rate", "select", "β"]
    shares = rows.groupby([*places, "seed"], sort=False)[["near", "enough"]].mean().reset_index()
    cells = {
        f"{net}, learning rate {rate:g}, {select}, β {beta:g}": list(some[["near", "enough"]].min(axis=1) >= OFTEN)
        for (net, rate, select, beta), some in groups(shares, *places)
    }
    told = "; ".join(
        f"{select}: distance {spread(per_seed(some, 'distance'))}, share {spread(per_seed(some, 'share'))}"
        for (select,), some in groups(rows, "select")
    )
    worst = (
        f"no condition has both in {percent(OFTEN)} of the steps of every seed: of all steps, "
        f"{100 * rows['near'].mean():.0f} % have the distance and {100 * rows['enough'].mean():.0f} % the share"
    )
    long = rows.melt([*places, "step"], ["distance", "share"], var_name="what")
    drawn = plots.lines(
        long.assign(
            setting=long["select"] + ", β " + long["β"].map("{:g}".format),
            panel=long["net"] + ", learning rate " + long["rate"].map("{:g}".format) + ": " + long["what"],
        ),
        "step",
        "value",
        "setting",
        panel="panel",
        labels={"value": ""},
        decorate=lambda ax, some: ax.axhline(NEAR if (some["what"] == "distance").all() else ENERGY, color="k", lw=0.8),
        height=2.0,
        share_y=True,
    )
    return Verdict(
        judge(cells, worst),
        f"Medians over steps and settings: {told}.",
        drawn,
        "How alike residuals are, and what the leader's selection is worth: mean and range over seeds; the rule in "
        "black.",
    )


@PAPER.claim("S2", "A low-pass filter on the residual makes residuals more alike at a large learning rate.", watched)
def filtered(rows: pd.DataFrame) -> Verdict:
    """Judge the distance between residuals with the filter against that without it."""
    places = ["net", "select", "rate"]
    wide = rows.pivot_table("distance", [*places, "seed"], "β", "median", sort=False).dropna()  # seen with both β
    wide["change"] = wide[0.1] - wide[1.0]
    largest = max(RATES)
    changes = wide.xs(largest, level="rate")["change"]
    cells = {
        f"{net}, {select}": list(some < 0) for (net, select), some in changes.groupby(["net", "select"], sort=False)
    }
    return Verdict(
        judge(cells, "for no net and selection is the distance smaller at β 0.1 in every seed"),
        f"At a learning rate of {largest:g} β = 0.1 changes the distance by {spread(changes)} (median, least to "
        "largest over nets, selections and seeds).",
    )


@PAPER.claim(
    "S3",
    "The leader's selection contracts: with d of k positions missed it leaves at most d/k + (1 − d/k)·γ0, γ0 being "
    "what the best selection leaves.",
    watched,
)
def lemma(rows: pd.DataFrame) -> Verdict:
    """Judge what the leader's selection leaves against Lemma 1's bound."""
    rows = exploded(rows, "tensors", "tensor", "part")
    rows = rows.drop(columns="part").join(pd.DataFrame(rows["part"].tolist()))
    rows["slack"] = rows["bound"] - rows["left"]
    rows["above"] = rows["slack"] < -1e-6
    cells = {
        f"{net}, {select}": list(~some.groupby("seed")["above"].any())
        for (net, select), some in groups(rows, "net", "select")
    }
    return Verdict(
        judge(cells, f"the bound is broken {rows['above'].sum()} times in {len(rows)}"),
        f"{rows['above'].sum()} of {len(rows)} vectors are above the bound; slack {spread(per_seed(rows, 'slack'))}.",
        plots.lines(
            rows,
            "bound",
            "left",
            "select",
            None,
            {"bound": "d/k + (1 − d/k)·γ0", "left": "‖ȳ − CLT(ȳ)‖²/‖ȳ‖²"},
            lambda ax, _: ax.plot([0, 1], [0, 1], "k"),
            ".",
        ),
        "What the leader's selection leaves of the ranks' mean against Lemma 1's bound: below the line it holds.",
    )


@PAPER.claim("S4", "At a large batch and a learning rate scaled up, the filter saves convergence.", large, trains=True)
def large_batch(rows: pd.DataFrame) -> Verdict:
    """Judge trainings of many workers at four times the learning rate."""
    times, cells, told = max(FACTORS), {}, []
    rows = against_dense(rows, "workers")  # the better of two dense ones, as at x4 it may fail by itself
    for (workers,), some in groups(rows, "workers"):
        wide = some.pivot(index="seed", columns=["factor", "method"], values="value")
        best, plain, most = wide[times, "β 0.1"], wide[times, "β 1"], some.groupby("seed")["dense"].first()
        # a training that diverged is worse than any other
        cells[f"{workers} workers: β 0.1 above β 1 at x{times}"] = list((best > plain) | (best.notna() & plain.isna()))
        cells[f"{workers} workers: β 0.1 at x{times} within {LARGE_POINTS:g} point of the best dense"] = list(
            best >= most - LARGE_POINTS
        )
        lost = plain.isna().sum()
        diverged = f" (β 1 diverged in {lost} of {len(plain)} seeds)" if lost else ""
        gain = f"with {workers} workers {spread((best - plain).dropna())} against β 1{diverged}"
        told.append(f"{gain} and {spread(best - most)} against the best dense")
    rows = rows.assign(panel=rows["workers"].astype(str) + " workers")
    drawn = plots.lines(
        rows,
        "factor",
        "value",
        "method",
        "panel",
        {"factor": "learning rate in units of 0.05", "value": "held-out accuracy, %"},
        lambda ax, _: ax.set_xticks(FACTORS),
        share_y=True,
    )
    return Verdict(
        judge(cells, "β 0.1 is neither above β 1 in every seed nor within a point of dense"),
        f"β 0.1 at {times} times the learning rate, in points: {'; '.join(told)}.",
        drawn,
        "Held-out accuracy by workers, learning rate and β: mean and range over seeds; trainings that diverged are "
        "missing.",
    )


@PAPER.claim("S5", "Models train without loss at 47x to 65x and at more than 100x.", trained, trains=True)
def no_loss(rows: pd.DataFrame) -> Verdict:
    """Judge what is lost against dense training, by task, ratio, selection and β."""
    rows = against_dense(rows, "task")
    text = rows["task"].isin(TEXTS)
    rows["loss"] = rows["gap"].where(text, -rows["gap"])
    rows["most"] = np.where(text, BITS, POINTS)
    exact = rows[rows["method"] == "exact, β 1"].groupby(["task", "at"], sort=False)["ratio"].median().to_dict()
    cells = {
        f"{task} at {at}, {method}": list(some["loss"] < some["most"])
        for (task, at, method), some in groups(rows, "task", "at", "method")
        if at in LEAST_RATIOS and method != "topk" and exact.get((task, at), np.nan) >= LEAST_RATIOS[at]
    }
    pictures = rows[~text].groupby(["method", "at"])["loss"]
    told = "; ".join(
        f"{method} at {at} {spread(pictures.get_group((method, at)))}"
        for method in ("exact, β 1", "chunk, β 0.1")
        for at in ("48x", "over 100x")
    )
    compared = rows[rows["method"].isin(["topk", "exact, β 1", HALF, "chunk, β 0.1"])]
    drawn = plots.lines(
        compared.assign(overall=compared.groupby(["task", "method", "at"])["ratio"].transform("median")),
        "overall",
        "loss",
        "method",
        panel="task",
        labels={"overall": "overall compression ratio", "loss": "bits or points lost"},
        decorate=_limit,
        height=2.0,
    )
    return Verdict(
        judge(cells, "no setting is that close to dense on any task in every seed"),
        f"Points behind dense on the pictures (median, least to largest over tasks and seeds): {told}.",
        drawn,
        "What is lost against dense training by the overall compression ratio, and the most that the rule allows "
        "(black): mean and range over seeds.",
        _overall(exact),
    )


def _limit(ax: Axes, rows: pd.DataFrame) -> None:
    for line in ax.get_lines():
        line.set_marker(".")
    ax.axhline(rows["most"].iloc[0], color="k", lw=0.8)
    ax.set_xlim(left=0)


def _overall(exact: Mapping[tuple[str, str], float]) -> str:
    """Say what is left of the ratios if all tensors are counted, and where that is too little to be judged."""
    small = list(dict.fromkeys(task for (task, at), ratio in exact.items() if ratio < LEAST_RATIOS.get(at, 0)))
    overall = [ratio for (_, at), ratio in exact.items() if at == "48x"]
    told = f"with what stays dense, exact selection at 48x has {rate_of(min(overall))} to {rate_of(max(overall))}"
    left = f" {' and '.join(small)}, much of which stays dense, is not judged." if small else ""
    return f"Ratios are those of large tensors; {told}.{left}"


@PAPER.claim("S6", "It converges as dense SGD does, with 1/√T.", converging)
def converges(rows: pd.DataFrame) -> Verdict:
    """Judge how the mean of ‖∇f‖² falls with the number of steps."""
    slopes = pd.DataFrame(
        {"method": method, "seed": seed, "exponent": np.polyfit(np.log(some["T"]), np.log(some["square"]), 1)[0]}
        for (method, seed), some in groups(rows, "method", "seed")
    )
    wide = slopes.pivot(index="seed", columns="method", values="exponent")
    names = list(dict.fromkeys(slopes["method"]))
    cells = {name: list(wide[name] - wide["none"] <= SLOPES) for name in names if name != "none"}
    return Verdict(
        judge(cells, "every exponent is larger than dense training's by more than the rule allows"),
        "Exponents: " + "; ".join(f"{name} {spread(wide[name])}" for name in names) + ".",
        plots.lines(rows, "T", "square", "method", None, {"T": "T, steps", "square": "mean ‖∇f‖²"}, _as_the_root),
        "The mean of ‖∇f‖² over trainings of T steps, by T: mean and range over seeds; the black line falls as 1/√T.",
    )


def _as_the_root(ax: Axes, rows: pd.DataFrame) -> None:
    ax.loglog()
    steps = rows["T"].unique()
    ax.plot(steps, rows["square"].max() * (steps[0] / steps) ** 0.5, "k", lw=0.8)


@PAPER.claim("S7", "Traffic does not grow with the number of workers, as it does with top-k.", travelling)
def flat(rows: pd.DataFrame) -> Verdict:
    """Judge how a rank's bytes grow with the number of ranks."""
    # a ring transmits 2(p − 1)/p of what it sums; its pieces are whole elements
    rows = rows.assign(ring=2 * (rows["ranks"] - 1) / rows["ranks"])
    kept = rows["wire"] <= 1.02 * rows["sent"] * rows["ring"]
    cells: dict[str, list[bool]] = {}
    growth: dict[str, list[float]] = {}
    for (method, _), some in groups(rows, "method", "seed"):
        growth.setdefault(method, []).append(some["wire"].iloc[-1] / some["wire"].iloc[0])
        if method != "topk":
            cells.setdefault(method, []).append(some["sent"].nunique() == 1 and kept[some.index].all())
    least, most = rows["ranks"].min(), rows["ranks"].max()
    told = "; ".join(f"{spread(each)} ({name})" for name, each in growth.items())
    return Verdict(
        judge(cells, "its bytes grow with the ranks"),
        f"From {least} to {most} ranks, what a rank transmits grows by a factor of {told}; a ring's 2(p − 1)/p by "
        f"{number(rows['ring'].iloc[-1] / rows['ring'].iloc[0])}.",
        plots.lines(
            rows, "ranks", "wire", "method", None, {"wire": "bytes on the wire"}, lambda ax, _: ax.loglog(base=2)
        ),
        "Bytes that a rank transmits, by the number of ranks.",
    )
