"""One rank of a comparison; ``run.py`` starts the ranks and reads what rank 0 prints.

    python -m experiments.to_accuracy.rank '{"do": "train", "race": "mlp", …}'

Rank 0 prints a line of JSON per evaluation (``train``) or per contender (``time``). Kernels are compiled before a clock
starts: each contender first trains a throw-away net of the same shapes for a few steps.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from experiments.momentum import tasks
from experiments.to_accuracy.contenders import parse
from experiments.to_accuracy.races import RACES, Race
from experiments.to_accuracy.run import TIMEOUT
from experiments.to_accuracy.trainer import TRAINERS, Trainer
from experiments.training.loop import sums
from experiments.training.models_torch import held_out_sums
from experiments.training.tasks import Batch
from experiments.training.torch_trainer import DdpRanks

WARM_UP = 3  #: steps before a clock starts; DDP's PowerSGD hook is dense in the first two of them


def join(driver: str, device: str) -> DdpRanks:
    """Join the ranks of this launch: DDP's, over gloo or NCCL, or Horovod's."""
    if driver == "horovod":
        import horovod.torch as hvd

        hvd.init()
        return hvd
    if device == "cuda":
        os.environ["NCCL_HOSTID"] = os.environ["RANK"]  # otherwise NCCL refuses ranks that share a GPU
        torch.cuda.set_device(0)
    DdpRanks.init("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", TIMEOUT)
    return DdpRanks()


def batches_of(ranks: DdpRanks, race: Race, seed: int) -> Iterator[Batch]:
    """Return this rank's batches."""
    return tasks.DATA[race.task.data]().batches(ranks.rank(), ranks.size(), seed, race.task.batch)


def prepare(race: Race, driver: str, device: str, name: str, seed: int) -> Trainer:
    """Return a contender's trainer, with initial weights that depend on the seed alone."""
    torch.manual_seed(seed)
    return TRAINERS[driver](race.task, parse(name, race.task), device)


def train(ranks: DdpRanks, race: Race, driver: str, device: str, contender: str, seed: int) -> None:
    """Train, and print the score of each evaluation and the seconds of training until then."""
    throw_away, batches = prepare(race, driver, device, contender, seed), batches_of(ranks, race, seed)
    for _ in range(WARM_UP):
        throw_away.step(next(batches))
    throw_away.close()
    del throw_away
    trainer, batches = prepare(race, driver, device, contender, seed), batches_of(ranks, race, seed)
    seconds = 0.0
    ranks.allgather_object(None, name="begin")
    for step in range(1, race.steps + 1):
        trainer.set_rate(step - 1, race.steps)
        seconds += timed(trainer, next(batches))
        if step % race.every == 0 or step == race.steps:
            held_out = tasks.DATA[race.task.data]().held_out(ranks.rank(), ranks.size())
            score = race.task.metric.value(*sums(ranks, held_out_sums(trainer.net, held_out), "score"))
            say(ranks, {"step": step, "seconds": round(seconds, 4), "score": score})
    say(ranks, {"done": True})
    trainer.close()


def measure(
    ranks: DdpRanks, race: Race, driver: str, device: str, contenders: Sequence[str], rounds: int, turn: float
) -> None:
    """Print milliseconds per step of each contender.

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
        while trainer.compares:
            trainer.step(next(batches))
        times = turn_of(ranks, trainer, batches, WARM_UP + 2)
        # every rank must take as many steps
        mean = sums(ranks, [float(np.median(times[WARM_UP:]))], "median")[0] / ranks.size()
        lengths[name] = max(2, round(turn / mean))
    found: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            # the first step of a turn meets cold caches, and links that are idle
            found[name].append(turn_of(ranks, trainer, batches, 1 + lengths[name])[1:])
    for name, turns in found.items():
        say(ranks, {"contender": name, "milliseconds": [[round(1000 * each, 3) for each in one] for one in turns]})
    for trainer in trainers.values():
        trainer.close()


def turn_of(ranks: DdpRanks, trainer: Trainer, batches: Iterator[Batch], steps: int) -> list[float]:
    """Return the seconds of each step of a turn, all ranks beginning together."""
    ranks.allgather_object(None, name="begin")
    return [timed(trainer, next(batches)) for _ in range(steps)]


def timed(trainer: Trainer, batch: Batch) -> float:
    """Return the seconds of a step, until the device has finished this rank's work."""
    began = time.perf_counter()
    trainer.step(batch)
    if trainer.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def say(ranks: DdpRanks, record: dict[str, Any]) -> None:
    """Print a line of JSON on rank 0, at once."""
    if ranks.rank() == 0:
        print(json.dumps(record), flush=True)


def main() -> None:
    """Join the other ranks and do what the command line says."""
    given = json.loads(sys.argv[1])
    do, race = given.pop("do"), RACES[given.pop("race")]
    faulthandler.enable()
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)  # a hang ends with all stacks in the log
    torch.set_num_threads(1)
    ranks = join(given["driver"], given["device"])
    work: dict[str, Callable[..., None]] = {"train": train, "time": measure}
    work[do](ranks, race, **given)
    ranks.shutdown()


if __name__ == "__main__":
    main()
