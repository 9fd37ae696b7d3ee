"""AlexNet's exchange: codecs timed on this machine, the rest by the fitted cost model; and FFT's primitives alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy.fft

from experiments import nets
from experiments.bench.devices import device
from experiments.bench.lockstep import PARTS, time_steps
from experiments.cluster.rates import Rate
from experiments.cost_model import model
from experiments.cost_model.fitted import Fitted
from hvdcompress.method import Context, Sparse, TensorSpec, Workspace
from hvdcompress.methods.fft import FFT
from hvdcompress.ops import fast
from hvdcompress.ops.vectors import Spectra
from hvdcompress.parts import pack, select
from hvdcompress.plan import load

Settings = dict[str, Any]
FEW, MANY = 2, 8  #: ranks that codecs are timed with
WARM = 2  #: steps before the first that counts: buffers are made, kernels compiled, thresholds learned


# -- on this machine -----------------------------------------------------------------------------


def codecs(net: str, small: str, methods: Mapping[str, Settings], seed: int, runs: int) -> dict[str, Any]:
    """Time a rank's side of an exchange on one core, method by method.

    Args:
        net: in :data:`experiments.nets.NETS`; two ranks exchange its tensors.
        small: one of its tensors, which two and eight ranks exchange: what a further rank costs.
        methods: plans by label.
        seed: of the gradients.
        runs: steps that count.

    Returns:
        By label ``seconds`` of the net's tensors, ``parts`` of it, and ``further``: seconds that each further rank
        adds; medians of the runs.
    """
    shapes = nets.get(net)
    one = {small: shapes[small]}
    found = {}
    for label, method in methods.items():
        whole = sides(method, shapes, FEW, seed, runs)
        few, many = (
            statistics.median(run["seconds"] for run in sides(method, one, p, seed, runs)) for p in (FEW, MANY)
        )
        share = nets.total(one) / nets.total(shapes)
        found[label] = {
            "seconds": statistics.median(run["seconds"] for run in whole),
            "parts": {part: statistics.median(run["parts"][part] for run in whole) for part in PARTS},
            "further": max(many - few, 0.0) / (MANY - FEW) / share,
        }
    return found


def sides(method: Settings, shapes: nets.Shapes, world_size: int, seed: int, runs: int) -> list[Settings]:
    """A rank's seconds in each run, and those of the run's parts."""
    specs = [TensorSpec(name, shape) for name, shape in shapes.items()]
    spent = time_steps(load(method), specs, world_size, runs, WARM, seed=seed)
    each = [dict(zip(spent, one, strict=True)) for one in zip(*spent.values(), strict=True)]
    return [{"seconds": sum(parts.values()), "parts": parts} for parts in each]


def primitives(n: int, density: float, seed: int, rounds: int) -> dict[str, Any]:
    """Time what FFT's codec is made of, on n Laplace-distributed elements and one core.

    Args:
        n: elements.
        density: share of the frequencies that are kept.
        seed: of the elements.
        rounds: at least 1; one more is not timed.

    Returns:
        ``seconds`` of the thread for each primitive: medians of the rounds, in which they take turns.
    """
    at, method, x = device("cpu"), FFT(density=density), np.random.default_rng(seed).laplace(size=n).astype(np.float32)
    spec = TensorSpec("x", (n,))
    block, k, packing = method.block_length(n), method.num_kept(spec), method.packing(spec)
    whole, out = x[: n // block * block].reshape(-1, block), np.empty_like(x)
    spectrum = scipy.fft.rfft(whole)
    strengths = np.abs(spectrum).ravel()

    def fresh() -> tuple[Context, Workspace]:
        return Context(0, 1, 0, spec), Workspace(fast)

    kept = fast.largest_frequencies(x, block, k)
    payload = pack.encode(Sparse(*kept), packing, *fresh())
    waves = Spectra([kept], n, block, 1.0, 1.0, float(np.finfo(np.float32).max))
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: np.copyto(out, x),
        "rfft": lambda: scipy.fft.rfft(whole),
        "irfft": lambda: scipy.fft.irfft(spectrum, block),
        "selection": lambda: select.largest(strengths, [min(k, strengths.size)], *fresh()),
        "rfft and selection, in pieces": lambda: fast.largest_frequencies(x, block, k),
        "packing": lambda: pack.encode(Sparse(*kept), packing, *fresh()),
        "unpacking": lambda: pack.decode(payload, k, packing, fast),
        "sum and irfft, in pieces": lambda: fast.write(out, waves, 1.0),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            _, seconds = at.timed(call)
            if number:  # in the first round kernels are compiled
                found[name].append(seconds)
    return {"seconds": {name: statistics.median(each) for name, each in found.items()}}


# -- by the model --------------------------------------------------------------------------------


def fitted() -> Fitted:
    """The cost model as it was fitted to Horovod's exchanges."""
    return Fitted.open("horovod")


def exchanges(
    net: str, timed: Mapping[str, tuple[Settings, Settings]], rates: Sequence[str], world_size: int, faster: float
) -> dict[str, dict[str, float]]:
    """Predict an exchange of a net's tensors.

    Args:
        net: whose tensors.
        timed: by method's label its plan, and what :func:`codecs` found.
        rates: of the links.
        world_size: ranks.
        faster: codecs take so many times less than here.

    Returns:
        Seconds by rate and label, with ``none`` for stock Horovod.
    """
    shapes, constants = nets.get(net), fitted().constants
    works = {"none": model.stock(shapes, world_size)}
    for label, (method, found) in timed.items():
        seconds = found["seconds"] + (world_size - FEW) * found["further"]
        works[label] = model.work(load(method), shapes, world_size)._replace(codec=seconds / faster)
    frame = pd.DataFrame([work._asdict() for work in works.values()], list(works)).assign(shared=1.0)
    return {
        rate: model.costs(constants, frame.assign(rate=Rate.parse(rate).slower)).sum(axis=1).to_dict() for rate in rates
    }
