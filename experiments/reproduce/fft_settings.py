"""What the claims of FFT's paper are tested with: trainings, plans, methods that are exchanged, and units of work."""

from __future__ import annotations

from typing import Any

from experiments.reproduce import fft_exchange as exchange
from experiments.reproduce import fft_measures as measures
from experiments.reproduce import simulate
from experiments.reproduce.claims import Scale, Unit
from experiments.reproduce.rows import Row
from experiments.training import loop
from experiments.training.experiment import Task

RANKS = 2
MOST = 0.8  #: share of the cells in which FFT has to err less
THETAS = (0.5, 0.7, 0.85, 0.95, 0.99)  #: at which values are sent in full
THETA = 0.85  #: the paper's, by which equal θ is judged
LARGE = 0.99  #: a large θ, for F2
HALVED = 0.5  #: what a large θ is lowered to
POINTS = 1.0  #: of held-out accuracy, which count as no loss
REGAINED = 0.9  #: share of what a large θ has lost
STAGES = 24  #: steps in which a diminishing θ falls
NET, TENSOR = "alexnet", "classifier.6.weight"
WORLD = 8  #: the paper's number of GPUs
RATES = ("1gbit", "10gbit", "56gbit")  #: the last one is the paper's InfiniBand
FASTER = 50.0  #: a GPU's memory bandwidth is some fifty times one core's
EXCHANGED: dict[str, Row] = {
    "fft": {"method": "fft"},
    "QSGD, 4 bits": {"method": "qsgd", "bits": 4},
    "TernGrad": {"method": "terngrad"},
    "top-k, 15 %": {"method": "topk", "density": 0.15, "feedback": "none"},
    "top-k, 1 %": {"method": "topk", "density": 0.01},
}
EQUAL = f"top-k at θ {THETA:g}"

# -- units ---------------------------------------------------------------------------------------


def task(id: str, net: str, steps: int, scale: Scale, **more: Any) -> Row:
    """A training; its data may be the user's."""
    path = {"path": scale.path} if scale.path and id == "fashion_mnist" else {}
    return {"task": id, "net": net, "steps": steps, "warmup_steps": steps // 10, **more, **path}


def tasks(scale: Scale) -> list[tuple[Row, float]]:
    """The trainings whose gradients are compressed, and about the seconds of each."""
    long = 1 if scale.quick else 10
    text = {"batch_size": 8, "learning_rate": 0.6, "momentum": 0.7, "clip_norm": 1.0}
    return [
        (task("fashion_mnist", "resnet20", 36 * long, scale, batch_size=8, learning_rate=0.05), 15),
        (task("noisy_digits", "digits_net", 90 * long, scale, batch_size=32, learning_rate=0.02), 6),
        (task("fashion_mnist", "fnn3", 90 * long, scale, batch_size=32, learning_rate=0.05), 5),
        (task("bytes", "byte_lstm", 45 * long, scale, **text), 14),
        (task("bytes", "byte_transformer", 45 * long, scale, **text), 12),
    ]


def watched(scale: Scale) -> list[Unit]:
    """Dense trainings, watched."""
    return [
        Unit(
            f"watch {each['net']} seed {seed}",
            measures.watched,
            {"task": each, "ranks": RANKS, "seed": seed, "samples": 6 if scale.quick else 24, "thetas": list(THETAS)},
            seconds=seconds * (1 if scale.quick else 6),
        )
        for each, seconds in tasks(scale)
        for seed in scale.seeds
    ]


def schedules(each: Row) -> dict[str, Row]:
    """The plans of F2 by name, for a training."""
    half = {"density": {"steps": {each["steps"] // 2: 1 - HALVED}}}
    fft = {"method": "fft"}
    return {
        "none": {"method": "none"},
        **{f"constant {theta:g}": {**fft, "density": 1 - theta} for theta in (THETA, LARGE)},
        **{f"diminishing from {theta:g}": diminishing(each, theta) for theta in (THETA, LARGE)},
        f"{LARGE:g}, then {HALVED:g}": {**fft, "density": 1 - LARGE, "schedule": half},
        f"{LARGE:g}, recovery": {**fft, "density": 1 - LARGE, "recovery": 4.0, "tolerance": 0.5},
        f"constant {LARGE:g}, feedback": {**fft, "density": 1 - LARGE, "feedback": "plain"},
    }


def diminishing(each: Row, theta: float) -> Row:
    """θ_t = sqrt(L·η_t), with the L by which it begins at ``theta``; the learning rate's warm-up does not count."""
    training = Task.model_validate({"label": each["task"], **each})
    steps = [each["steps"] * stage // STAGES for stage in range(STAGES)]
    rates = {step: loop.learning_rate(training, max(step, training.warmup_steps)) for step in steps}
    peak = max(rates.values())
    follows = {"lipschitz": theta**2 / peak, "learning_rate": {"steps": rates}}
    return {"method": "fft", "density": 1 - theta, "schedule": {"density": {"diminishing": follows}}}


def trained(scale: Scale) -> list[Unit]:
    """Trainings with θ by schedule."""
    steps = 300 if scale.quick else 3000
    given = [
        (task("fashion_mnist", net, steps, scale, batch_size=32, learning_rate=0.05), seconds)
        for net, seconds in (("fnn3", 5), ("lenet5", 6))
    ]
    if not scale.quick:
        given.append((task("noisy_digits", "digits_net", steps, scale, batch_size=32, learning_rate=0.02), 12))
    return [
        Unit(
            f"train {each['net']} {name} seed {seed}",
            simulate.accuracy,
            {"task": each, "method": plan, "ranks": RANKS, "seed": seed},
            seconds=seconds * (1 if scale.quick else 10),
        )
        for each, seconds in given
        for name, plan in schedules(each).items()
        for seed in scale.seeds
    ]


def timed(scale: Scale) -> list[Unit]:
    """Codecs on AlexNet, and primitives by size."""
    powers = (16, 18, 20, 22) if scale.quick else (12, 14, 16, 18, 20, 22, 24)
    return [
        Unit(
            f"codecs {NET} seed {seed}",
            exchange.codecs,
            {"net": NET, "small": TENSOR, "methods": EXCHANGED, "seed": seed, "runs": 3 if scale.quick else 7},
            seconds=60 if scale.quick else 150,
            alone=True,
        )
        for seed in scale.seeds
    ] + [
        Unit(
            f"primitives {2**power} seed {seed}",
            exchange.primitives,
            {"n": 2**power, "density": 1 - THETA, "seed": seed, "rounds": 3 if scale.quick else 15},
            seconds=0.5 + 2**power * (1e-6 if scale.quick else 4e-6),
            alone=True,
        )
        for power in powers
        for seed in scale.seeds
    ]
