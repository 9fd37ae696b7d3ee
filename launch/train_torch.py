"""Train every run of an experiment that has no result yet. Every rank runs this script:

    horovodrun -np 2 --mpi python launch/train_torch.py runs/quickstart

``hvdcompress run`` builds that line and watches the events that rank 0 appends to
``runs/<name>/metrics/<run>.jsonl``: start, step ..., finished or failed. A run whose file ends with one
of the last two is not trained again, so the same line takes up where a killed one stopped.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tasks import TASKS, Batch, Bytes, Images

import hvdcompress
from hvdcompress.experiment import Experiment, Run, Task

torch.set_num_threads(1)  # a rank a core: threads of several ranks would fight for the same ones
import horovod.torch as hvd  # noqa: E402  (after the line above; it starts threads)

from hvdcompress.torch import Compressor  # noqa: E402

UNTIMED_STEPS = 10  # the first steps compile kernels and fill Horovod's caches: not part of the step time
ENDED = ("finished", "failed")


class Diverged(Exception):
    """The loss is no number any more; raised by every rank in the same step."""


class Events:
    """Appends JSON lines to a run's file: one ``write`` a line, so that a reader never sees half a line for long."""

    def __init__(self, file: Path, active: bool = True):
        self.file, self.active = file, active

    def write(self, event: str, **values: Any) -> None:
        """One event; on ranks other than 0 nothing, unless it is a failure."""
        if self.active or event == "failed":
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"event": event, **values}) + "\n")

    def ended(self) -> bool:
        """Whether the run has a result, good or bad."""
        if not self.file.exists():
            return False
        last = (self.file.read_text(encoding="utf-8").splitlines() or ["{}"])[-1]
        try:
            return json.loads(last).get("event") in ENDED
        except json.JSONDecodeError:
            return False  # cut off in the middle of a line


@dataclass
class Clock:
    """Seconds of training steps: in total, at work in codecs, and waiting for other ranks in ``synchronize``."""

    total: float = 0.0
    select: float = 0.0
    communicate: float = 0.0


def learning_rate(task: Task, step: int) -> float:
    """Linear warm-up, then a cosine from the peak to zero."""
    warm = min(1.0, (step + 1) / max(1, task.warmup_steps))
    return task.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / task.steps))


def tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as torch tensors."""
    return torch.from_numpy(batch[0]), torch.from_numpy(batch[1])


def average(value: float) -> float:
    """The mean over ranks."""
    return float(hvd.allreduce(torch.tensor(value, dtype=torch.float64), op=hvd.Average, name="report.average"))


@torch.no_grad()
def evaluate(model: torch.nn.Module, batches: Iterator[Batch]) -> tuple[float, float, float]:
    """Sums over all ranks' shares of the held-out set: negative log-likelihood, correct, count."""
    sums = torch.zeros(3, dtype=torch.float64)
    model.eval()
    for batch in batches:
        x, y = tensors(batch)
        logits = model(x).flatten(0, -2)
        y = y.flatten()
        nll = F.cross_entropy(logits, y, reduction="sum")
        sums += torch.tensor([float(nll), float((logits.argmax(1) == y).sum()), len(y)], dtype=torch.float64)
    model.train()
    return tuple(hvd.allreduce(sums, op=hvd.Sum, name="report.evaluate").tolist())


def fingerprint(model: torch.nn.Module) -> str:
    """A hash of every bit of the parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def provenance(folder: Path) -> dict[str, Any]:
    """What ran: the launcher's notes (command, commit, machine) and the versions in this process."""
    notes = folder / "launch.json"
    launch = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {}
    import horovod
    import numpy

    versions = {"python": platform.python_version(), "hvdcompress": hvdcompress.__version__}
    versions |= {module.__name__: module.__version__ for module in (torch, horovod, numpy)}
    return {"launch": launch, "versions": versions}


def build(run: Run, data: Images | Bytes) -> tuple[torch.nn.Module, Any, Compressor]:
    """The net, the stock Horovod optimizer around SGD, and the compression inside it."""
    import models

    torch.manual_seed(run.seed)  # same initial parameters for every method, and on every rank
    model = getattr(models, TASKS[run.task.task].model)(data)
    names = list(model.named_parameters())
    plan = hvdcompress.load({"seed": run.seed, **run.method.settings})
    compressor = Compressor(plan, names)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0, momentum=run.task.momentum, weight_decay=run.task.weight_decay)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=names, compression=compressor)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model, optimizer, compressor


def train_step(
    model: torch.nn.Module, optimizer: Any, compressor: Compressor, batch: Batch, clip: float | None, clock: Clock
) -> float:
    """Forward, backward, exchange, update; returns this rank's loss."""

    def codec() -> float:
        return compressor.ledger.seconds()["select"]

    x, y = tensors(batch)
    began, codec_began = time.perf_counter(), codec()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    before, codec_before = time.perf_counter(), codec()
    optimizer.synchronize()
    after, codec_after = time.perf_counter(), codec()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    with optimizer.skip_synchronize():
        optimizer.step()
    clock.total += time.perf_counter() - began
    clock.select += codec_after - codec_began
    clock.communicate += (after - before) - (codec_after - codec_before)
    return loss.item()


def train(run: Run, data: Images | Bytes, events: Events, notes: dict[str, Any]) -> None:
    """One run from its seed to its ``finished`` event."""
    task, metric = run.task, TASKS[run.task.task].metric
    model, optimizer, compressor = build(run, data)
    ledger, sizes = compressor.ledger, [parameter.numel() for parameter in model.parameters()]
    print(f"[{run.id}] {compressor.describe()}", flush=True)
    events.write(
        "start",
        run=run.id,
        spec=run.spec(),
        density=run.method.density,
        plan=compressor.plan.to_dict(),
        world=hvd.size(),
        parameters=sum(sizes),
        tensors=len(sizes),
        describe=compressor.describe(),
        **notes,
    )
    batches = data.batches(hvd.rank(), hvd.size(), run.seed, task.batch_size)
    # The first steps compile kernels and fill Horovod's caches, so they are on a clock of their own.
    untimed, warm, clock = min(UNTIMED_STEPS, task.steps // 2), Clock(), Clock()
    losses = []
    for step in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(task, step)
        now = warm if step < untimed else clock
        losses.append(train_step(model, optimizer, compressor, next(batches), task.clip_norm, now))
        compressor.observe(learning_rate=learning_rate(task, step))
        if (step + 1) % task.log_every == 0 or step + 1 == task.steps:
            mean = average(sum(losses) / len(losses))
            if not math.isfinite(mean):
                raise Diverged(f"the loss is {mean} at step {step + 1}: try a lower learning_rate")
            losses = []
            compressor.observe(loss=mean)
            events.write(
                "step",
                step=step + 1,
                loss=mean,
                lr=learning_rate(task, step),
                bytes_sent=ledger.bytes_sent(),
                dense_bytes=ledger.dense_bytes(),
                seconds=warm.total + clock.total,
            )
    hashes = hvd.allgather_object(fingerprint(model), name="report.fingerprint")
    if len(set(hashes)) > 1:
        raise RuntimeError(f"after training, the ranks' parameters differ: {dict(enumerate(hashes))}")
    value = metric.value(*evaluate(model, data.held_out(hvd.rank(), hvd.size())))
    mine = {
        "bytes_sent": ledger.bytes_sent(),
        "bytes_on_wire": ledger.bytes_on_wire(),
        "dense_bytes": ledger.dense_bytes(),
        **{f"{what}_seconds": spent / (task.steps - untimed) for what, spent in asdict(clock).items()},
    }
    every = hvd.allgather_object(mine, name="report.totals")
    events.write(
        "finished",
        steps=task.steps,
        metric={
            "name": metric.name,
            "unit": metric.unit,
            "higher_is_better": metric.higher_is_better,
            "value": value,
        },
        parameters_sha256=hashes[0],
        identical=True,
        ranks={key: [rank[key] for rank in every] for key in mine},
        counters=ledger.counters(),
        collectives=ledger.collectives(),
        seconds=warm.total + clock.total,
    )


def main() -> None:
    """Train what is left of the experiment in the given folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a run's folder, which holds config.yaml")
    folder = parser.parse_args().folder
    hvd.init()
    experiment = Experiment.open(folder / "config.yaml")
    runs = {run.id: run for run in experiment.runs()}
    events = {id: Events(folder / "metrics" / f"{id}.jsonl", active=hvd.rank() == 0) for id in runs}
    (folder / "metrics").mkdir(exist_ok=True)
    # Rank 0 decides: files of a shared file system may look older on other hosts.
    pending = hvd.broadcast_object([id for id in runs if not events[id].ended()], root_rank=0)
    notes, loaded = provenance(folder), {}
    for id in pending:
        run = runs[id]
        try:
            if run.task.label not in loaded:
                wanted = run.task.model_dump(include={"path", "image_size"}, exclude_none=True)
                loaded = {run.task.label: TASKS[run.task.task].load(**wanted)}
            train(run, loaded[run.task.label], events[id], notes)
        except Diverged as error:
            if hvd.rank() == 0:
                events[id].write("failed", error=str(error))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            events[id].write("failed", error=text, rank=hvd.rank(), traceback=traceback.format_exc())
            traceback.print_exc()
            sys.stderr.flush()
            # Other ranks may be waiting for this one; the launcher ends them and starts again with the next run.
            os._exit(1)
        gc.collect()  # the old optimizer's hooks hold the old model
    hvd.shutdown()


if __name__ == "__main__":
    main()
