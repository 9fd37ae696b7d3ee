"""What Gaussian-k's claims need measured: distributions and bounds in a training, counts, selection times, accuracy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy import stats

from experiments.papers import simulate
from experiments.training.simulate import Moment
from hvdcompress import registry
from hvdcompress.method import Context, TensorSpec, Workspace
from hvdcompress.methods.dgc import DGC
from hvdcompress.ops import fast
from hvdcompress.parts import candidates, select

Vector = np.ndarray[Any, Any]
LEAST = 1000  #: elements of a tensor whose distribution is looked at; a threshold for a handful of values says nothing
EDGES = np.linspace(-6.0, 6.0, 122)  #: of the histograms' bins, in standard deviations; one bin is around 0
PEAK = 3.0  #: bins within so many standard deviations have to fall off on both sides of the highest
PROMINENT = 0.05  #: of the peak: what rises by less on a side is no second peak
WHOLE = "all tensors"
RULES = ("first threshold", "paper", "bisect")  #: of Gaussian-k
OTHERS = ("DGC's sampling", "RedSync's trimmed top-k", "RedSync's binary search")  #: selectors that are counted, too
Settings = dict[str, Any]


# -- in a training -------------------------------------------------------------------------------


def watched(
    task: Settings, method: Settings, ranks: int, seed: int, densities: Sequence[float], samples: int = 30
) -> list[Settings]:
    """Train, and describe gradient + residual of one rank (in turns) at some steps, for each tensor and all joined.

    Returns:
        What :func:`describe` says, with ``step``, ``phase`` and ``tensor``.
    """

    def look(moment: Moment) -> list[Settings]:
        tensors = moment.accumulated(moment.step % ranks)
        vectors = {name: x.ravel() for name, x in tensors.items() if x.size >= LEAST}
        vectors[WHOLE] = np.concatenate([x.ravel() for x in tensors.values()])
        return [{"tensor": name, **describe(x, densities)} for name, x in vectors.items()]

    return simulate.watch(task, method, ranks, seed, look, simulate.spread_out(task["steps"], samples))


def describe(x: Vector, densities: Sequence[float]) -> Settings:
    """Describe one vector: its distribution, what top-k leaves of it, and how many elements thresholds choose.

    Args:
        x: float32 [n].
        densities: k/n.

    Returns:
        What :func:`shape` says; ``above``, by how much its :func:`curve` is above the line; ``left`` and ``counts``, by
        density.
    """
    magnitudes = np.sort(np.abs(x))[::-1].astype(np.float64)
    return {
        "n": len(x),
        **shape(x.astype(np.float64)),
        "above": above(magnitudes),
        "left": {str(density): left(magnitudes, select.num_kept(density, len(x))) for density in densities},
        "counts": {str(density): counts(x, density) for density in densities},
    }


def shape(x: Vector) -> Settings:
    """Describe how a vector is distributed.

    Returns:
        ``normal``, ``laplace``: Kolmogorov-Smirnov distances to these, fitted to x; ``kurtosis``: excess (0 for a
        Normal, 3 for a Laplace distribution); ``beyond``: the share outside of 3 standard deviations; ``histogram``:
        densities in :data:`EDGES` of x, scaled to mean 0 and variance 1. A constant x has NaN, and an empty histogram.
    """
    mean, std = float(x.mean()), float(x.std())
    if std == 0:
        return {**dict.fromkeys(("normal", "laplace", "kurtosis", "beyond"), float("nan")), "histogram": []}
    z = (x - mean) / std
    centre = float(np.median(z))
    fitted = (centre, float(np.abs(z - centre).mean()))
    return {
        "normal": float(stats.kstest(z, "norm", method="asymp").statistic),
        "laplace": float(stats.kstest(z, "laplace", fitted, method="asymp").statistic),
        "kurtosis": float(stats.kurtosis(z)),
        "beyond": float(np.mean(np.abs(z) > 3)),
        "histogram": (np.histogram(z, EDGES)[0] / (len(z) * np.diff(EDGES))).round(6).tolist(),
    }


def bell(histogram: Sequence[float], n: int) -> bool:
    """Return whether a histogram of n elements in :data:`EDGES` falls on both sides of its peak, within :data:`PEAK`.

    A second peak counts if it rises above the valley before it by more than :data:`PROMINENT` of the peak, and by more
    than three standard errors of the valley's count.
    """
    near = np.abs((EDGES[1:] + EDGES[:-1]) / 2) <= PEAK
    found = np.asarray(histogram)[near] * n * np.diff(EDGES)[near]
    peak = int(found.argmax())
    for side in (found[peak:], found[: peak + 1][::-1]):
        valley = np.minimum.accumulate(side)
        if (side - valley > np.maximum(PROMINENT * found[peak], 3 * np.sqrt(valley + 1))).any():
            return False
    return True


def above(magnitudes: Vector) -> float:
    """Return by how much the theorem's curve is above its line at most; 0 if it is below everywhere.

    The curve is π²(i) = (|x|(i)/max|x|)² over i/n, in descending order; the line is 1 − i/n.
    """
    n, largest = len(magnitudes), magnitudes[0]
    if largest == 0:
        return 0.0
    return max(float(((magnitudes / largest) ** 2 - (1 - np.arange(n) / n)).max()), 0.0)


def left(magnitudes: Vector, k: int) -> float:
    """Return ‖x − top_k(x)‖²/‖x‖² from the magnitudes in descending order; 0 for a zero vector."""
    squares = magnitudes**2
    total = squares.sum()
    return float(squares[k:].sum() / total) if total else 0.0


def counts(x: Vector, density: float) -> dict[str, float]:
    """Return how many elements each of :data:`RULES` and each selector of :data:`OTHERS` chooses, in units of k."""
    wanted = select.gaussiank_limits(density, len(x))
    k, start = wanted.k, np.float32(select.gaussian_threshold(*fast.moments(x), density))
    found = {"first threshold": fast.count_above(x, start) / k}
    for rule, refine in (("paper", select.refine_paper), ("bisect", select.refine_bisect)):
        threshold, ties = refine(candidates.Elements(x, None, None, fast), start, wanted)
        chosen = fast.count_above(x, threshold)
        if ties is not None and chosen < k:  # elements of equal magnitude fill up
            chosen += min(k - chosen, int((np.abs(x) == ties).sum()))
        found[rule] = chosen / k
    choose = selectors(len(x), density)
    return found | {name: len(choose[name](x).index) / k for name in OTHERS}


def counterexample(n: int, density: float) -> dict[str, float]:
    """Return what top-k leaves of a vector that is below the theorem's line, and the bound that it breaks.

    One element is large, and 4/5 of the others are equal. The curve is 1 at first, then 0.19 up to i/n = 0.8, then 0.
    """
    magnitudes = np.zeros(n)
    magnitudes[: int(0.8 * n)] = np.sqrt(0.19)
    magnitudes[0] = 1.0
    k = select.num_kept(density, n)
    return {"above": above(magnitudes), "left": left(magnitudes, k), "bound": (1 - k / n) ** 2}


# -- selection alone -----------------------------------------------------------------------------


def selectors(n: int, density: float) -> dict[str, Callable[[Vector], Any]]:
    """Return ways to choose about k of n elements, by name, without candidates from earlier steps."""
    k = select.num_kept(density, n)

    def fresh() -> tuple[Context, Workspace]:
        return Context(0, 1, 0, TensorSpec("x", (n,), "float32")), Workspace(fast)

    gaussian = {rule: registry.get_method("gaussiank", density=density, refine=rule) for rule in ("bisect", "paper")}
    # both as published: our own search looks at fewer elements from count to count
    redsync = {rule: registry.get_method("redsync", density=density, select=rule) for rule in ("trimmed", "paper")}
    dgc = DGC(density=density)

    def sampled(x: Vector) -> Any:
        ctx, work = fresh()
        wanted = select.gaussiank_limits(density, n)
        refine = partial(select.refine_bisect, start=dgc.threshold(x, ctx, work), wanted=wanted)
        return select.above_threshold(x, wanted, refine, 0, ctx, work)[0]

    return {
        "Gaussian-k, bisect": lambda x: gaussian["bisect"].choose(x, 0, *fresh()),  # type: ignore[attr-defined]
        "Gaussian-k, paper": lambda x: gaussian["paper"].choose(x, 0, *fresh()),  # type: ignore[attr-defined]
        "our own exact top-k": lambda x: select.largest(x, [k], *fresh()),
        "exact top-k (numpy.argpartition)": lambda x: np.argpartition(np.abs(x), n - k)[n - k :],
        "exact top-k (torch.topk)": lambda x: torch.topk(torch.from_numpy(x).abs(), k, sorted=False),
        "DGC's sampling": sampled,
        "RedSync's trimmed top-k": lambda x: redsync["trimmed"].choose(x, np.float32(0), *fresh())[0],  # type: ignore[attr-defined]
        "RedSync's binary search": lambda x: redsync["paper"].choose(x, np.float32(0), *fresh())[0],  # type: ignore[attr-defined]
    }


def times(n: int, density: float, seed: int, draws: str, rounds: int = 5) -> list[Settings]:
    """Return seconds of each selector on one core, the medians of rounds in which they take turns.

    Args:
        n: elements.
        density: k/n.
        seed: of the vectors; a new one each round.
        draws: "normal" or "laplace".
        rounds: at least 1; one more is not timed.
    """
    torch.set_num_threads(1)
    random, found = np.random.default_rng(seed), {name: [] for name in selectors(n, density)}  # type: ignore[var-annotated]
    for number in range(rounds + 1):
        x = getattr(random, draws)(size=n).astype(np.float32)
        for name, choose in selectors(n, density).items():
            began = time.perf_counter()
            choose(x)
            if number:  # in the first round kernels are compiled
                found[name].append(time.perf_counter() - began)
    return [{"selector": name, "seconds": statistics.median(each)} for name, each in found.items()]
