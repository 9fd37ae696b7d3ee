"""Train contenders on tasks, each run in one process. Each result is a line of a file: the same command goes on.

Contenders of a seed are paired: they start from the same weights, and their ranks draw the same batches in the same
order.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import joblib
import torch

from experiments.momentum import remedies, tasks
from experiments.momentum.contenders import STEPS, Contender, parse
from experiments.momentum.tasks import TASKS, Task
from experiments.report import jsonl
from experiments.training.models_torch import gradients_of, held_out_sums
from hvdcompress.loopback import Loopback
from hvdcompress.optimizers import SGD

__all__ = ["run", "train", "units_of"]

EVERY = 50  #: steps between evaluations, of which every second is left out before those that are scored
SCORED = 5  #: the score is the mean of so many last evaluations
Unit = tuple[str, Task, Contender, int, int]  # the task's name and settings, contender, seed, steps


def units_of(
    names: Sequence[str],
    contenders: Sequence[str],
    seeds: Iterable[int],
    steps: int = STEPS,
    ranks: int | None = None,
    decay: bool = False,
) -> list[Unit]:
    """Return a unit of work per task, contender and seed. The seeds are the outer loop, so that pairs end early.

    Raises:
        ValueError: a task or a contender does not exist, or they do not fit together.
    """
    if unknown := [name for name in names if name not in TASKS]:
        raise ValueError(f"unknown task {unknown[0]!r}; available: {', '.join(TASKS)}")
    chosen = {
        name: replace(TASKS[name], ranks=ranks or TASKS[name].ranks, decays=decay or TASKS[name].decays)
        for name in names
    }
    return [
        (name, task, parse(contender, task), seed, steps)
        for seed in seeds
        for name, task in chosen.items()
        for contender in contenders
    ]


def run(units: Sequence[Unit], folder: Path, jobs: int = 1) -> list[str]:
    """Train what has no result yet, and append each result to ``results.jsonl`` in the folder.

    Args:
        units: what :func:`units_of` returned.
        folder: made if it does not exist.
        jobs: runs side by side, a core each.

    Returns:
        The units that failed with an exception, each with its message. They have no result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.jsonl"
    known = {record["key"] for record in jsonl.read(file)}
    left = [unit for unit in units if _key(unit) not in known]
    if len(left) < len(units):
        print(f"{len(units) - len(left)} of {len(units)} results are kept from an earlier run", flush=True)
    failed = []
    parallel = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")
    for number, record in enumerate(parallel(joblib.delayed(_record)(unit) for unit in left), 1):
        words = f"{record['task']} {record['contender']} seed {record['seed']}"
        if "error" in record:
            failed.append(f"{words}: {record['error']}")
        else:
            jsonl.append(file, record)
        print(f"[{number}/{len(left)}] {words}: {record.get('error') or record['score']}", flush=True)
    return failed


def _key(unit: Unit) -> str:
    """Return a hash of all settings of a run."""
    name, task, contender, seed, steps = unit
    text = json.dumps([name, asdict(task), asdict(contender), seed, steps], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _record(unit: Unit) -> dict[str, Any]:
    """Train once. An exception becomes part of the record, so that other runs go on."""
    name, task, contender, seed, steps = unit
    about = {"key": _key(unit), "task": name, "ranks": task.ranks, "decays": task.decays, "steps": steps}
    about |= {"unit": task.metric.unit, "contender": contender.name, "form": contender.form, "seed": seed}
    torch.set_num_threads(1)
    began = time.perf_counter()
    try:
        found = train(task, contender, seed, steps)
    except Exception as error:
        return {**about, "error": f"{type(error).__name__}: {error}"}
    return {**about, **found, "seconds": round(time.perf_counter() - began, 1)}


def train(task: Task, contender: Contender, seed: int, steps: int) -> dict[str, Any]:
    """Train one net on all ranks' gradients.

    Returns:
        status: "done", or "diverged" if the loss or the score is NaN or Inf.
        score: the mean of the last five evaluations; None if the run diverged.
        evaluations: [step, value] each.
        ratio: dense bytes / bytes sent by the last rank.
        density: share of kept elements, or None.
        milliseconds: median time per step, without evaluations.
    """
    torch.manual_seed(seed)
    data = tasks.DATA[task.data]()
    net = tasks.NETS[task.net]().to(memory_format=torch.channels_last)  # convolutions take half the time on a CPU
    optimizer = task.make_optimizer(net.parameters(), task.rate * contender.lr, contender.momentum_on(task))
    exchange = exchange_of(task, contender, seed)
    shares = [data.batches(rank, task.ranks, seed, task.batch) for rank in range(task.ranks)]
    seconds: list[float] = []
    evaluations: list[tuple[int, float]] = []
    diverged = False
    for step in range(1, steps + 1):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = task.rate_at(step - 1, steps) * contender.lr
        gradients, losses = zip(*(gradients_of(net, next(share), task.clip) for share in shares), strict=True)
        reduced = exchange.allreduce_many(gradients)[0]
        for name, parameter in net.named_parameters():
            parameter.grad = torch.from_numpy(reduced[name])
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        diverged = not math.isfinite(sum(losses))
        if step % (EVERY if step > steps - SCORED * EVERY else 2 * EVERY) == 0 or step == steps:
            value = task.metric.value(*held_out_sums(net, data.held_out(0, 1)))
            if math.isfinite(value):
                evaluations.append((step, value))
            else:
                diverged = True
        if diverged:
            break
    return {
        "status": "diverged" if diverged else "done",
        "score": None if diverged else statistics.fmean(value for _, value in evaluations[-SCORED:]),
        "evaluations": evaluations,
        "ratio": exchange.ledger.compression_ratio(task.ranks - 1),
        "density": contender.density,
        "milliseconds": 1000 * statistics.median(seconds),
    }


def exchange_of(task: Task, contender: Contender, seed: int) -> Loopback:
    """Return the ranks of a contender. The library learns about the optimizer's momentum only if it can cancel it."""
    remedies.register()  # this may be a process of its own
    sgd = SGD(contender.momentum_on(task), nesterov=False) if task.optimizer == "sgd" else None
    return Loopback({"seed": seed, **contender.plan(task)}, task.ranks, optimizer=sgd)
