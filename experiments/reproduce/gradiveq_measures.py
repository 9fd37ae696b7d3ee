"""What GradiVeQ's claims need measured: how slices correlate, how long a basis lasts, and what quantizing adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from experiments.reproduce import simulate
from experiments.reproduce.simulate import Moment
from hvdcompress.loopback import Loopback
from hvdcompress.method import TensorSpec
from hvdcompress.ops import fast
from hvdcompress.parts import matrices
from hvdcompress.parts.matrices import Order

Matrix = np.ndarray[Any, Any]
Settings = dict[str, Any]
RATE = 8  #: elements of a slice per value that is kept: rank n/8
ORDERS: tuple[Order, ...] = ("oihw", "hwio")
PLACES = 33  #: of a spectrum, evenly over the share of components
ENOUGH = 4  #: slices per vector of a basis, at least: fewer would fit well whatever they are
SAMPLES = 4096  #: slices of a spectrum, at most
#: of each ratio: (name, elements per value of GradiVeQ or 0, bits of QSGD or 0); QSGD has no single bit
MIXES: dict[int, list[tuple[str, float, int]]] = {
    8: [("gradiveq 8x", 8.0, 0), ("qsgd4", 0, 4), ("gradiveq 2x, qsgd8", 2.0, 8)],
    16: [("gradiveq 16x", 16.0, 0), ("qsgd2", 0, 2), ("gradiveq 4x, qsgd8", 4.0, 8), ("gradiveq 2x, qsgd4", 2.0, 4)],
    32: [("gradiveq 32x", 32.0, 0), ("gradiveq 8x, qsgd8", 8.0, 8), ("gradiveq 4x, qsgd4", 4.0, 4)],
}


@dataclass
class Window:
    """Lt + Lc steps of a training, in which methods that begin with it see what the ranks exchange.

    Attributes:
        start: its first step.
        nets: each entry's simulated ranks.
        errors: of each entry, for each tensor, ‖ĝ − ḡ‖/‖ḡ‖ at the steps that are looked at.
        ages: these steps, counted from the end of the dense ones.
        means: what the dense exchange gave in all steps after the dense ones, for each tensor.
    """

    start: int
    nets: dict[str, Loopback]
    errors: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    ages: list[int] = field(default_factory=list)
    means: dict[str, list[Matrix]] = field(default_factory=dict)


def watched(
    task: Settings,
    ranks: int,
    seed: int,
    tensors: Sequence[str],
    starts: Sequence[int],
    dense_steps: int,
    compressed_steps: int,
    every: int,
    sizes: Sequence[int],
    entries: Mapping[str, Settings],
) -> dict[str, Any]:
    """Train dense, and let methods reduce the same gradients meanwhile, without feedback, in windows of a training.

    Args:
        task: the training.
        ranks: simulated ones.
        seed: of the training.
        tensors: the layers that are looked at.
        starts: each window's first step.
        dense_steps: Lt; what follows them is looked at.
        compressed_steps: Lc.
        every: look at one step of so many.
        sizes: elements of a slice, for the spectra; 0 for the method's choice.
        entries: the methods, by name.

    Returns:
        ``spectra``: for each window, tensor, order and size what :func:`spectrum` says; ``carried``: for each window,
        tensor and entry the errors by age, with the oracle's; ``rates``: of each entry in its compressed steps of the
        last window, by bytes on the wire.
    """
    run = simulate.run_of(task, {"method": "none"}, ranks, seed)
    length = dense_steps + compressed_steps
    open_: dict[int, Window] = {}
    spectra: list[Settings] = []
    carried: list[Settings] = []
    rates: dict[str, float] = {}

    def look(moment: Moment) -> None:
        for start in starts:
            if not start <= moment.step < start + length:
                continue
            if moment.step == start:
                nets = {
                    name: Loopback({"min_elements": 1, **entry}, world_size=ranks) for name, entry in entries.items()
                }
                open_[start] = Window(start, nets)
            age = moment.step - start - dense_steps
            _step(open_[start], moment, tensors, age, every)
            if age == 0:
                for net in open_[start].nets.values():
                    net.ledger.reset()
            if moment.step == start + length - 1:
                _close(open_.pop(start))

    def _close(window: Window) -> None:
        rates.update({name: simulate.wire_rate(net) for name, net in window.nets.items()})
        for tensor in tensors:
            stack = np.stack(window.means[tensor])
            spec = TensorSpec(tensor, stack.shape[1:])
            place = {"start": window.start, "tensor": tensor}
            for order in ORDERS:
                for size in sizes:
                    found = spectrum(stack, spec, order, size)
                    if found:
                        spectra.append({**place, "order": order, "default": not size, **found})
            for name, errors in window.errors.items():
                carried.append({**place, "entry": name, "ages": window.ages, "errors": errors[tensor]})
            for order in ORDERS:
                best = oracle(stack, spec, order)[::every]
                carried.append({**place, "entry": f"oracle {order}", "ages": window.ages, "errors": best})

    at = {step for start in starts for step in range(start, min(start + length, run.task.steps))}
    simulate.train(run, look, at, until=max(at) + 1)
    return {"spectra": spectra, "carried": carried, "rates": rates}


def _step(window: Window, moment: Moment, tensors: Sequence[str], age: int, every: int) -> None:
    """Let every entry reduce this step's gradients; in steps that are looked at, note how far off they are."""
    gradients = [{name: one[name] for name in tensors} for one in moment.gradients]
    seen = age >= 0 and age % every == 0
    if seen:
        window.ages.append(age)
    for name in tensors if age >= 0 else ():
        window.means.setdefault(name, []).append(moment.reduced[name].copy())
    for entry, net in window.nets.items():
        out = net.allreduce_many(gradients)[0]
        for name in tensors if seen else ():
            errors = window.errors.setdefault(entry, {}).setdefault(name, [])
            errors.append(relative(out[name] - moment.reduced[name], moment.reduced[name]))


def relative(error: Matrix, of: Matrix) -> float:
    """‖error‖/‖of‖; NaN for a zero vector."""
    norm = float(np.linalg.norm(of))
    return float(np.linalg.norm(error)) / norm if norm else float("nan")


# -- slices --------------------------------------------------------------------------------------


def slices(stack: Matrix, spec: TensorSpec, order: Order, size: int = 0) -> Matrix:
    """All slices of gradients.

    Args:
        stack: gradients in stored order, [steps, *shape].
        spec: the tensor.
        order: how its weights lie.
        size: elements of a slice; 0 for the method's choice.

    Returns:
        [steps · slices, size] float64; what fills no slice is left out.
    """
    size = size or matrices.slice_for(*matrices.blocks(spec, order))
    flat = [matrices.arranged(np.ascontiguousarray(one).reshape(-1), spec, fast, order) for one in stack]
    whole = spec.size // size * size
    return np.stack([one[:whole] for one in flat]).reshape(-1, size).astype(np.float64)


def energies(samples: Matrix) -> Matrix:
    """The squared singular values of samples [m, size], descending, min(m, size) of them."""
    gram = samples @ samples.T if len(samples) < samples.shape[1] else samples.T @ samples
    return np.maximum(np.linalg.eigvalsh(gram)[::-1], 0.0)


def left(found: Matrix, rank: int) -> float:
    """‖x − UUᵀx‖/‖x‖ over all samples, of the best basis of a rank, from their energies; NaN without any."""
    total = float(found.sum())
    return float(np.sqrt(max(found[rank:].sum(), 0.0) / total)) if total else float("nan")


def spectrum(stack: Matrix, spec: TensorSpec, order: Order, size: int) -> Settings | None:
    """How well slices of gradients fit into few dimensions.

    Returns:
        ``size``: elements of a slice; ``convolution``: whether the layer is one; ``samples``: how many slices, of steps
        that are evenly spread and at most :data:`SAMPLES` in all; ``error``: of the best basis of rank size/8;
        ``control``: the same for slices whose elements are shuffled, each slice otherwise: what the count of samples
        and the spread of magnitudes alone explain; ``energy``: the share of energy in the first components, at
        :data:`PLACES` ranks. None where a slice does not fit, or there are too few of them to tell: not :data:`ENOUGH`
        times as many as a basis has vectors.
    """
    size = size or matrices.slice_for(*matrices.blocks(spec, order))
    rank = max(1, size // RATE)
    if size > spec.size:
        return None
    stride = -(-len(stack) * (spec.size // size) // SAMPLES)
    samples = slices(stack[::stride], spec, order, size)
    if len(samples) < ENOUGH * rank or not samples.any():
        return None
    shuffled = np.random.default_rng(0).permuted(samples, axis=1)
    found = energies(samples)
    ranks = np.linspace(0, size // 2, PLACES).astype(int)
    summed = np.concatenate([[0.0], found.cumsum()]) / found.sum()
    return {
        "size": size,
        "convolution": len(spec.shape) == 4,
        "samples": len(samples),
        "error": left(found, rank),
        "control": left(energies(shuffled), rank),
        "ranks": (ranks / size).tolist(),
        "energy": summed[np.minimum(ranks, len(found))].round(6).tolist(),
    }


def oracle(stack: Matrix, spec: TensorSpec, order: Order) -> list[float]:
    """Each step's error by the best basis of rank size/8 for all of these steps, which no method could know."""
    samples = slices(stack, spec, order)
    rank = max(1, samples.shape[1] // RATE)
    _, vectors = np.linalg.eigh(samples.T @ samples)
    basis = vectors[:, -rank:]
    rest = samples - samples @ basis @ basis.T
    steps = len(stack)
    return [relative(r, x) for r, x in zip(rest.reshape(steps, -1), samples.reshape(steps, -1), strict=True)]
