"""The MPI driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdcompress.mpi import Compressor, PeerError  # before mpi4py, whose environment it sets
from hvdcompress.plan import IN_ORDER
from tests.ranks.drivers.base import Arrays, Counter, Driver, Handle, Shapes
from tests.ranks.exchanges import Settings, sums_float16

from mpi4py import MPI  # isort: skip


class CountingComm(MPI.Intracomm):
    """A communicator that counts the bytes of the arrays that it is given, as do its copies."""

    counter: Counter

    @classmethod
    def like(cls, counter: Counter) -> type[CountingComm]:
        return type("CountingComm", (cls,), {"counter": counter})

    def Split(self, *how: Any) -> Any:
        return type(self)(super().Split(*how))

    def Iallreduce(self, given: Any, *rest: Any, **more: Any) -> Any:
        self.counter.num_bytes += (rest[0] if given is MPI.IN_PLACE else given).nbytes
        return super().Iallreduce(given, *rest, **more)

    def Iallgatherv(self, given: Any, *rest: Any, **more: Any) -> Any:
        self.counter.num_bytes += given[0].nbytes
        return super().Iallgatherv(given, *rest, **more)

    def Ialltoallv(self, given: Any, *rest: Any, **more: Any) -> Any:
        self.counter.num_bytes += given[0].nbytes
        return super().Ialltoallv(given, *rest, **more)


class MpiHandle(Handle):
    def __init__(self, comm: Any, method: Any, settings: Settings, shapes: Shapes, dtype: str, op: str, scale: Any):
        self.shapes, self.dtype, self.op = shapes, dtype, op
        self.compressor = Compressor(method, comm, loss_scale=scale, **settings)

    def reduce(self, gradients: Arrays) -> Arrays:
        given = {n: g if g.dtype.kind != "f" else g.astype(self.dtype) for n, g in gradients.items()}
        return self.compressor.allreduce(given, op=self.op)

    def overhead(self, steps: int) -> dict[str, int]:
        """A status at the beginning and the end of each step, the lengths of payloads that are gathered, plans once."""
        return {"status": 72 * steps, "plan": self.sent()["plan"], **self.lengths()}

    def close(self) -> None:
        self.compressor.close()


class MpiDriver(Driver):
    name = "mpi"
    error = PeerError
    recovers = sums_in_order = True
    grouping = IN_ORDER

    def __init__(self, folder: Path):
        self.comm: Any = MPI.COMM_WORLD
        self.rank, self.world_size, self.folder = self.comm.rank, self.comm.size, folder

    def make(self, method, settings, shapes, *, dtype="float32", op="average", loss_scale=1.0) -> MpiHandle:
        return MpiHandle(self.comm, method, self.placed(settings, method), shapes, dtype, op, loss_scale)

    def gather(self, value: Any) -> list[Any]:
        return MPI.COMM_WORLD.allgather(value)

    def tolerance(self, method, settings) -> tuple[float, float] | None:
        if self.exact:
            return 0.0, 0.0
        matrices = method in ("powersgd", "gradiveq")  # their products make more of a sum's rounding
        if sums_float16(str(method), settings):
            return (1e-2, 1e-2) if matrices else (2e-3, 2e-3)
        return (1e-4, 1e-4) if matrices else (1e-6, 1e-6)

    @contextmanager
    def counting(self) -> Iterator[Counter]:
        counter, plain = Counter(), self.comm
        self.comm = CountingComm.like(counter)(plain)
        try:
            yield counter
        finally:
            self.comm = plain


DRIVER = MpiDriver
