"""What GradiVeQ's claims need measured in a training: how slices correlate, and how long a basis lasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.papers import simulate
from experiments.report.statistics import relative_error
from experiments.training.simulate import Moment
from hvdcompress.loopback import Loopback
from hvdcompress.method import TensorSpec
from hvdcompress.ops import fast
from hvdcompress.parts import matrices
from hvdcompress.parts.matrices import Order

Matrix = np.ndarray[Any, Any]
Settings = dict[str, Any]
RATIO = 8  #: elements of a slice per component that is kept: rank n/8
ORDERS: tuple[Order, ...] = ("oihw", "hwio")
ENOUGH = 4  #: slices per vector of a basis, at least: fewer would fit well whatever they are
SAMPLES = 4096  #: slices of a spectrum, at most


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
) -> list[Settings]:
    """Train dense; meanwhile methods without feedback reduce the same gradients, in windows of Lt + Lc steps.

    Args:
        task: the training.
        ranks: simulated ones.
        seed: of the training.
        tensors: the layers that are looked at.
        starts: the first step of each window, in which all methods begin.
        dense_steps: Lt.
        compressed_steps: Lc.
        every: look at one step of so many after the dense ones.
        sizes: elements of a slice, for the spectra; 0 for the method's choice.
        entries: the methods, by name.

    Returns:
        Records with the window's ``start`` and ``tensor``, of two kinds. "spectrum": what :func:`spectrum` says for an
        ``order`` and a size. "errors": for each ``entry``, and for the :func:`oracle` of each order, the ``errors``
        ‖ĝ − ḡ‖/‖ḡ‖ of the steps ``ages`` after the dense ones, and ``wire``, the compression ratio of these steps.
    """
    length = dense_steps + compressed_steps
    windows = {start: Window(start, dense_steps, range(0, compressed_steps, every), entries, ranks) for start in starts}

    def look(moment: Moment) -> list[Settings]:
        rows = []
        for start, window in windows.items():
            if start <= moment.step < start + length:
                window.step(moment, tensors)
            if moment.step == start + length - 1:
                rows += window.rows(sizes)
        return rows

    at = {step for start in starts for step in range(start, start + length)}
    return simulate.watch(task, {"method": "none"}, ranks, seed, look, at)


class Window:
    """Lt dense steps and the steps after them, in which methods see what the ranks exchange."""

    def __init__(self, start: int, dense_steps: int, ages: range, entries: Mapping[str, Settings], ranks: int):
        self.start, self.first, self.ages = start, start + dense_steps, ages
        self.nets = {name: Loopback({"min_elements": 1, **plan}, ranks) for name, plan in entries.items()}
        self.errors: dict[tuple[str, str], list[float]] = {}
        self.means: dict[str, list[Matrix]] = {}

    def step(self, moment: Moment, tensors: Sequence[str]) -> None:
        """Let every method reduce the gradients, and note its errors after the dense steps."""
        age = moment.step - self.first
        gradients = [{tensor: each[tensor] for tensor in tensors} for each in moment.gradients]
        for entry, net in self.nets.items():
            reduced = net.allreduce(gradients)[0]
            if age == 0:
                net.ledger.reset()
            for tensor in tensors if age in self.ages else ():
                wanted = moment.reduced[tensor]
                self.errors.setdefault((entry, tensor), []).append(relative_error(reduced[tensor], wanted))
        for tensor in tensors if age >= 0 else ():
            self.means.setdefault(tensor, []).append(moment.reduced[tensor].copy())

    def rows(self, sizes: Sequence[int]) -> list[Settings]:
        """Return the records of :func:`watched`."""
        found = []
        for (entry, tensor), errors in self.errors.items():
            found.append(
                {
                    "kind": "errors",
                    "tensor": tensor,
                    "entry": entry,
                    "wire": simulate.wire_ratio(self.nets[entry]),
                    "errors": errors,
                }
            )
        for tensor, means in self.means.items():
            stack = np.stack(means)
            spec = TensorSpec(tensor, stack.shape[1:])
            for order in ORDERS:
                found.append(
                    {
                        "kind": "errors",
                        "tensor": tensor,
                        "entry": f"oracle {order}",
                        "errors": oracle(stack, spec, order)[:: self.ages.step],
                    }
                )
                for size in sizes:
                    if figures := spectrum(stack, spec, order, size):
                        place = {"kind": "spectrum", "tensor": tensor, "order": order, "default": not size}
                        found.append({**place, **figures})
        return [{"start": self.start, "ages": list(self.ages), **row} for row in found]


# -- slices --------------------------------------------------------------------------------------


def slices(stack: Matrix, spec: TensorSpec, order: Order, size: int = 0) -> Matrix:
    """Cut gradients [steps, *shape] into whole slices of ``size`` elements (0: the method's choice), in an order.

    Returns:
        [steps · slices, size] float64.
    """
    size = size or matrices.slice_for(*matrices.blocks(spec, order))
    flat = [matrices.arranged(np.ascontiguousarray(one).reshape(-1), spec, fast, order) for one in stack]
    whole = spec.size // size * size
    return np.stack([one[:whole] for one in flat]).reshape(-1, size).astype(np.float64)


def left(samples: Matrix, rank: int) -> float:
    """Return what the best basis of a rank leaves of all samples together, ‖x − UUᵀx‖/‖x‖ (Eckart & Young)."""
    gram = samples @ samples.T if len(samples) < samples.shape[1] else samples.T @ samples
    energies = np.maximum(np.linalg.eigvalsh(gram)[::-1], 0.0)  # squared singular values, descending
    return float(np.sqrt(energies[rank:].sum() / energies.sum()))


def spectrum(stack: Matrix, spec: TensorSpec, order: Order, size: int) -> Settings | None:
    """Measure how well slices fit into an eighth of their dimensions.

    Returns:
        ``size``: elements of a slice; ``convolution``: whether the layer is one; ``samples``: how many slices, of steps
        spread evenly; ``error``: of the best basis of rank size/8; ``control``: the same after the elements of each
        slice are shuffled: the part that the number of samples and the spread of magnitudes alone explain. None if a
        slice does not fit into the layer, or if there are fewer slices than :data:`ENOUGH` times the basis's vectors.
    """
    size = size or matrices.slice_for(*matrices.blocks(spec, order))
    rank = max(1, size // RATIO)
    if size > spec.size:
        return None
    stride = -(-len(stack) * (spec.size // size) // SAMPLES)
    samples = slices(stack[::stride], spec, order, size)
    if len(samples) < ENOUGH * rank or not samples.any():
        return None
    shuffled = np.random.default_rng(0).permuted(samples, axis=1)
    return {
        "size": size,
        "convolution": len(spec.shape) == 4,
        "samples": len(samples),
        "error": left(samples, rank),
        "control": left(shuffled, rank),
    }


def oracle(stack: Matrix, spec: TensorSpec, order: Order) -> list[float]:
    """Return the error of each step with the best basis of rank size/8 for all of them, which no method can know."""
    samples = slices(stack, spec, order)
    _, vectors = np.linalg.eigh(samples.T @ samples)
    basis = vectors[:, -max(1, samples.shape[1] // RATIO) :]
    projected = samples @ basis @ basis.T
    steps = len(stack)
    return [relative_error(y, x) for y, x in zip(projected.reshape(steps, -1), samples.reshape(steps, -1), strict=True)]
