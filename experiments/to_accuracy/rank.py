"""One rank of a comparison; ``run.py`` starts the ranks and reads what rank 0 prints.

    python -m experiments.to_accuracy.rank '{"kind": "train", "race": "mlp", …}'

Rank 0 prints a line of JSON per training (``train``) or per contender (``time``). Kernels are compiled before a clock
starts: each contender first trains a throw-away net of the same shapes for a few steps.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from experiments.to_accuracy.races import RACES, Race, baseline_of, parse
from experiments.training.loop import learning_rate, sums
from experiments.training.tasks import Batch, data_of
from experiments.training.trainers import DdpRanks, Trainer, join
from hvdcompress.engine.fallback import Verdict

WARM_UP = 3  #: steps before a clock starts; DDP's PowerSGD hook is dense in the first two of them


def batches_of(ranks: DdpRanks, race: Race, seed: int) -> Iterator[Batch]:
    """Return this rank's batches."""
    return data_of(race.task.task).batches(ranks.rank(), ranks.size(), seed, race.task.batch_size)


def prepare(race: Race, driver: str, device: str, name: str, seed: int) -> Trainer:
    """Return a contender's trainer, with initial weights that depend on the seed alone."""
    contender = parse(name, race.task)
    if contender.local and driver != "ddp":
        raise ValueError(f"{name}: local steps are measured over torch.distributed, not over {driver}")
    how = baseline_of(name) or contender.plan()
    # Horovod caches tensors by name, and a process trains several contenders
    return Trainer(driver, contender.trained(race.task), how, seed, device, f"{name}.", contender.local)


def train(ranks: DdpRanks, race: Race, driver: str, device: str, contender: str, seed: int) -> None:
    """Train, and print step, seconds of training and score of each evaluation."""
    throw_away, batches = prepare(race, driver, device, contender, seed), batches_of(ranks, race, seed)
    for _ in range(WARM_UP):
        timed(throw_away, next(batches))
    throw_away.close()
    del throw_away
    trainer, batches = prepare(race, driver, device, contender, seed), batches_of(ranks, race, seed)
    seconds = 0.0
    evaluations = []
    ranks.allgather_object(None, name="begin")
    for step in range(1, race.task.steps + 1):
        seconds += timed(trainer, next(batches), step - 1)[0]
        if step % race.every == 0 or step == race.task.steps:
            held_out = data_of(race.task.task).held_out(ranks.rank(), ranks.size())
            score = race.task.metric.value(*sums(ranks, trainer.evaluate(held_out), "score"))
            evaluations.append([step, round(seconds, 4), score])
    say(ranks, {"evaluations": evaluations})
    trainer.close()


def measure(
    ranks: DdpRanks, race: Race, driver: str, device: str, contenders: Sequence[str], rounds: int, turn: float
) -> None:
    """Print milliseconds per step of each contender, and those of this process on a processor.

    Args:
        ranks: of this launch.
        race: the training.
        driver: a key of ``TRAINERS``.
        device: "cpu" or "cuda".
        contenders: they take turns.
        rounds: how many turns each has.
        turn: how long a turn is, in seconds; it has two steps at least.
    """
    trainers = {name: prepare(race, driver, device, name, seed=0) for name in contenders}
    batches = batches_of(ranks, race, seed=0)
    lengths = {}
    for name, trainer in trainers.items():
        fallback = trainer.compressor.rank_state.fallback if trainer.compressor else None
        while fallback and (fallback.compares or fallback.verdict is Verdict.FLUSH):  # not decided, or sends residuals
            timed(trainer, next(batches))
        every = trainer.local.every if trainer.local else 1
        times = turn_of(ranks, trainer, batches, WARM_UP + max(2, every))
        # every rank must take as many steps
        mean = sums(ranks, [float(np.median(times[WARM_UP:, 0]))], "median")[0] / ranks.size()
        lengths[name] = max(2, every * math.ceil(turn / mean / every))
    found: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            # the first step of a turn meets cold caches, and links that are idle
            found[name].append(turn_of(ranks, trainer, batches, 1 + lengths[name])[1:])
    for name, turns in found.items():
        wall, processor = ([np.round(1000 * one[:, kind], 3).tolist() for one in turns] for kind in (0, 1))
        say(ranks, {"contender": name, "milliseconds": wall, "processor": processor})
    for trainer in trainers.values():
        trainer.close()


def turn_of(ranks: DdpRanks, trainer: Trainer, batches: Iterator[Batch], steps: int) -> np.ndarray[Any, Any]:
    """Return the seconds of each step of a turn [steps, 2] as :func:`timed` does, all ranks beginning together."""
    ranks.allgather_object(None, name="begin")
    return np.array([timed(trainer, next(batches)) for _ in range(steps)])


def timed(trainer: Trainer, batch: Batch, step: int = 0) -> tuple[float, float]:
    """Return the seconds of a step, until the device has finished this rank's work, and those on a processor."""
    began, used = time.perf_counter(), time.process_time()
    trainer.step(batch, learning_rate(trainer.task, step))  # reads the loss, so the device has finished
    return time.perf_counter() - began, time.process_time() - used


def say(ranks: DdpRanks, record: dict[str, Any]) -> None:
    """Print a line of JSON on rank 0, at once."""
    if ranks.rank() == 0:
        print(json.dumps(record), flush=True)


def main() -> None:
    """Join the other ranks and do what the command line says."""
    given = json.loads(sys.argv[1])
    kind, race, _ = given.pop("kind"), RACES[given.pop("race")], given.pop("rate")
    ranks = join(given["driver"], given["device"])
    work: dict[str, Callable[..., None]] = {"train": train, "time": measure}
    work[kind](ranks, race, **given)
    ranks.shutdown()


if __name__ == "__main__":
    main()
