"""What ScaleCom's claims are tested with: tasks, settings of the methods, and how much of both."""

from __future__ import annotations

from itertools import product
from typing import Any

from experiments.papers import simulate
from experiments.papers.scalecom import measures
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
                given = {"task": settings, "method": tried[name, ratio], "ranks": 2}
                units.append(Unit(simulate.accuracy, given, {"task": task, "at": ratio, "method": name}))
    return units
