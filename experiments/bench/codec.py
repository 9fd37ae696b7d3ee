"""``python -m experiments codec``: what a rank computes in a step, in copies of its gradient.

Methods run in a process with one thread. A copy of the gradient is timed before each step; times are counted in
such copies, because these carry over from machine to machine, and from a quiet minute to a busy one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest import mock

import pandas as pd

from experiments import nets
from experiments.bench.lockstep import PARTS, device, time_steps
from hvdcompress import registry
from hvdcompress.method import TensorSpec
from hvdcompress.plan import BY_NAME, Plan, load_plan, settings_of

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
        usual = {"density": DENSITY} if "density" in registry.get_method(id).hyperparameters() else {}
        found[" ".join([id, *pairs])] = plan = {"method": id, **usual, **SETTINGS.get(id, {}), **settings_of(pairs)}
        load_plan(plan)
    return found


def run(
    methods: Mapping[str, Mapping[str, Any]], shapes: nets.Shapes, world_size: int, runs: int, device: str
) -> pd.DataFrame:
    """Measure every method, one after the other, in a process with one thread.

    Args:
        methods: plans by label.
        shapes: of the tensors.
        world_size: ranks in lockstep.
        runs: steps that are measured.
        device: "cpu" or "cuda".

    Returns:
        One record per method, medians of the runs: ``copies`` and ``seconds`` of a step, and copies of each part.

    Raises:
        ValueError: the device is missing, or a method sends the tensor dense.
    """
    one = partial(measure, shapes=shapes, world_size=world_size, runs=runs, where=device)
    environment = mock.patch.dict(os.environ, dict.fromkeys(ONE_THREAD, "1"))
    with environment, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        frame = pd.DataFrame(pool.map(one, methods.values()))
    frame.insert(0, "method", list(methods))
    return frame


def measure(
    settings: Mapping[str, Any], shapes: nets.Shapes, world_size: int, runs: int, where: str
) -> dict[str, float]:
    """Measure one method in this thread; :func:`run` has the arguments and the record."""
    plan, specs = load_plan(settings), [TensorSpec(name, shape) for name, shape in shapes.items()]
    check(plan, specs)
    steps = time_steps(plan, specs, world_size, runs, device=device(where))
    parts = steps[list(PARTS)].assign(copies=steps[list(PARTS)].sum(axis=1))
    return {**parts.div(steps["copy"], axis=0).median(), "seconds": parts["copies"].median()}


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
