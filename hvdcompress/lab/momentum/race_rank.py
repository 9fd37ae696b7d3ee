"""Train one contender of a race. Every rank runs this; ``race.py`` starts the ranks and reads what rank 0 prints.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=… MASTER_PORT=… \
        python -m hvdcompress.lab.momentum.race_rank CONTENDER SEED STEPS EVERY TIMEOUT

Rank 0 prints a line of JSON per evaluation and one at the end. Its clock counts every training step, and stops while it
evaluates and the other ranks wait at a barrier. Kernels are compiled before the clock starts: each rank first trains a
throw-away model of the same shapes for a few steps.
"""

from __future__ import annotations

import faulthandler
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hvdcompress import ddp
from hvdcompress.lab.momentum import tasks
from hvdcompress.lab.momentum.contenders import Contender
from hvdcompress.lab.momentum.race import baseline_of, parse
from hvdcompress.lab.momentum.study import OPTIMIZER_MOMENTUM
from hvdcompress.lab.training.tasks import ACCURACY, Batch

WIDTH = 2048  #: of both hidden layers, which makes 5.8 million parameters
WARM_UP = 3  #: steps of the throw-away model; DDP's PowerSGD hook is dense in the first two of them
ONE_BUCKET = 1 << 16  #: MB; over gloo, DDP's PowerSGD hook aborts with more than one bucket


# DDP checks a hook's annotations, and refuses it where they are strings.
def noop(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Communication hook: return this rank's own gradient."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Trainer:
    """The net in DDP with a contender's hook, and its optimizer."""

    def __init__(self, contender: Contender):
        baseline = baseline_of(contender.name)
        powersgd = baseline is not None and baseline.startswith("ddp_powersgd")
        task = tasks.TASKS["mlp"]
        self.model = DistributedDataParallel(
            tasks.mlp(WIDTH), broadcast_buffers=False, **({"bucket_cap_mb": ONE_BUCKET} if powersgd else {})
        )
        rate, momentum = task.rate * contender.lr, contender.momentum_on(task)
        self.optimizer = task.make_optimizer(self.model.parameters(), rate, momentum)
        self.compressor: ddp.Compressor | None = None
        if baseline is None:
            settings: dict[str, Any] = dict(contender.settings)
            if contender.form != "default":
                settings["optimizer_momentum"] = OPTIMIZER_MOMENTUM[contender.form]
            self.compressor = ddp.attach(self.model, settings.pop("method"), optimizer=self.optimizer, **settings)
        elif powersgd:
            rank = int(baseline.removeprefix("ddp_powersgd_r"))
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif baseline == "fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif baseline == "noop":
            self.model.register_comm_hook(None, noop)

    def step(self, batch: Batch) -> None:
        """Take one training step."""
        self.optimizer.zero_grad()
        tasks.loss_of(self.model, batch).backward()
        self.optimizer.step()


@contextmanager
def trainer(contender: Contender) -> Iterator[Trainer]:
    """Context manager for a Trainer, whose process group is freed when all ranks have reached the end."""
    made = Trainer(contender)
    yield made
    dist.barrier()
    if made.compressor:
        made.compressor.close()


def train(contender: Contender, seed: int, steps: int, every: int) -> None:
    """Train, and print what rank 0 sees.

    Args:
        contender: see ``race.parse``.
        seed: of the weights and of the ranks' batches.
        steps: how many.
        every: steps between evaluations; there is one at the end, too.
    """
    task, data = tasks.TASKS["mlp"], tasks.images(0.286)
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = data.batches(rank, world, seed, task.batch)
    with trainer(contender) as throw_away:
        warm_up = data.batches(rank, world, seed, task.batch)
        for _ in range(WARM_UP):
            throw_away.step(next(warm_up))
    del throw_away
    torch.manual_seed(seed)  # after the warm-up, so that all contenders start from the same weights
    seconds: list[float] = []
    with trainer(contender) as racer:
        dist.barrier()
        for step in range(1, steps + 1):
            began = time.perf_counter()
            racer.step(next(batches))
            seconds.append(time.perf_counter() - began)
            if step % every == 0 or step == steps:
                if rank == 0:
                    accuracy = tasks.evaluate(racer.model.module, data, ACCURACY)
                    say({"step": step, "seconds": round(sum(seconds), 4), "accuracy": accuracy})
                dist.barrier()
    if rank == 0:
        say({"milliseconds": 1000 * statistics.median(seconds)})


def say(record: dict[str, Any]) -> None:
    """Print a line of JSON at once."""
    print(json.dumps(record), flush=True)


def main() -> None:
    """Join the other ranks and train."""
    contender, seed, steps, every, timeout = sys.argv[1:]
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(timeout), exit=True)  # a hang ends with all stacks in the log
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(timeout)))
    train(parse(contender), int(seed), int(steps), int(every))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
