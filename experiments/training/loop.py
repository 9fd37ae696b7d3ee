"""The training loop of every driver: from a run's seed to its record. Each rank of ``experiments run`` runs this file.

torchrun --nproc-per-node 2 -m experiments.training.loop '{"driver": "ddp", "task": …, "method": …, "seed": 0}'
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import joblib
import numpy as np

from experiments.training.experiment import Task
from experiments.training.tasks import data_of
from experiments.training.trainers import DdpRanks, Trainer, join

UNTIMED_STEPS = 10  # the first steps compile kernels and fill Horovod's caches: not part of the step time
EVALUATIONS = 8  # of the held-out set, evenly over the steps
LAST = 0.05  # the loss is the mean over so much of the steps, at the end
COMPUTED = 3  # forward and backward passes without an exchange that are timed at each evaluation


def learning_rate(task: Task, step: int) -> float:
    """Return the rate of a step: linear warm-up, then a cosine from the peak to zero if the task's rate decays."""
    warm = min(1.0, (step + 1) / max(1, task.warmup_steps))
    return task.learning_rate * warm * (0.5 * (1 + math.cos(math.pi * step / task.steps)) if task.decays else 1.0)


def train(ranks: DdpRanks, task: Task, seed: int, trainer: Trainer) -> dict[str, Any]:
    """Train one run, and return its record.

    Args:
        ranks: all ranks of the launch: :class:`DdpRanks`, or a module of Horovod, which has the same functions.
        task: what is trained.
        seed: of the batches.
        trainer: at its initial parameters.

    Returns:
        ``score`` and ``loss`` at the end, or an ``error`` if the loss became NaN or Inf; ``scores`` [step, score];
        ``parameters``, how many; and the means over ranks of seconds and bytes per step.

    Raises:
        RuntimeError: the ranks' parameters differ in the end.
    """
    data = data_of(task.task)
    compressor: Any = trainer.compressor
    ledger = compressor.ledger
    batches = data.batches(ranks.rank(), ranks.size(), seed, task.batch_size)
    untimed = min(UNTIMED_STEPS, task.steps // 2)
    record: dict[str, Any] = {"parameters": sum(parameter.size for parameter in trainer.parameters().values())}
    scores: list[tuple[int, float]] = []
    losses, means, computing = [], [], []
    seconds, codec = 0.0, 0.0
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
                return {**record, "scores": scores, "error": f"the loss is {mean} at step {step + 1}"}
            losses = []
            compressor.report_metrics(loss=mean)
            if step + 1 > (1 - LAST) * task.steps:
                means.append(mean)
            if last or (step + 1) % (math.ceil(task.steps / EVALUATIONS / task.log_every) * task.log_every) == 0:
                evaluated = trainer.evaluate(data.held_out(ranks.rank(), ranks.size()))
                scores.append((step + 1, task.metric.value(*sums(ranks, evaluated, "score"))))
                computing += [trainer.compute(batch) for _ in range(COMPUTED)]
    mine = {
        "step_s": seconds / (task.steps - untimed),
        "codec_s": (ledger.seconds()["codec"] - codec) / (task.steps - untimed),
        "computing_s": float(np.median(computing)),
        "sent_bytes": ledger.bytes_sent() / task.steps,
        "wire_bytes": ledger.bytes_on_wire() / task.steps,
        "dense_bytes": ledger.dense_bytes() / task.steps,
    }
    every = ranks.allgather_object((mine, joblib.hash(trainer.parameters())), name="totals")
    if len({hash for _, hash in every}) > 1:
        raise RuntimeError(f"after training, the ranks' parameters differ: {[hash for _, hash in every]}")
    # means over ranks; but the others wait for the rank that transmits the most
    figures = {key: float((max if key == "wire_bytes" else np.mean)([one[key] for one, _ in every])) for key in mine}
    return {**record, "scores": scores, "score": scores[-1][1], "loss": float(np.mean(means)), **figures}


def sums(ranks: DdpRanks, mine: Sequence[float], name: str) -> list[float]:
    """Return the sums over ranks of a few numbers; equal on all ranks."""
    return np.sum(ranks.allgather_object(list(map(float, mine)), name=name), axis=0).tolist()


def main() -> None:
    """Train."""
    given = json.loads(sys.argv[1])
    driver, seed = given["driver"], given["seed"]
    ranks = join(driver)
    task = Task.model_validate(given["task"])
    record = train(ranks, task, seed, Trainer(driver, task, given["method"], seed))
    if ranks.rank() == 0:
        print(json.dumps(record), flush=True)
    ranks.shutdown()


if __name__ == "__main__":
    main()
