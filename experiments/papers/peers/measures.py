"""What the claims of the newer methods need measured: errors of number formats, and values that sparse methods send."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.papers import simulate
from experiments.training.experiment import Task
from experiments.training.simulate import Moment, Simulation
from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec, Workspace
from hvdcompress.ops import fast
from hvdcompress.parts import rotation
from hvdcompress.parts.levels import BLOCK, LevelCodec
from hvdcompress.parts.select import num_kept

Vector = np.ndarray[Any, Any]
LEAST = 1000  #: elements of a tensor whose errors are looked at
DRAWS = 8  #: encodings at random, over which squared errors are averaged
SETTLED = 20  #: exchanges after which values are counted: thresholds and regions follow from earlier steps
DENSE = {"method": "none"}
Settings = dict[str, Any]


def encoded(task: Settings, ranks: int, seed: int, samples: int = 12) -> list[Settings]:
    """Train dense, and encode the gradient of one rank (in turns) at some steps, each tensor by itself.

    Returns:
        What :func:`errors` says, with ``step``, ``phase`` and ``tensor``.
    """

    def look(moment: Moment) -> list[Settings]:
        gradients = {name: g.ravel() for name, g in moment.gradients[moment.step % ranks].items() if g.size >= LEAST}
        return [{"tensor": name, "n": len(g), **errors(g, moment.step)} for name, g in gradients.items() if g.any()]

    return simulate.watch(task, DENSE, ranks, seed, look, simulate.spread_out(task["steps"], samples))


def errors(x: Vector, step: int) -> dict[str, float]:
    """Return ‖C(x) − x‖²/‖x‖² of formats C.

    Args:
        x: float32 [n].
        step: selects random numbers.

    Returns:
        ``natural``, natural compression, the mean of some encodings; ``int4``, four bits in blocks; and ``rotated``,
        the same after a Hadamard transform of each block.
    """
    work = Workspace(fast)
    nearest = LevelCodec("int4")

    def place(number: int) -> Context:
        return Context(0, 1, DRAWS * step + number, TensorSpec("x", (len(x),), "float32"))

    def through(codec: LevelCodec, y: Vector, ctx: Context) -> Vector:
        return codec.decode(codec.encode(y, ctx, work), len(y), fast)

    def error(y: Vector) -> float:
        return float(np.sum((y - x.astype(np.float64)) ** 2) / np.sum(x.astype(np.float64) ** 2))

    natural = LevelCodec("natural", rounding="stochastic")
    turned = through(nearest, rotation.rotate(x, BLOCK, place(0), fast), place(0))
    return {
        "natural": float(np.mean([error(through(natural, x, place(draw))) for draw in range(DRAWS)])),
        "int4": error(through(nearest, x, place(0))),
        "rotated": error(rotation.rotate_back(turned, len(x), BLOCK, place(0), fast)),
    }


def sent(task: Settings, method: Settings, ranks: int, seed: int, steps: int = 60) -> Settings:
    """Exchange the joined gradients of a dense training's first steps by a sparse method.

    Returns:
        ``given`` and ``transmitted``: 32-bit words that the busiest rank gives to collectives and transmits if these
        are rings, in units of k and per step, once :data:`SETTLED`; ``error``, how far the sum of all results is from
        the sum of all averages, relative to that.
    """
    given = Task.model_validate({**task, "steps": steps})
    net = Loopback({**method, "optimizer_momentum": "keep", "min_elements": 1, "seed": seed}, ranks)
    whole: Vector = np.zeros(1)
    reduced: Vector = np.zeros(1)
    before: list[tuple[int, int]] = []
    for moment in Simulation(given, DENSE, ranks, seed).steps():
        joined = [np.concatenate([g.ravel() for g in gradients.values()]) for gradients in moment.gradients]
        result = net.allreduce(joined, name="joined")[0]
        whole, reduced = whole + np.mean(joined, axis=0, dtype=np.float64), reduced + result.astype(np.float64)
        if moment.step == SETTLED - 1:
            before = [(net.ledger.bytes_sent(rank), net.ledger.bytes_on_wire(rank)) for rank in range(ranks)]
    words = 4 * num_kept(method["density"], len(result)) * (steps - SETTLED)
    return {
        "given": max(net.ledger.bytes_sent(rank) - before[rank][0] for rank in range(ranks)) / words,
        "transmitted": max(net.ledger.bytes_on_wire(rank) - before[rank][1] for rank in range(ranks)) / words,
        "error": float(np.linalg.norm(reduced - whole) / np.linalg.norm(whole)),
    }
