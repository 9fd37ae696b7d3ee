"""The training loop of every driver: from a run's seed to the events of its result."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.report import jsonl
from experiments.training.experiment import Run, Task
from experiments.training.tasks import data_of

if TYPE_CHECKING:
    from experiments.training.trainers import DdpRanks, Trainer


UNTIMED_STEPS = 10  # the first steps compile kernels and fill Horovod's caches: not part of the step time
EVALUATIONS = 8  # of the held-out set, evenly over the steps
COMPUTED = 3  # forward and backward passes without an exchange that are timed at each evaluation


class Diverged(Exception):
    """The loss is not finite any more; raised by every rank in the same step."""


def learning_rate(task: Task, step: int) -> float:
    """Return the rate of a step: linear warm-up, then a cosine from the peak to zero if the task's rate decays."""
    warm = min(1.0, (step + 1) / max(1, task.warmup_steps))
    return task.learning_rate * warm * (0.5 * (1 + math.cos(math.pi * step / task.steps)) if task.decays else 1.0)


def train(ranks: DdpRanks, run: Run, trainer: Trainer, file: Path, **notes: Any) -> None:
    """Train one run, and write its events on rank 0: start, step …, finished.

    Args:
        ranks: all ranks of the launch: :class:`DdpRanks`, or a module of Horovod, which has the same functions.
        run: what is trained.
        trainer: at its initial parameters.
        file: of the events, JSON lines.
        notes: further facts of the ``start`` event.

    Raises:
        Diverged: the loss is not finite.
        RuntimeError: the ranks' parameters differ in the end.
    """
    task, data = run.task, data_of(run.task.task)
    compressor: Any = trainer.compressor
    ledger = compressor.ledger
    sizes = [parameter.size for parameter in trainer.parameters().values()]

    def say(event: str, **values: Any) -> None:
        if ranks.rank() == 0:
            jsonl.append(file, {"event": event, **values})

    def score() -> float:
        mine = trainer.evaluate(data.held_out(ranks.rank(), ranks.size()))
        return task.metric.value(*sums(ranks, mine, "score"))

    print(f"[{run.id}] {compressor.describe()}", flush=True)
    say("start", spec=run.spec(), parameters=sum(sizes), describe=compressor.describe(), **notes)
    batches = data.batches(ranks.rank(), ranks.size(), run.seed, task.batch_size)
    untimed = min(UNTIMED_STEPS, task.steps // 2)
    losses, computing, seconds, codec = [], [], 0.0, 0.0
    for step in range(task.steps):
        rate, batch = learning_rate(task, step), next(batches)
        if step == untimed:
            seconds, codec = 0.0, ledger.seconds()["codec"]
        began = time.perf_counter()
        losses.append(trainer.step(batch, rate))
        seconds += time.perf_counter() - began
        compressor.report_metrics(learning_rate=rate)
        last = step + 1 == task.steps
        if (step + 1) % task.log_every == 0 or last:
            mean = sums(ranks, [sum(losses) / len(losses)], "average")[0] / ranks.size()
            if not math.isfinite(mean):
                raise Diverged(f"the loss is {mean} at step {step + 1}: try a lower learning_rate")
            losses = []
            compressor.report_metrics(loss=mean)
            scored = last or (step + 1) % (math.ceil(task.steps / EVALUATIONS / task.log_every) * task.log_every) == 0
            say("step", step=step + 1, loss=mean, **({"score": score()} if scored else {}))
            if scored:
                computing += [trainer.compute(batch) for _ in range(COMPUTED)]
    mine = {
        "step_s": seconds / (task.steps - untimed),
        "codec_s": (ledger.seconds()["codec"] - codec) / (task.steps - untimed),
        "computing_s": float(np.median(computing)),
        "sent_bytes": ledger.bytes_sent() / task.steps,
        "wire_bytes": ledger.bytes_on_wire() / task.steps,
        "dense_bytes": ledger.dense_bytes() / task.steps,
    }
    every = ranks.allgather_object((mine, _fingerprint(trainer.parameters())), name="totals")
    if len({hash for _, hash in every}) > 1:
        raise RuntimeError(f"after training, the ranks' parameters differ: {[hash for _, hash in every]}")
    # means over ranks; but the others wait for the rank that transmits the most
    figures = {key: (max if key == "wire_bytes" else np.mean)([one[key] for one, _ in every]) for key in mine}
    say("finished", score=score(), parameters_sha256=every[0][1], counters=ledger.counters(), **figures)


def sums(ranks: DdpRanks, mine: Sequence[float], name: str) -> list[float]:
    """Return the sums over ranks of a few numbers; equal on all ranks."""
    return np.sum(ranks.allgather_object(list(map(float, mine)), name=name), axis=0).tolist()


def _fingerprint(parameters: dict[str, np.ndarray]) -> str:
    """Return a hash of every bit of the parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(parameter).tobytes())
    return digest.hexdigest()
