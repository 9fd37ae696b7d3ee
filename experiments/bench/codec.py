"""``python -m experiments bench codec``: what a rank computes in a step, in copies of its gradient.

For each method, in a process of its own with one thread, the method and other implementations of it (:func:`peers`)
take turns. A copy of the gradient is timed before each turn; times are counted in such copies, because these carry over
from machine to machine, and from a quiet minute to a busy one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd

from experiments import nets
from experiments.bench.devices import Cpu, device
from experiments.bench.lockstep import PARTS, draw, time_steps
from hvdcompress import registry
from hvdcompress.method import Method, TensorSpec
from hvdcompress.parts import select
from hvdcompress.plan import BY_NAME, Plan, load, settings_of

__all__ = ["PARTS", "plans", "ddp_powersgd", "grace_topk", "measure", "run", "tensors_of"]

DENSITY = 0.01  #: of every method that has one, unless its own is given
#: GradiVeQ's usual 8 components of 100, on any tensor
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "gradiveq": {"paper": True, "tensors": "all", "slice_elements": 768, "matrix_rank": 96, "dense_steps": 97},
}
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "HVDCOMPRESS_THREADS")
Call = Callable[[Any], Any]


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


def tensors_of(net: str | None, elements: int) -> nets.Shapes:
    """Return the tensors of a net, or a nearly square matrix of so many elements, or a few less.

    >>> tensors_of(None, 25_000_000)
    {'w': (5000, 5000)}
    """
    rows = math.isqrt(elements)
    return nets.get(net) if net else {"w": (rows, elements // max(rows, 1))}


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
        One record per method and per other implementation: ``copies`` (median), ``least`` (shortest run in shortest
        copies), ``seconds`` (median), and for methods copies of each part.

    Raises:
        ValueError: the device is missing, a method sends the tensor dense, or memory did not suffice.
    """
    records = []
    with mock.patch.dict(os.environ, dict.fromkeys(ONE_THREAD, "1")):
        for label, plan in methods.items():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                try:
                    records += pool.submit(measure, label, plan, shapes, world_size, runs, device).result()
                except BrokenProcessPool:
                    raise ValueError("the measuring process ended, perhaps out of memory: try fewer elements") from None
    return pd.DataFrame(records)


def measure(
    label: str, settings: Mapping[str, Any], shapes: nets.Shapes, world_size: int, runs: int, where: str
) -> list[dict[str, Any]]:
    """Measure one method and its peers in this thread; :func:`run` has the arguments and the records."""
    plan, at, specs = load(settings), device(where), [TensorSpec(name, shape) for name, shape in shapes.items()]
    check(plan, specs, label)
    n = sum(spec.size for spec in specs)
    x, to = at.array(draw(n, 1)[0]), at.empty(n)
    others = peers(plan.program.main, specs[0], world_size, at) if len(specs) == 1 else {}
    seconds: dict[str, list[float]] = {name: [] for name in ("copy", *others)}

    def turn() -> None:
        seconds["copy"].append(at.timed(to.__setitem__, slice(None), x)[1])
        for name, call in others.items():
            seconds[name].append(at.timed(call, x)[1])

    parts = pd.DataFrame(time_steps(plan, specs, world_size, runs, device=at, before=turn))
    taken = pd.DataFrame({name: each[-runs:] for name, each in seconds.items()}).assign(ours=parts.sum(axis=1))
    copies = taken.div(taken["copy"], axis=0).median()
    least = taken.min() / taken["copy"].min()
    found = [
        {"method": label, "peer": name, "copies": copies[name or "ours"], "least": least[name or "ours"]}
        | {"seconds": taken[name or "ours"].median()}
        for name in (None, *others)
    ]
    found[0] |= parts.div(taken["copy"], axis=0).median().to_dict()
    return found


def check(plan: Plan, specs: Sequence[TensorSpec], label: str) -> None:
    """Refuse tensors that are all sent uncompressed under the plan: the figures would not be those of the method.

    Raises:
        ValueError: no tensor is compressed.
    """
    if all(bucket.program.main != plan.program.main for bucket in plan.buckets(specs, BY_NAME)):
        raise ValueError(
            f"{label} sends these tensors dense, so the figures would not be its own: give more --elements, or the "
            f"method a smaller min_elements (now {plan.min_elements})"
        )


# -- other implementations ----------------------------------------------------------------------------------


def peers(method: Method, spec: TensorSpec, world_size: int, at: Cpu) -> dict[str, Call]:
    """Return other implementations of a method: the arithmetic of a step on a rank's gradient [n], by name.

    What other packages do is written here after what they published, in a few lines of PyTorch. None without PyTorch.
    """
    try:
        import torch
    except ImportError:
        return {}
    if type(at) is Cpu:
        torch.set_num_threads(1)
    any_method: Any = method
    calls: dict[str, Callable[[Any], Any]] = {}
    if method.id == "topk":
        k = select.num_kept(any_method.density, spec.size)
        calls["top-k as GRACE publishes it"] = grace_topk(torch, k, world_size)
        calls["torch.topk of |x|"] = lambda x: torch.topk(x.abs(), k, sorted=False)
    elif method.id in ("fp16", "bf16"):
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[method.id]
        calls[f"{dtype} and back to float32"] = lambda x: x.to(dtype).to(torch.float32)
    elif method.id == "powersgd":
        rows, columns = any_method.matrix(spec)
        first = torch.as_tensor(at.array(np.random.default_rng(0).standard_normal((columns, any_method.matrix_rank))))
        calls["PowerSGD's arithmetic in DDP's hook"] = ddp_powersgd(torch, (rows, columns), first.float())

    def on_tensors(call: Call) -> Call:
        return lambda x: call(torch.as_tensor(x))

    return {name: on_tensors(call) for name, call in calls.items()}


def grace_topk(torch: Any, k: int, world_size: int) -> Callable[[Any], Any]:
    """Return a step of top-k with a residual as in Xu et al., "GRACE", ICDCS 2021, §4.

    Compensate, compress, update the memory; then decompress what every rank sent and add it up. Every rank is taken to
    have sent the same.
    """
    residual = 0.0

    def dense(like: Any, index: Any, values: Any) -> Any:
        return torch.zeros_like(like).scatter_(0, index, values)

    def step(gradient: Any) -> Any:
        nonlocal residual
        x = gradient + residual
        index = torch.topk(x.abs(), k, sorted=False).indices
        values = torch.gather(x, 0, index)
        residual = x - dense(x, index, values)
        return sum(dense(x, index, values) for _ in range(world_size)) / world_size

    return step


def ddp_powersgd(torch: Any, shape: tuple[int, int], q: Any) -> Callable[[Any], Any]:
    """Return the arithmetic of one matrix in PyTorch's powerSGD_hook.py, with error feedback and warm start.

    Args:
        torch: the module.
        shape: rows and columns.
        q: the first right factor [columns × r].
    """
    error: Any = 0.0

    def step(gradient: Any) -> Any:
        nonlocal q, error
        x = gradient.view(shape) + error
        p = torch.linalg.qr(x @ q).Q
        q = x.t() @ p
        total = p @ q.t()
        error = x - total
        return total

    return step
