"""What ScaleCom's claims need measured: how alike residuals are and what a leader selects, convergence, bytes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from experiments.papers import simulate
from experiments.training.numpy_digits import load, loss_and_gradient
from experiments.training.simulate import Moment
from hvdcompress.loopback import Loopback
from hvdcompress.parts import select
from hvdcompress.plan import plan_of

Vector = np.ndarray[Any, Any]
Settings = dict[str, Any]
LEAST = 1000  #: elements of a tensor that is looked at; smaller ones are sent uncompressed, or nearly
BATCH, HIDDEN = 8, 64  #: of the net on digits


def likeness(task: Settings, method: Settings, ranks: int, seed: int, samples: int = 10) -> list[Settings]:
    """Train with ScaleCom, and compare the ranks' residuals and selections at some steps.

    Returns:
        Of each step: ``distance`` of the residuals of all tensors joined; ``share`` of the best energy that the leader
        selects; ``tensors``: what :func:`contraction` says of each.
    """

    def look(moment: Moment) -> list[Settings]:
        names = [name for name, g in moment.reduced.items() if g.size >= LEAST]
        tensors = [moment.accumulated(rank) for rank in range(ranks)]
        means = {name: np.mean([each[name] for each in tensors], axis=0, dtype=np.float64).ravel() for name in names}
        parts = {name: contraction(means[name], moment.reduced[name].ravel(), method["density"]) for name in names}
        kept = {name: part for name, part in parts.items() if part is not None}
        memories = [np.concatenate([m[name].ravel() for name in names]) for m in moment.residuals]
        if not kept or not all(memory.any() for memory in memories):
            return []
        best = sum(part["best"] for part in kept.values())
        share = sum(part["kept"] for part in kept.values()) / best if best else 1.0
        return [{"distance": distance(memories), "share": share, "tensors": kept}]

    return simulate.watch(task, method, ranks, seed, look, simulate.spread_out(task["steps"], samples))


def distance(memories: Sequence[Vector]) -> float:
    """Return the mean cosine distance between ranks' residuals, over pairs: 0 for one direction, 1 for random ones.

    >>> distance([np.array([1.0, 0]), np.array([0, 1.0]), np.array([2.0, 0])])
    0.6666666666666666
    """
    units = [m / np.linalg.norm(m) for m in (m.astype(np.float64) for m in memories)]
    return statistics.fmean(1 - float(a @ b) for a, b in combinations(units, 2))


def contraction(mean: Vector, reduced: Vector, density: float) -> dict[str, float] | None:
    """Return what the leader's selection keeps of the ranks' mean, the best one, and the bound of the paper's Lemma 1.

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


def convergence(method: Settings, world_size: int, seed: int, lengths: Sequence[int], rate: float) -> list[Settings]:
    """Return the mean of ‖∇f‖² over trainings of T steps at the constant learning rate ``rate``/√T, as in Theorem 1.

    A net of two layers on scikit-learn's digits, 8 examples per rank and step, no momentum; ∇f is of all examples, at
    every tenth step.
    """
    x, y, *_ = load()
    rows = []
    for steps in lengths:
        draw = np.random.default_rng(seed).normal
        w = {
            "fc1.weight": (draw(size=(64, HIDDEN)) / 8).astype(np.float32),
            "fc1.bias": np.zeros(HIDDEN, np.float32),
            "fc2.weight": (draw(size=(HIDDEN, 10)) / 8).astype(np.float32),
            "fc2.bias": np.zeros(10, np.float32),
        }
        net, random, found = Loopback(plan_of(method), world_size, min_elements=100), np.random.default_rng(seed), []
        for step in range(steps):
            if step % 10 == 0:
                found.append(sum(float(np.vdot(g, g)) for g in loss_and_gradient(w, x, y)[1].values()))
            batches = random.integers(0, len(x), size=(world_size, BATCH))
            mean = net.allreduce([loss_and_gradient(w, x[some], y[some])[1] for some in batches])[0]
            w = {name: value - np.float32(rate / np.sqrt(steps)) * mean[name] for name, value in w.items()}
        rows.append({"T": steps, "square": statistics.fmean(found)})
    return rows


def traffic(method: Settings, world_sizes: Sequence[int], seed: int, n: int) -> list[Settings]:
    """Exchange independent Normal gradients [n] among more and more ranks.

    Returns:
        By ``ranks``: ``sent`` and ``wire``, bytes that the busiest rank hands to its collectives, and that it transmits
        on rings; ``union``, the share of positions in which the result is not zero, which is top-k's build-up.
    """
    rows = []
    for world_size in world_sizes:
        net = Loopback(plan_of(method), world_size, min_elements=1)
        random = np.random.default_rng([seed, world_size])
        out = net.allreduce([random.normal(size=n).astype(np.float32) for _ in range(world_size)], "w")[0]
        sent, wire = (max(map(of, range(world_size))) for of in (net.ledger.bytes_sent, net.ledger.bytes_on_wire))
        rows.append({"ranks": world_size, "sent": sent, "wire": wire, "union": np.count_nonzero(out) / n})
    return rows
