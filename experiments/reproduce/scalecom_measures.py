"""What ScaleCom's claims need measured: how alike residuals are and what a leader selects, convergence, bytes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from experiments.reproduce import simulate
from experiments.reproduce.simulate import Moment
from experiments.scale import workers
from experiments.training.numpy_digits import load, loss_and_gradient
from hvdcompress.loopback import Loopback
from hvdcompress.parts import select
from hvdcompress.plan import plan_of

Vector = np.ndarray[Any, Any]
Settings = dict[str, Any]
LEAST = 1000  #: elements of a tensor that is looked at; smaller ones are sent uncompressed, or nearly
SHARES = np.linspace(0.005, 0.995, 41)  #: at which quantiles of two ranks' residuals are compared


# -- in a training -------------------------------------------------------------------------------


def likeness(task: Settings, method: Settings, ranks: int, seed: int, samples: int) -> dict[str, Any]:
    """Train with ScaleCom, and compare the ranks' residuals and selections at some steps.

    Returns:
        ``rows``: step, phase, what :func:`alike` says of all tensors joined, and of each tensor what
        :func:`contraction` says; ``quantiles``: of the last of these steps, the residuals' of rank 0 and of rank 1 at
        :data:`SHARES`, in standard deviations; ``diverged``: whether the training did, after these rows.
    """
    run = simulate.run_of(task, method, ranks, seed)
    rows: list[dict[str, Any]] = []
    quantiles: list[list[float]] = []
    density = method["density"]

    def look(moment: Moment) -> None:
        names = [name for name, g in moment.reduced.items() if g.size >= LEAST]
        tensors = [moment.accumulated(rank) for rank in range(ranks)]
        means = {name: np.mean([each[name] for each in tensors], axis=0, dtype=np.float64).ravel() for name in names}
        all_parts = {name: contraction(means[name], moment.reduced[name].ravel(), density) for name in names}
        parts = {name: part for name, part in all_parts.items() if part is not None}
        memories = [np.concatenate([m[name].ravel() for name in names]) for m in moment.residuals]
        if not parts or not all(memory.any() for memory in memories):
            return
        best = sum(part["best"] for part in parts.values())
        rows.append(
            {
                "step": moment.step,
                "phase": moment.phase,
                "distance": distance(memories),
                "share": sum(part["kept"] for part in parts.values()) / best if best else 1.0,
                "tensors": parts,
            }
        )
        quantiles[:] = [np.quantile(m / m.std(), SHARES).round(5).tolist() for m in memories[:2]]

    diverged = False
    try:
        simulate.train(run, look, simulate.spread_out(run.task.steps, samples))
    except simulate.loop.Diverged:
        diverged = True
    return {"rows": rows, "quantiles": quantiles, "diverged": diverged}


def distance(memories: Sequence[Vector]) -> float:
    """The mean cosine distance between ranks' residuals, over all pairs: 0 if they point the same way, 1 if at random.

    >>> distance([np.array([1.0, 0]), np.array([0, 1.0]), np.array([2.0, 0])])
    0.6666666666666666
    """
    units = [m / np.linalg.norm(m) for m in (m.astype(np.float64) for m in memories)]
    return statistics.fmean(1 - float(a @ b) for a, b in combinations(units, 2))


def contraction(mean: Vector, reduced: Vector, density: float) -> dict[str, float] | None:
    """What the leader's selection keeps of the ranks' mean, the best one, and the bound of the paper's Lemma 1.

    With d of the k best positions missed, and γ0 what the best selection leaves, the bound is d/k + (1 − d/k)·γ0.

    Args:
        mean: of all ranks' gradient + residual [n], float64.
        reduced: the exchange's result, zero where nothing was sent [n].
        density: k/n.

    Returns:
        ``kept`` and ``best``, the squares summed over the leader's and over the k largest positions; ``missed``, d/k;
        ``left``, what the leader's selection leaves of all squares; ``bound``. None where the leader sent other than
        about k values that are not zero (a gradient of which most is zero), or all is zero.
    """
    squares = mean**2
    total, sent, k = squares.sum(), np.flatnonzero(reduced), select.num_kept(density, len(mean))
    if not total or abs(len(sent) - k) > max(1, k // 50):
        return None
    order = np.argpartition(squares, len(mean) - len(sent))[-len(sent) :]
    best, kept = float(squares[order].sum()), float(squares[sent].sum())
    missed = 1 - len(np.intersect1d(order, sent, assume_unique=True)) / len(sent)
    least = 1 - best / total  # γ0
    return {
        "kept": kept,
        "best": best,
        "missed": missed,
        "left": float(1 - kept / total),
        "bound": float(missed + (1 - missed) * least),
    }


# -- convergence ---------------------------------------------------------------------------------


def convergence(method: Settings, world_size: int, seed: int, lengths: Sequence[int], rate: float) -> dict[str, Any]:
    """The mean of ‖∇f‖² over trainings of T steps at the constant learning rate ``rate``/√T, as the theorem has it.

    A net of two layers on scikit-learn's digits, 8 examples per rank and step, no momentum; ∇f is of all examples, at
    every tenth step.

    Returns:
        ``squares``: the mean for each T.
    """
    x, y, *_ = load()
    squares = []
    for steps in lengths:
        net, w = Loopback(plan_of(method), world_size, min_elements=100), workers.initial(seed)
        random, found = np.random.default_rng(seed), []
        step_size = np.float32(rate / np.sqrt(steps))
        for step in range(steps):
            if step % 10 == 0:
                found.append(sum(float(np.vdot(g, g)) for g in loss_and_gradient(w, x, y)[1].values()))
            batches = random.integers(0, len(x), size=(world_size, workers.BATCH))
            mean = net.allreduce_many([loss_and_gradient(w, x[rows], y[rows])[1] for rows in batches])[0]
            for name in w:
                w[name] = w[name] - step_size * mean[name]
        squares.append(statistics.fmean(found))
    return {"squares": squares}


def slope(lengths: Sequence[float], squares: Sequence[float]) -> float:
    """The exponent of a power law, fitted: −0.5 for 1/√T.

    >>> round(slope([1, 4, 16], [1, 0.5, 0.25]), 6)
    -0.5
    """
    return float(np.polyfit(np.log(lengths), np.log(squares), 1)[0])


# -- bytes ---------------------------------------------------------------------------------------


def traffic(method: Settings, world_sizes: Sequence[int], seed: int, n: int) -> dict[str, Any]:
    """Bytes of one exchange of independent Normal gradients [n] by the number of ranks.

    Returns:
        ``sent``, ``wire``: bytes that the busiest rank hands to its collectives, and that it transmits on rings;
        ``union``: the share of positions in which the result is not zero, which is top-k's build-up.
    """
    sent, wire, union = [], [], []
    for world_size in world_sizes:
        net = Loopback(plan_of(method), world_size, min_elements=1)
        random = np.random.default_rng([seed, world_size])
        out = net.allreduce([random.normal(size=n).astype(np.float32) for _ in range(world_size)], "w")[0]
        sent.append(max(map(net.ledger.bytes_sent, range(world_size))))
        wire.append(max(map(net.ledger.bytes_on_wire, range(world_size))))
        union.append(np.count_nonzero(out) / n)
    return {"sent": sent, "wire": wire, "union": union}
