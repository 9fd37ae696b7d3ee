"""``python -m experiments codec``: what a rank computes in a step, in copies of its gradient.

Each method runs in a process of its own with one thread. A copy of the gradient is timed before each step; times are
counted in such copies, because these carry over from machine to machine, and from a quiet minute to a busy one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any
from unittest import mock

import pandas as pd

from experiments import nets
from experiments.bench.devices import device
from experiments.bench.lockstep import PARTS, draw, time_steps
from hvdcompress import registry
from hvdcompress.method import TensorSpec
from hvdcompress.plan import BY_NAME, Plan, load, settings_of

__all__ = ["PARTS", "measure", "plans", "run"]

DENSITY = 0.01  #: of every method that has one, unless its own is given
#: GradiVeQ's usual 8 components of 100, on any tensor
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "gradiveq": {"paper": True, "tensors": "all", "slice_elements": 768, "matrix_rank": 96, "dense_steps": 97},
}
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "HVDCOMPRESS_THREADS")


def plans(words: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Read methods as a user names them, such as "topk" or "topk density=0.001 values=fp16"; all methods for none.

    Returns:
        Plans by label.

    Raises:
        ValueError: there is no such method, or a setting is unknown or wrong.
    """
    found = {}
    for text in words or registry.available():
        id, *pairs = text.replace(",", " ").split() or [""]
        usual = {"density": DENSITY} if "density" in registry.get(id).hyperparameters() else {}
        found[" ".join([id, *pairs])] = plan = {"method": id, **usual, **SETTINGS.get(id, {}), **settings_of(pairs)}
        load(plan)
    return found


def run(
    methods: Mapping[str, Mapping[str, Any]], shapes: nets.Shapes, world_size: int, runs: int, device: str
) -> pd.DataFrame:
    """Measure every method, one after the other, each in a process of its own.

    Args:
        methods: plans by label.
        shapes: of the tensors.
        world_size: ranks in lockstep.
        runs: steps that are measured.
        device: "cpu" or "cuda".

    Returns:
        One record per method, medians of the runs: ``copies`` and ``seconds`` of a step, and copies of each part.

    Raises:
        ValueError: the device is missing, a method sends the tensor dense, or memory did not suffice.
    """
    records = []
    with mock.patch.dict(os.environ, dict.fromkeys(ONE_THREAD, "1")):
        for label, plan in methods.items():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                try:
                    figures = pool.submit(measure, plan, shapes, world_size, runs, device).result()
                except BrokenProcessPool:
                    raise ValueError(
                        "the measuring process ended, perhaps out of memory: try a smaller --set"
                    ) from None
            records.append({"method": label, **figures})
    return pd.DataFrame(records)


def measure(
    settings: Mapping[str, Any], shapes: nets.Shapes, world_size: int, runs: int, where: str
) -> dict[str, float]:
    """Measure one method in this thread; :func:`run` has the arguments and the record."""
    plan, at, specs = load(settings), device(where), [TensorSpec(name, shape) for name, shape in shapes.items()]
    check(plan, specs)
    n = nets.total(shapes)
    x, to = at.array(draw(n, 1)[0]), at.empty(n)
    copies: list[float] = []

    def copy() -> None:
        copies.append(at.timed(to.__setitem__, slice(None), x)[1])

    parts = pd.DataFrame(time_steps(plan, specs, world_size, runs, device=at, before=copy))
    whole = parts.sum(axis=1)
    in_copies = parts.assign(copies=whole).div(copies[-runs:], axis=0).median()
    return {**in_copies, "seconds": whole.median()}


def check(plan: Plan, specs: Sequence[TensorSpec]) -> None:
    """Refuse tensors that are all sent uncompressed under the plan: the figures would not be those of the method.

    Raises:
        ValueError: no tensor is compressed.
    """
    if all(bucket.program.main != plan.program.main for bucket in plan.buckets(specs, BY_NAME)):
        raise ValueError(
            f"{plan.program.main.id} sends these tensors dense, so the figures would not be its own: give larger "
            f"ones, or the method a smaller min_elements (now {plan.min_elements})"
        )
