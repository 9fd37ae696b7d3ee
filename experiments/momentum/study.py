"""Train contenders on tasks, each run in one process, and keep each result in a file.

Contenders of a seed are paired: they start from the same weights, and their ranks draw the same batches in the same
order. A result is kept by all settings of its run, so the same command goes on where it was interrupted.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments.momentum import tasks
from experiments.momentum.contenders import Contender, parse
from experiments.momentum.report import STEPS
from experiments.momentum.tasks import TASKS, Task
from experiments.papers import units as work
from experiments.papers.units import Unit
from experiments.training.loop import Diverged
from hvdcompress.loopback import Loopback
from hvdcompress.optimizers import SGD

EVERY = 50  #: steps between evaluations, of which every second is left out before those that are scored
SCORED = 5  #: the score is the mean of so many last evaluations
FAILED = "failed"
OPTIMIZER_MOMENTUM = {"plain": "keep", "cancelled": "cancel"}  #: the plan's ``optimizer_momentum`` by form


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
        name: replace(task, ranks=ranks or task.ranks, decays=decay or task.decays)
        for name, task in ((name, TASKS[name]) for name in names)
    }
    return [
        Unit(
            measure,
            {
                "name": name,
                "task": asdict(task),
                "contender": asdict(parse(contender, task)),
                "seed": seed,
                "steps": steps,
            },
            {"task": name, "contender": contender, "seed": seed},
        )
        for seed in seeds
        for name, task in chosen.items()
        for contender in contenders
    ]


def run_all(units: Sequence[Unit], folder: Path, jobs: int) -> list[str]:
    """Train what has no result yet.

    Returns:
        The units that failed with an exception, each with its message. Their results are not kept.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C. Finished runs are kept.
    """
    _drop_failed(units, folder)  # of an earlier command that was interrupted
    work.measure(units, folder, jobs)
    return _drop_failed(units, folder)


def _drop_failed(units: Sequence[Unit], folder: Path) -> list[str]:
    """Delete the results of units that failed, so that the next command repeats them. Return names and messages."""
    failed = []
    for unit in units:
        file = work.file_of(folder, unit)
        found = json.loads(file.read_text(encoding="utf-8"))["found"] if file.exists() else {}
        if found.get("status") == FAILED:
            file.unlink()
            failed.append(f"{unit.name}: {found['error']}")
    return failed


def kept(place: Path) -> list[dict[str, Any]]:
    """Return what is kept of each run: of a folder, or of a file that :func:`save` has written."""
    if place.is_file():
        return json.loads(place.read_text(encoding="utf-8"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(place.glob("*.json"))]


def records(place: Path) -> list[dict[str, Any]]:
    """Return all results of a folder or file, with the settings of their runs; without runs that failed."""
    return [
        {**record["key"]["settings"], **record["found"], "seconds": record["seconds"]}
        for record in kept(place)
        if record["found"]["status"] != FAILED
    ]


def save(place: Path, file: Path) -> None:
    """Write what is kept of all runs into one file, a line each, without their training losses."""
    lines = []
    for record in kept(place):
        found = {key: value for key, value in record["found"].items() if key != "losses"}
        lines.append(json.dumps({**record, "found": found}))
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def measure(name: str, task: dict[str, Any], contender: dict[str, Any], seed: int, steps: int) -> dict[str, Any]:
    """Train once; all settings are plain data. An exception becomes part of the result, so that other runs go on."""
    del name
    torch.set_num_threads(1)
    try:
        return train(Task(**task), Contender(**contender), seed, steps)
    except Exception as error:
        return {"status": FAILED, "error": f"{type(error).__name__}: {error}"}


def train(task: Task, contender: Contender, seed: int, steps: int) -> dict[str, Any]:
    """Train one net on all ranks' gradients.

    Returns:
        status: "done", or "diverged" if the loss or the score is NaN or Inf.
        score: the mean of the last five evaluations; NaN if the run diverged.
        evaluations: [step, value] each.
        losses: the ranks' mean loss over every 50 steps.
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
    losses: list[float] = []
    seconds: list[float] = []
    evaluations: list[tuple[int, float]] = []
    try:
        for step in range(1, steps + 1):
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = task.rate_at(step - 1, steps) * contender.lr
            losses.append(_step(net, [next(share) for share in shares], task, exchange, optimizer))
            seconds.append(time.perf_counter() - began)
            if step % (EVERY if step > steps - SCORED * EVERY else 2 * EVERY) == 0 or step == steps:
                evaluations.append((step, _finite(tasks.evaluate(net, data, task.metric), "score", step)))
            _finite(losses[-1], "loss", step)
        status, score = "done", statistics.fmean(value for _, value in evaluations[-SCORED:])
    except Diverged:
        status, score = "diverged", math.nan
    return {
        "status": status,
        "score": score,
        "evaluations": evaluations,
        "losses": [statistics.fmean(losses[start : start + EVERY]) for start in range(0, len(losses), EVERY)],
        "ratio": exchange.ledger.compression_ratio(task.ranks - 1),
        "density": contender.density,
        "milliseconds": 1000 * statistics.median(seconds),
    }


def exchange_of(task: Task, contender: Contender, seed: int) -> Loopback:
    """Return the ranks of a contender. The library learns about the optimizer's momentum only if it can cancel it."""
    plan = {"seed": seed, **contender.settings}
    if task.optimizer != "sgd":
        return Loopback(plan, task.ranks)
    if contender.form != "default":
        plan["optimizer_momentum"] = OPTIMIZER_MOMENTUM[contender.form]
    return Loopback(plan, task.ranks, optimizer=SGD(momentum=contender.momentum_on(task), nesterov=False))


def _step(
    net: nn.Module, batches: Sequence[Any], task: Task, exchange: Loopback, optimizer: torch.optim.Optimizer
) -> float:
    """Compute each rank's gradients, exchange them and update the net. Return the ranks' mean loss."""
    parameters = dict(net.named_parameters())
    gradients: list[dict[str, np.ndarray]] = []
    losses = []
    for batch in batches:
        net.zero_grad()  # the next backward pass makes new tensors, so the gradients below need no copies
        loss = tasks.loss_of(net, batch)
        loss.backward()
        if task.clip is not None:
            nn.utils.clip_grad_norm_(parameters.values(), task.clip)
        gradients.append({name: parameter.grad.numpy() for name, parameter in parameters.items()})
        losses.append(loss.item())
    reduced = exchange.allreduce_many(gradients)[0]
    for name, parameter in parameters.items():
        parameter.grad = torch.from_numpy(reduced[name])
    optimizer.step()
    return statistics.fmean(losses)


def _finite(value: float, what: str, step: int) -> float:
    if not math.isfinite(value):
        raise Diverged(f"the {what} is {value} at step {step}")
    return value
