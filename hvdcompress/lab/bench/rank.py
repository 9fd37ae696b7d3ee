"""One rank of ``hvdcompress bench``, which starts it and tells it what to do over a socket:

    python launch/bench_exchange.py SOCKET ring|mpi|gloo|ddp|mpi4py

It sets contenders up (``bench_contenders.py``) and measures one exchange of their gradients at a time: from the call of
``backward()``, which only hands out gradients that are there already, last layer first, or of the MPI driver with
arrays, until all gradients are reduced. So nothing of the exchange can hide behind computing, as in a training some
of it would.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

WHERE = sys.argv[2]
if WHERE in ("ring", "mpi4py"):
    from hvdcompress.lab.cluster.hosts import ring

    os.environ.update(ring(int(os.environ["OMPI_COMM_WORLD_SIZE"])))  # MPI reads it when it starts
os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "86400"  # we are stopped while others are measured

import torch  # noqa: E402  (Horovod's threads and MPI start with it)

torch.set_num_threads(1)

from bench_contenders import CLOCK, Contender, OverDDP, OverHorovod, OverMPI, make_gradients  # noqa: E402

from hvdcompress.engine.ledger import Ledger  # noqa: E402
from hvdcompress.lab import compare  # noqa: E402

MAKE = {"ddp": OverDDP, "mpi4py": OverMPI}


class Set:
    """The gradients of one set on this rank, by step."""

    def __init__(self, given: dict[str, Any], rank: int):
        self.label, self.tensors = given["label"], given["tensors"]
        if given["gradients"]:
            steps = compare.load(Path(given["gradients"]))
            self.steps = [
                [torch.from_numpy(ranks[rank % len(ranks)][name].astype("float32")) for name in self.tensors]
                for ranks in steps
            ]
        else:
            first = make_gradients(self.tensors, rank)
            self.steps = [first, [gradient.flip(0) for gradient in first]]  # not the same twice in a row


# -- what the launcher asks for -----------------------------------------------------------------------


class Rank:
    """This rank between two commands."""

    def __init__(self, rank: int, meet: Callable[[], Any]):
        self.rank, self.meet = rank, meet
        self.set: Set | None = None
        self.contenders: dict[str, Contender] = {}
        self.step = 0

    def prepare(self, command: dict[str, Any]) -> dict[str, Any]:
        """Set a contender up and warm it up, if that is not done; another set's are forgotten."""
        if self.set is None or self.set.label != command["set"]["label"]:
            for key in list(self.contenders):
                self.forget({"key": key})
            self.set = Set(command["set"], self.rank)
        key = command["key"]
        if key not in self.contenders:
            make = MAKE.get(WHERE, OverHorovod)
            self.contenders[key] = make(key, self.set.tensors, command["contender"])
            for _ in range(command["contender"]["warm_up"]):
                self.measure({"key": key})
        return {}

    def measure(self, command: dict[str, Any]) -> dict[str, Any]:
        """One exchange."""
        assert self.set
        contender = self.contenders[command["key"]]
        contender.take()  # what the last exchange left
        contender.ledger.reset()
        CLOCK.spent = dict.fromkeys(CLOCK.spent, 0.0)
        self.step += 1
        go = contender.prepare(self.set.steps[self.step % len(self.set.steps)])
        self.meet()
        CLOCK.spent["blocked"] = 0.0
        start = time.monotonic()  # one clock for all ranks: their hosts are on one machine
        go()
        end = time.monotonic()
        ledger = contender.ledger
        counted = {"sent": ledger.bytes_sent(), "on_wire": ledger.bytes_on_wire(), "calls": ledger.collectives()}
        return {
            "start": start,
            "end": end,
            "dense": ledger.dense_bytes(),
            **({**CLOCK.spent} if contender.splits else {}),
            **(counted if contender.splits else {}),
        }

    def check(self, command: dict[str, Any]) -> dict[str, Any]:
        """A checksum of the reduced gradients: equal on all ranks, or they drift apart."""
        total, reduced = 0, self.contenders[command["key"]].take()
        assert self.set and len(reduced) == len(self.set.tensors), "a gradient is missing"
        for gradient in reduced:
            total = zlib.crc32(gradient.contiguous().numpy().reshape(-1).view("uint8"), total)
        return {"checksum": total}

    def forget(self, command: dict[str, Any]) -> dict[str, Any]:
        """A contender is not needed soon, and memory is."""
        if contender := self.contenders.pop(command["key"], None):
            contender.forget()
        gc.collect()  # Horovod's hooks and their optimizers hold each other
        return {}


def watch_the_codec() -> None:
    """Charge the codec's seconds: until a tensor's last collective is under way to "encode", then to "decode"."""
    from hvdcompress.engine import rank as worker

    add_seconds = Ledger.add_seconds

    def charge(self: Ledger, rank: int, what: str, seconds: float) -> None:
        add_seconds(self, rank, what, seconds)
        CLOCK.spent["encode" if what == "select" else "blocked"] += seconds

    def late(method: Callable[..., Any], is_decode: Callable[..., bool]) -> Callable[..., Any]:
        def run(self: Any, *args: Any) -> Any:
            before = CLOCK.spent["encode"]
            result = method(self, *args)
            if is_decode(self):
                CLOCK.spent["decode"] += CLOCK.spent["encode"] - before
                CLOCK.spent["encode"] = before
            return result

        return run

    Ledger.add_seconds = charge  # type: ignore[method-assign]
    worker.Flight.advance = late(  # type: ignore[method-assign]
        worker.Flight.advance, lambda flight: flight.reduced is not None
    )
    worker.Worker.deliver = late(worker.Worker.deliver, lambda _: True)  # type: ignore[method-assign]


def start() -> Rank:
    """Join the other ranks."""
    if WHERE == "ddp":
        from datetime import timedelta

        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(days=1))
        return Rank(dist.get_rank(), dist.barrier)
    if WHERE == "mpi4py":
        from mpi4py import MPI

        watch_the_codec()
        return Rank(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.Barrier)
    import horovod.torch as hvd
    import horovod.torch.optimizer as stock

    hvd.init()
    stock.synchronize = CLOCK.timed("blocked", stock.synchronize)
    watch_the_codec()
    return Rank(hvd.rank(), lambda: hvd.allreduce(torch.zeros(1), name="meet"))


def main() -> None:
    """Obey until the launcher hangs up."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(sys.argv[1])
    ctx = start()
    with line.makefile("rw", encoding="utf-8") as stream:

        def say(answer: dict[str, Any]) -> None:
            stream.write(json.dumps(answer) + "\n")
            stream.flush()

        say({"rank": ctx.rank})
        for words in stream:
            command = json.loads(words)
            try:
                say(getattr(ctx, command["do"])(command))
            except Exception as error:
                traceback.print_exc()
                say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        main()
