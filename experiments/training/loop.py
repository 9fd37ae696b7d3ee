"""The training loop of every framework: events, measurements, and the way from a run's seed to its result.

``train_torch`` and ``train_tensorflow`` make a :class:`Trainer` for each run; :func:`main` does the rest.
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
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import hvdcompress
from experiments.output import jsonl
from experiments.training.experiment import Experiment, Run, Task
from experiments.training.tasks import TASKS, Batch, Bytes, Images

UNTIMED_STEPS = 10  # the first steps compile kernels and fill Horovod's caches: not part of the step time
ENDED = ("finished", "failed")


class Diverged(Exception):
    """The loss is not finite any more; raised by every rank in the same step."""


class Events:
    """Appends events to a run's file of JSON lines."""

    def __init__(self, file: Path, active: bool = True):
        self.file, self.active = file, active

    def write(self, event: str, **values: Any) -> None:
        """Append one event; on ranks other than 0 nothing, unless it is a failure."""
        if self.active or event == "failed":
            jsonl.append(self.file, {"event": event, **values})

    def ended(self) -> bool:
        """Whether the run has a result, good or bad."""
        return any(event.get("event") in ENDED for event in jsonl.read(self.file))


@dataclass
class Clock:
    """Seconds of training steps: in total, at work in codecs, and waiting for other ranks (NaN: unknown)."""

    total: float = 0.0
    select: float = 0.0
    communicate: float = 0.0


class Trainer(Protocol):
    """One run's net, optimizer and compression, in some framework."""

    compressor: Any  #: the Compressor; it knows its tensors by now

    def parameters(self) -> dict[str, np.ndarray]:
        """All parameters by name, as they are now."""

    def step(self, batch: Batch, rate: float, clock: Clock) -> float:
        """Forward, backward, exchange, update with this learning rate; returns this rank's loss."""

    def evaluate(self, batch: Batch) -> tuple[float, float]:
        """Sums over a batch: negative log-likelihood, and how many are right."""


def learning_rate(task: Task, step: int) -> float:
    """Linear warm-up, then a cosine from the peak to zero."""
    warm = min(1.0, (step + 1) / max(1, task.warmup_steps))
    return task.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / task.steps))


def fingerprint(parameters: dict[str, np.ndarray]) -> str:
    """A hash of every bit of the parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(parameter).tobytes())
    return digest.hexdigest()


def provenance(folder: Path, modules: Iterable[Any]) -> dict[str, Any]:
    """The launcher's notes (command, commit, machine) and the versions in this process."""
    notes = folder / "launch.json"
    launch = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {}
    versions = {"python": platform.python_version(), "hvdcompress": hvdcompress.__version__}
    versions |= {module.__name__: module.__version__ for module in (*modules, np)}
    return {"launch": launch, "versions": versions}


def sums_over_ranks(hvd: Any, mine: Sequence[float], name: str) -> list[float]:
    """The sums over ranks of a few numbers; equal on all ranks."""
    return np.sum(hvd.allgather_object(list(map(float, mine)), name=name), axis=0).tolist()


def train(hvd: Any, run: Run, data: Images | Bytes, trainer: Trainer, events: Events, notes: dict[str, Any]) -> None:
    """One run from its first step to its ``finished`` event."""
    task, metric, world_size = run.task, TASKS[run.task.task].metric, hvd.size()
    compressor, ledger = trainer.compressor, trainer.compressor.ledger
    sizes = [parameter.size for parameter in trainer.parameters().values()]
    print(f"[{run.id}] {compressor.describe()}", flush=True)
    events.write(
        "start",
        run=run.id,
        spec=run.spec(),
        density=run.method.density,
        plan=compressor.plan.to_dict(),
        world_size=world_size,
        parameters=sum(sizes),
        tensors=len(sizes),
        describe=compressor.describe(),
        **notes,
    )
    batches = data.batches(hvd.rank(), world_size, run.seed, task.batch_size)
    # The first steps compile kernels and fill Horovod's caches, so they are on a clock of their own.
    untimed, warm, clock = min(UNTIMED_STEPS, task.steps // 2), Clock(), Clock()
    losses = []
    for step in range(task.steps):
        rate = learning_rate(task, step)
        losses.append(trainer.step(next(batches), rate, warm if step < untimed else clock))
        compressor.observe(learning_rate=rate)
        if (step + 1) % task.log_every == 0 or step + 1 == task.steps:
            mean = sums_over_ranks(hvd, [sum(losses) / len(losses)], "report.average")[0] / world_size
            if not math.isfinite(mean):
                raise Diverged(f"the loss is {mean} at step {step + 1}: try a lower learning_rate")
            losses = []
            compressor.observe(loss=mean)
            events.write(
                "step",
                step=step + 1,
                loss=mean,
                lr=rate,
                bytes_sent=ledger.bytes_sent(),
                dense_bytes=ledger.dense_bytes(),
                seconds=warm.total + clock.total,
            )
    hashes = hvd.allgather_object(fingerprint(trainer.parameters()), name="report.fingerprint")
    if len(set(hashes)) > 1:
        raise RuntimeError(f"after training, the ranks' parameters differ: {dict(enumerate(hashes))}")
    mine = {
        "bytes_sent": ledger.bytes_sent(),
        "bytes_on_wire": ledger.bytes_on_wire(),
        "dense_bytes": ledger.dense_bytes(),
        **{f"{what}_seconds": spent / (task.steps - untimed) for what, spent in asdict(clock).items()},
    }
    every = hvd.allgather_object(mine, name="report.totals")
    value = metric.value(*held_out(hvd, trainer, data.held_out(hvd.rank(), world_size)))
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


def held_out(hvd: Any, trainer: Trainer, batches: Iterator[Batch]) -> list[float]:
    """Sums over all ranks' shares of the held-out set: negative log-likelihood, correct, count."""
    mine = np.zeros(3)
    for batch in batches:
        mine += [*trainer.evaluate(batch), batch[1].size]
    return sums_over_ranks(hvd, mine.tolist(), "report.evaluate")


def main(about: str | None, hvd: Any, build: Callable[[Run, Images | Bytes], Trainer], *modules: Any) -> None:
    """Train what is left of the experiment in the folder that the command line names."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a run's folder, which holds config.yaml")
    folder = parser.parse_args().folder
    hvd.init()
    experiment = Experiment.open(folder / "config.yaml")
    runs = {run.id: run for run in experiment.runs()}
    events = {id: Events(folder / "metrics" / f"{id}.jsonl", active=hvd.rank() == 0) for id in runs}
    (folder / "metrics").mkdir(exist_ok=True)
    # Rank 0 decides: files of a shared file system may look older on other hosts.
    pending = hvd.broadcast_object([id for id in runs if not events[id].ended()], root_rank=0)
    notes, loaded = provenance(folder, modules), {}
    for id in pending:
        run = runs[id]
        try:
            if run.task.label not in loaded:
                wanted = run.task.model_dump(include={"path", "image_size"}, exclude_none=True)
                loaded = {run.task.label: TASKS[run.task.task].load(**wanted)}
            data = loaded[run.task.label]
            train(hvd, run, data, build(run, data), events[id], notes)
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
        gc.collect()  # an optimizer's hooks hold its model
    hvd.shutdown()
