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
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from experiments.momentum import tasks
from experiments.to_accuracy.contenders import parse
from experiments.to_accuracy.races import RACES, Race
from experiments.to_accuracy.run import TIMEOUT
from experiments.to_accuracy.trainer import TRAINERS, Trainer
from experiments.training.tasks import Batch

WARM_UP = 3  #: steps before a clock starts; DDP's PowerSGD hook is dense in the first two of them


class Ddp:
    """torch.distributed over gloo, or over NCCL on a GPU that all ranks share."""

    def __init__(self, device: str) -> None:
        if device == "cuda":
            os.environ["NCCL_HOSTID"] = os.environ["RANK"]  # otherwise NCCL refuses ranks that share a GPU
            torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT))
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device

    def wait(self) -> None:
        """Wait until the device has finished this rank's work."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum over the ranks."""
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def close(self) -> None:
        """Leave."""
        dist.destroy_process_group()


class Horovod:
    """Horovod, on the CPU."""

    device = "cpu"

    def __init__(self, device: str) -> None:
        import horovod.torch as hvd

        hvd.init()
        self.rank = hvd.rank()
        self.world_size = hvd.size()

    def wait(self) -> None:
        """Return at once: nothing is asynchronous on the CPU."""

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum over the ranks."""
        import horovod.torch as hvd

        return hvd.allreduce(torch.tensor(numbers, dtype=torch.float64), op=hvd.Sum).tolist()

    def close(self) -> None:
        """Leave."""


RANKS: dict[str, Callable[[str], Ddp | Horovod]] = {"ddp": Ddp, "horovod": Horovod}


def batches_of(race: Race, ranks: Ddp | Horovod, seed: int) -> Iterator[Batch]:
    """Return this rank's batches."""
    return tasks.DATA[race.task.data]().batches(ranks.rank, ranks.world_size, seed, race.task.batch)


def prepare(ranks: Ddp | Horovod, race: Race, driver: str, name: str, seed: int) -> Trainer:
    """Return a contender's trainer, with initial weights that depend on the seed alone."""
    torch.manual_seed(seed)
    return TRAINERS[driver](race.task, parse(name, race.task), ranks.device)


def train(ranks: Ddp | Horovod, race: Race, driver: str, contender: str, seed: int) -> None:
    """Train, and print the score of each evaluation and the seconds of training until then."""
    throw_away = prepare(ranks, race, driver, contender, seed)
    batches = batches_of(race, ranks, seed)
    for _ in range(WARM_UP):
        throw_away.step(next(batches))
    throw_away.close()
    del throw_away
    trainer, batches = prepare(ranks, race, driver, contender, seed), batches_of(race, ranks, seed)
    seconds: list[float] = []
    ranks.sum([0.0])
    for step in range(1, race.steps + 1):
        trainer.set_rate(step - 1, race.steps)
        began = time.perf_counter()
        trainer.step(next(batches))
        ranks.wait()
        seconds.append(time.perf_counter() - began)
        if step % race.every == 0 or step == race.steps:
            sums = ranks.sum(
                tasks.held_out_sums(trainer.net, tasks.DATA[race.task.data](), ranks.rank, ranks.world_size)
            )
            say(ranks, {"step": step, "seconds": round(sum(seconds), 4), "score": race.task.metric.value(*sums)})
    say(ranks, {"done": True})
    trainer.close()


def measure(ranks: Ddp | Horovod, race: Race, driver: str, contenders: Sequence[str], rounds: int, turn: float) -> None:
    """Print milliseconds per step of each contender.

    Args:
        ranks: of this launch.
        race: the training.
        driver: a key of ``TRAINERS``.
        contenders: they take turns.
        rounds: how many turns each has.
        turn: how long a turn is, in seconds; it has two steps at least.
    """
    trainers = {name: prepare(ranks, race, driver, name, seed=0) for name in contenders}
    batches = batches_of(race, ranks, seed=0)
    lengths = {}
    for name, trainer in trainers.items():
        while trainer.compares:
            trainer.step(next(batches))
        times = _times(ranks, trainer, batches, WARM_UP + 2)
        # Every rank must take as many steps
        mean = ranks.sum([float(np.median(times[WARM_UP:]))])[0] / ranks.world_size
        lengths[name] = max(2, round(turn / mean))
    found: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            # The first step of a turn meets cold caches, and links that are idle
            found[name].append(_times(ranks, trainer, batches, 1 + lengths[name])[1:])
    for name, turns in found.items():
        say(ranks, {"contender": name, "milliseconds": [[round(1000 * each, 3) for each in one] for one in turns]})
    for trainer in trainers.values():
        trainer.close()


def _times(ranks: Ddp | Horovod, trainer: Trainer, batches: Iterator[Batch], steps: int) -> list[float]:
    """Return the seconds of each step of a turn, all ranks beginning together."""
    ranks.sum([0.0])
    found = []
    for _ in range(steps):
        batch = next(batches)
        began = time.perf_counter()
        trainer.step(batch)
        ranks.wait()
        found.append(time.perf_counter() - began)
    return found


def say(ranks: Ddp | Horovod, record: dict[str, Any]) -> None:
    """Print a line of JSON on rank 0, at once."""
    if ranks.rank == 0:
        print(json.dumps(record), flush=True)


def main() -> None:
    """Join the other ranks and do what the command line says."""
    given = json.loads(sys.argv[1])
    do, race = given.pop("do"), RACES[given.pop("race")]
    faulthandler.enable()
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)  # a hang ends with all stacks in the log
    torch.set_num_threads(1)
    ranks = RANKS[given["driver"]](given.pop("device"))
    work: dict[str, Callable[..., None]] = {"train": train, "time": measure}
    work[do](ranks, race, **given)
    ranks.close()


if __name__ == "__main__":
    main()
