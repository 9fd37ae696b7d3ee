"""What ScaleCom's claims are tested with: tasks, settings of the methods, and how much of both."""

from __future__ import annotations

from typing import Any

from experiments.papers import simulate
from experiments.papers.claims import Scale
from experiments.papers.scalecom import measures
from experiments.papers.units import Unit

Row = dict[str, Any]
TEXT = "transformer, text"
CLIPPED = f"{TEXT}, clipped before"
TEXTS: dict[str, Row] = {
    TEXT: {},
    CLIPPED: {"clip": "before"},
    "LSTM, text": {"net": "byte_lstm", "learning_rate": 4.8},
}  #: what differs from the first; the learning rates are those that serve dense training best
PICTURES: dict[str, Row] = {
    "FNN-3, Fashion-MNIST": {"task": "fashion_mnist", "net": "fnn3"},
    "FNN-3, learning rate 0.01": {"task": "fashion_mnist", "net": "fnn3", "learning_rate": 0.01},
    "LeNet-5, Fashion-MNIST": {"task": "fashion_mnist", "net": "lenet5"},
    "convolutions, noisy digits": {"task": "noisy_digits", "weight_decay": 0.0005},
}
BETAS = (1.0, 0.3, 0.1)
RATIOS: dict[str, Row] = {
    "48x": {"density": 1 / 60},
    "80x": {"density": 0.01},
    "over 100x": {"density": 0.0085, "values": "fp16"},
}  #: by the compression ratio of a large tensor with exact selection; biases and the like stay dense
WATCHED = ((32, 0.05), (8, 0.05), (32, 0.2))  #: batch per rank, and learning rate
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
#: the same of all tasks with --quick
QUICK_METHODS = {
    **dict.fromkeys(PICTURES, {*MAIN, OVER, ("chunk, β 0.1", "over 100x")}),
    "FNN-3, learning rate 0.01": set(),
    TEXT: {("none", ""), ("topk", "48x"), (HALF, "48x"), OVER},
}


def tasks(scale: Scale) -> dict[str, Row]:
    """Return the tasks by name."""
    steps = 2500 if scale.full else 500
    text = {
        "task": "bytes",
        "steps": steps,
        "batch_size": 8,
        "learning_rate": 0.6,
        "warmup_steps": steps // 10,
        "momentum": 0.7,
        "clip_norm": 1.0,
    }
    pictures = {name: picture(scale, 300, **task) for name, task in PICTURES.items()}
    return pictures | {name: {**text, **changed} for name, changed in TEXTS.items()}


def picture(scale: Scale, steps: int, **task: Any) -> Row:
    """Return a task of pictures: ``steps``, or eight times as many with --full."""
    steps = 8 * steps if scale.full else steps
    return {"learning_rate": 0.05, "batch_size": 32, **task, "steps": steps, "warmup_steps": steps // 10}


def scalecom(select: str, beta: float, **more: Any) -> Row:
    """Return ScaleCom's settings, all that matter written out."""
    feedback = {"feedback": "plain"} if beta == 1 else {"feedback": "lowpass", "beta": beta}
    return {"method": "scalecom", "select": select, **feedback, **more}


def settings(steps: int) -> dict[tuple[str, str], Row]:
    """Return what tasks are trained with, by name and ratio: dense, top-k, selections and β, 16 bits, a warm-up."""
    found: dict[tuple[str, str], Row] = {("none", ""): {"method": "none"}}
    for ratio, sparse in RATIOS.items():
        found["topk", ratio] = {"method": "topk", **sparse}
        for select in ("exact", "chunk"):
            for beta in BETAS:
                found[f"{select}, β {beta:g}", ratio] = scalecom(select, beta, **sparse)
        if ratio == "48x":  # the same with shorter values, and more of them
            found[HALF, ratio] = scalecom("exact", 1.0, density=1 / 35, values="fp16")
    ratio = "over 100x"
    found[WARM, ratio] = scalecom("exact", 1.0, **RATIOS[ratio], warmup={"steps": steps // 10})
    return found


def watched(scale: Scale) -> list[Unit]:
    """List trainings whose ranks are compared: two nets, learning rates, selections and β; with --full two batches."""
    return [
        Unit(
            measures.likeness,
            {
                "task": picture(scale, 100, task="fashion_mnist", net=net, batch_size=batch, learning_rate=rate),
                "method": scalecom(select, beta, density=0.01),
                "ranks": 4,
                "seed": seed,
                "samples": 50 if scale.full else 10,
            },
            {"net": net, "batch": batch, "rate": rate, "select": select, "β": beta, "seed": seed},
        )
        for net in ("fnn3", "lenet5")
        for select in ("exact", "chunk")
        for batch, rate in WATCHED
        if batch == 32 or scale.full
        for beta in (1.0, 0.1)
        for seed in scale.seeds
    ]


def large(scale: Scale) -> list[Unit]:
    """List trainings with many workers, at a learning rate and at four times as much; the paper's selection."""
    methods = {"none": {"method": "none"}} | {f"β {beta:g}": scalecom("chunk", beta, density=0.01) for beta in BETAS}
    task = {"task": "fashion_mnist", "net": "fnn3", "batch_size": 8}
    return [
        Unit(
            simulate.accuracy,
            {
                "task": picture(scale, 100, **task, learning_rate=0.05 * factor),
                "method": method,
                "ranks": workers,
                "seed": seed,
            },
            {"workers": workers, "factor": factor, "method": name, "seed": seed},
            seconds=workers,
        )
        for workers in (WORKERS[:1] if scale.few else WORKERS)
        for factor in FACTORS
        for name, method in methods.items()
        for seed in scale.seeds
    ]


def converging(scale: Scale) -> list[Unit]:
    """List trainings of several lengths."""
    methods = {"none": {"method": "none"}} | {
        f"{select}, β {beta:g}": scalecom(select, beta, density=0.02)
        for select in ("exact", "chunk")
        for beta in (1.0, 0.1)
    }
    lengths = [200, 400, 800, 1600, 3200, 6400] if scale.full else [100, 200, 400, 800]
    common = {"world_size": 4, "lengths": lengths, "rate": 2.0}
    return [
        Unit(measures.convergence, {"method": method, "seed": seed, **common}, {"method": name, "seed": seed})
        for name, method in methods.items()
        for seed in scale.seeds
    ]


def travelling(scale: Scale) -> list[Unit]:
    """List exchanges among more and more workers."""
    methods = {
        "exact": scalecom("exact", 1.0, density=0.01),
        "chunk": scalecom("chunk", 1.0, density=0.01),
        "topk": {"method": "topk", "density": 0.01},
    }
    common = {"world_sizes": [2, 4, 8, 16, 32, 64, 128, 256], "n": 16384}
    return [
        Unit(measures.traffic, {"method": method, "seed": seed, **common}, {"method": name, "seed": seed})
        for name, method in methods.items()
        for seed in scale.seeds
    ]


def trained(scale: Scale) -> list[Unit]:
    """List trainings of each task with those of the methods that are :func:`wanted`."""
    return [
        Unit(
            simulate.accuracy,
            {"task": task, "method": method, "ranks": 2, "seed": seed},
            {"task": name, "at": ratio, "method": label, "seed": seed},
            seconds=28 if name in TEXTS else 4,
        )
        for name, task in tasks(scale).items()
        for seed in scale.seeds
        for (label, ratio), method in settings(task["steps"]).items()
        if wanted(name, label, ratio, scale)
    ]


def wanted(task: str, method: str, ratio: str, scale: Scale) -> bool:
    """Return whether a scale has a training. Pictures have all methods, but a β of 0.3 with --full alone."""
    if scale.few or task in TEXTS:
        return (method, ratio) in (QUICK_METHODS if scale.few else TEXT_METHODS).get(task, ())
    return method == "exact, β 1" if ratio == "80x" else scale.full or "β 0.3" not in method
