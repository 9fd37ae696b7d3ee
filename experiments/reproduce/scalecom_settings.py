"""What ScaleCom's claims are tested with: tasks, settings of the methods, and how much of both."""

from __future__ import annotations

from typing import Any

from experiments.reproduce import scalecom_measures, simulate
from experiments.reproduce.claims import Scale, Unit

Row = dict[str, Any]
TEXT = "transformer, text"
CLIPPED = f"{TEXT}, clipped before"
TEXTS: dict[str, Row] = {
    TEXT: {},
    CLIPPED: {"clip": "before"},
    "LSTM, text": {"net": "byte_lstm", "learning_rate": 4.8},
}  #: what differs from the first; rates of learning are those that serve dense training best
PICTURES: dict[str, Row] = {
    "FNN-3, Fashion-MNIST": {"task": "fashion_mnist", "net": "fnn3"},
    "FNN-3, learning rate 0.01": {"task": "fashion_mnist", "net": "fnn3", "learning_rate": 0.01},
    "LeNet-5, Fashion-MNIST": {"task": "fashion_mnist", "net": "lenet5"},
    "convolutions, noisy digits": {"task": "noisy_digits", "weight_decay": 0.0005},
}
SECONDS = dict.fromkeys(PICTURES, 3.5) | dict.fromkeys(TEXTS, 28)
SECONDS |= {"LeNet-5, Fashion-MNIST": 4.5, "convolutions, noisy digits": 5}
BETAS = (1.0, 0.3, 0.1)
RATES: dict[str, Row] = {
    "48x": {"density": 1 / 60},
    "80x": {"density": 0.01},
    "over 100x": {"density": 0.0085, "values": "fp16"},
}  #: by the rate of a large tensor with exact selection; biases and the like stay dense
NETS = ("fnn3", "lenet5")
WATCHED = ((32, 0.05), (8, 0.05), (32, 0.2))  #: batch per rank, and learning rate
WORKERS = (16, 64)
FACTORS = (1, 4)  #: of the learning rate with many workers
WARM, HALF = "exact, β 1, warm-up", "exact, β 1, fp16"
FEW = {"": ("none",), "48x": ("topk", "exact, β 1", HALF, "chunk, β 0.1"), "over 100x": ("exact, β 1",)}
_MORE = {**FEW, "48x": (*FEW["48x"], "chunk, β 1")}
SHORT = {
    TEXT: {**_MORE, "80x": ("exact, β 1",)},
    CLIPPED: {"": ("none",), "48x": ("topk", "exact, β 1", HALF, "chunk, β 1")},
    "LSTM, text": FEW,
}  #: the settings that text is learnt with, by task and rate
READ = {
    **SHORT,
    TEXT: {**SHORT[TEXT], "over 100x": ("topk", "exact, β 1", "chunk, β 0.1")},
    CLIPPED: _MORE,
}  #: the same with --full
_QUICK = {**FEW, "over 100x": ("exact, β 1", "chunk, β 0.1")}
QUICK = {
    **dict.fromkeys(("FNN-3, Fashion-MNIST", "LeNet-5, Fashion-MNIST", "convolutions, noisy digits"), _QUICK),
    TEXT: {"": ("none",), "48x": ("topk", HALF), "over 100x": ("exact, β 1",)},
}  #: the tasks and settings of --quick


def tasks(scale: Scale) -> dict[str, Row]:
    """The tasks, by name."""
    found = {name: picture(task, scale) for name, task in PICTURES.items()}
    steps = 500 if scale.quick else 2500
    text = {
        "task": "bytes",
        "steps": steps,
        "batch_size": 8,
        "learning_rate": 0.6,
        "warmup_steps": steps // 10,
        "momentum": 0.7,
        "clip_norm": 1.0,
    }
    return found | {name: {**text, **changed} for name, changed in TEXTS.items()}


def picture(task: Row, scale: Scale, steps: int = 300) -> Row:
    """A task of pictures: ``steps``, or eight times as many with --full."""
    steps = steps if scale.quick else 8 * steps
    path = {"path": scale.path} if scale.path and task["task"] == "fashion_mnist" else {}
    return {"learning_rate": 0.05, **task, "steps": steps, "batch_size": 32, "warmup_steps": steps // 10, **path}


def scalecom(select: str, beta: float, **more: Any) -> Row:
    """ScaleCom's settings, all that matter written out."""
    feedback = {"feedback": "plain"} if beta == 1 else {"feedback": "lowpass", "beta": beta}
    return {"method": "scalecom", "select": select, **feedback, **more}


def beta_of(method: Row) -> float:
    """The low-pass factor of a method's settings; 1 for plain feedback."""
    return float(method.get("beta", 1.0))


def settings(steps: int) -> dict[tuple[str, str], Row]:
    """What tasks are trained with, by name and rate: dense, top-k, each selection with each β, 16 bits, a warm-up."""
    found: dict[tuple[str, str], Row] = {("none", ""): {"method": "none"}}
    for rate, sparse in RATES.items():
        found["topk", rate] = {"method": "topk", **sparse}
        for select in ("exact", "chunk"):
            for beta in BETAS:
                found[f"{select}, β {beta:g}", rate] = scalecom(select, beta, **sparse)
        if rate == "48x":  # the same with shorter values, and more of them
            found[HALF, rate] = scalecom("exact", 1.0, density=1 / 35, values="fp16")
    rate = "over 100x"
    found[WARM, rate] = scalecom("exact", 1.0, **RATES[rate], warmup={"steps": steps // 10})
    return found


def watched(scale: Scale) -> list[Unit]:
    """Trainings whose ranks are compared: two nets, learning rates, selections and β; with --full two batches."""
    return [
        Unit(
            f"watch {net} {select} β {beta:g} batch {batch} rate {rate:g} seed {seed}",
            scalecom_measures.likeness,
            {
                "task": {**picture({"task": "fashion_mnist", "net": net}, scale, 100), **changed},
                "method": scalecom(select, beta, density=0.01),
                "ranks": 4,
                "seed": seed,
                "samples": 10 if scale.quick else 50,
            },
            seconds=2.5 if scale.quick else 20,
        )
        for net in NETS
        for select in ("exact", "chunk")
        for batch, rate in WATCHED
        if batch == 32 or not scale.quick
        for changed in [{"batch_size": batch, "learning_rate": rate}]
        for beta in (1.0, 0.1)
        for seed in scale.seeds
    ]


def large(scale: Scale) -> list[Unit]:
    """Trainings with many workers, at a learning rate and at four times as much; the paper's selection."""
    methods = [("none", {"method": "none"})]
    methods += [(f"β {beta:g}", scalecom("chunk", beta, density=0.01)) for beta in BETAS]
    return [
        Unit(
            f"large batch {workers} workers {name} rate x{factor} seed {seed}",
            simulate.accuracy,
            {
                "task": {
                    **picture({"task": "fashion_mnist", "net": "fnn3"}, scale, 100),
                    "batch_size": 8,
                    "learning_rate": 0.05 * factor,
                },
                "method": method,
                "ranks": workers,
                "seed": seed,
            },
            seconds=workers / 6 * (1 if scale.quick else 8),
        )
        for workers in (WORKERS[:1] if scale.few else WORKERS)
        for factor in FACTORS
        for name, method in methods
        for seed in scale.seeds
    ]


def converging(scale: Scale) -> list[Unit]:
    """Trainings of several lengths."""
    methods = [("none", {"method": "none"})]
    methods += [
        (f"{select}, β {beta:g}", scalecom(select, beta, density=0.02))
        for select in ("exact", "chunk")
        for beta in (1.0, 0.1)
    ]
    lengths = [100, 200, 400, 800] if scale.quick else [200, 400, 800, 1600, 3200, 6400]
    return [
        Unit(
            f"converge {name} seed {seed}".replace(",", ""),
            scalecom_measures.convergence,
            {"method": method, "world_size": 4, "seed": seed, "lengths": lengths, "rate": 2.0},
            seconds=5.5 if scale.quick else 46,
        )
        for name, method in methods
        for seed in scale.seeds
    ]


def travelling(scale: Scale) -> list[Unit]:
    """Exchanges among more and more workers."""
    methods = {
        "exact": scalecom("exact", 1.0, density=0.01),
        "chunk": scalecom("chunk", 1.0, density=0.01),
        "topk": {"method": "topk", "density": 0.01},
    }
    return [
        Unit(
            f"traffic {name} seed {seed}",
            scalecom_measures.traffic,
            {"method": method, "world_sizes": [2, 4, 8, 16, 32, 64, 128, 256], "seed": seed, "n": 16384},
            seconds=1,
        )
        for name, method in methods.items()
        for seed in scale.seeds
    ]


def trained(scale: Scale) -> list[Unit]:
    """Trainings of each task with those of the settings that are :func:`wanted`."""
    return [
        Unit(
            " ".join(f"{name} {method} {rate} seed {seed}".replace(",", "").replace("/", " ").split()),
            simulate.accuracy,
            {"task": task, "method": settings_of, "ranks": 2, "seed": seed},
            seconds=SECONDS[name] * (1 if scale.quick else 5 if name in TEXTS else 8),
        )
        for name, task in tasks(scale).items()
        for seed in scale.seeds
        for (method, rate), settings_of in settings(task["steps"]).items()
        if wanted(name, method, rate, scale)
    ]


def wanted(task: str, method: str, rate: str, scale: Scale) -> bool:
    """Whether a scale has a training.

    With --full, pictures have all settings (at 80x exact selection with β = 1 alone), and text, which is slow, those of
    ``READ``. Without it, pictures have no β of 0.3, and text has those of ``SHORT``. With --quick there are the tasks
    and settings of ``QUICK``.
    """
    if scale.few:
        return method in QUICK.get(task, {}).get(rate, ())
    if task in TEXTS:
        return method in (SHORT if scale.quick else READ)[task].get(rate, ())
    if rate == "80x":
        return method == "exact, β 1"
    return not (scale.quick and "β 0.3" in method)
