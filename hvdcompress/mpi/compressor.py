"""The MPI driver: any method on numpy arrays, under plain ``mpirun -np N``, with no deep-learning framework.

    from mpi4py import MPI
    from hvdcompress.mpi import Compressor

    comp = Compressor("scalecom", MPI.COMM_WORLD, density=0.01)           # on every rank
    gradient = comp.allreduce(gradient, name="layer1")                    # on every rank: the average
    gradients = comp.allreduce_many({"layer1": g1, "layer2": g2})         # better: they overlap

MPI's collectives have no names, and cannot be taken back. So

* a step begins with one small all-reduce, which shows whether all ranks have the same tensors, plan, step and loss
  scale; only if not are they written out and compared, so that the error says which;
* tensors are begun largest first, and then advanced round by round in that order: the order of collectives is
  the same on all ranks, and while one tensor is encoded or decoded others are on their way; small all-reduces that
  follow each other are one;
* a step ends with another small all-reduce, which says that all ranks have come so far: only then is state kept;
* a rank that fails in between sounds an alarm, which the others hear wherever they wait (``_mpi_net.py``). All raise
  the same ``PeerError``, no state is changed, and the Compressor can be used again.

A Broadcast is sent as an int32 sum, as under Horovod, and a float16 sum is added up in float16 by an operation of our
own, so that the bytes of each tensor are those of the other drivers. Beside them the ledger has "plan", once;
"status", 64 bytes a step; and "lengths", 8 bytes an all-gather, whose payloads may differ in length.

An error *outside* of ``allreduce`` on one rank alone leaves the others waiting, as in any MPI program:
``mpirun -np N python -m mpi4py program.py`` ends them all.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

# Without mpirun Open MPI would start a daemon of its own, which fails where there is no ssh; one rank needs none
os.environ.setdefault("OMPI_MCA_ess_singleton_isolated", "1")
from mpi4py import MPI  # noqa: E402

from hvdcompress.engine.agreement import PeerError, Status, compare_plans, fingerprint
from hvdcompress.engine.compressor import RankState
from hvdcompress.engine.ledger import Ledger
from hvdcompress.engine.rank import ExchangeError, Flight, Worker
from hvdcompress.engine.reshard import only
from hvdcompress.engine.state import describe
from hvdcompress.method import AllReduce, Method, TensorSpec
from hvdcompress.mpi.transport import Alarm, Net, Pending
from hvdcompress.ops import fast
from hvdcompress.plan import Bucket, Plan, plan_of

__all__ = ["Compressor", "PeerError"]

Array = np.ndarray[Any, Any]
Op = Literal["average", "sum"]


class Compressor(RankState):
    """Compressed all-reduces over one communicator. Making one is collective: all ranks of ``comm`` do it together.

    Args:
        method: a method id with ``settings``, a Method, a Plan, or a plan's dict.
        comm: an intracommunicator of mpi4py; it is duplicated.
        loss_scale: a number, or a function that returns one, by which gradients were multiplied; residuals are kept
            unscaled, so it may change between steps.
        settings: hyper-parameters and plan keys (``min_elements``, ``seed``, ``warmup``, ``bucket_elements``, …).

    Attributes:
        plan: what each tensor gets. ledger: bytes and seconds so far, on this rank.

    Raises:
        ValueError: a bad plan; ``comm`` is no intracommunicator.
        PeerError: another rank's plan is bad, or differs from this one's.
    """

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any],
        comm: MPI.Comm = MPI.COMM_WORLD,
        *,
        loss_scale: float | Callable[[], float] = 1.0,
        **settings: Any,
    ):
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ValueError(f"comm must be an intracommunicator of mpi4py, not {comm!r}")
        self.loss_scale = loss_scale
        self.ledger = Ledger(comm.size, comm.rank)
        self._net = Net(comm, self.ledger)
        self._silence = weakref.finalize(self, self._net.silence)
        with _Together(self._net):
            self.plan = plan_of(method, **settings)
            texts = self._net.gather_text("plan", json.dumps(self.plan.to_dict()))
            compare_plans([(json.loads(text), {}) for text in texts])
        self.worker = Worker(self.plan, comm.rank, comm.size, self.ledger)
        self._tensors: _Tensors | None = None  # those of the last step
        self._waiting: dict[str, Any] | None = None  # what was loaded of tensors that have not come yet

    def close(self) -> None:
        """Free its communicators; collective. Without it they are kept until MPI ends."""
        self._silence.detach()
        self._net.close()

    # -- the exchange ------------------------------------------------------------------------------------

    def allreduce(self, array: Array, name: str = "tensor", op: Op = "average") -> Array:
        """The average, or the sum, over ranks of ``array`` (any shape, floating point): a new array like it.

        ``name`` tells tensors apart: residuals are kept by it. See :meth:`allreduce_many` for what it raises.
        """
        return self.allreduce_many({name: array}, op)[name]

    def allreduce_many(self, arrays: Mapping[str, Array], op: Op = "average") -> dict[str, Array]:
        """Named arrays, exchanged in one step: new arrays of the same shapes and dtypes.

        If any rank has a number that is not finite, all come out as NaN on all ranks, and state is as it was. The
        dict's order is of no account.

        Raises:
            ValueError, TypeError: an input is wrong on this rank; the others raise PeerError.
            PeerError: a rank failed, or ranks differ in names, shapes, dtypes, op, step or loss scale; on every rank.
        """
        with _Together(self._net):
            return self._step({name: np.asarray(array) for name, array in arrays.items()}, op)

    def _step(self, arrays: dict[str, Array], op: Op) -> dict[str, Array]:
        worker, tensors = self.worker, self._known(arrays, op)
        self._take_over(tensors.buckets)
        known = set(worker.buckets)
        flights: list[Flight] = []
        outs = {name: np.empty(array.shape, array.dtype) for name, array in arrays.items()}
        try:
            status = self._exchange(tensors, arrays, op, flights)
        except BaseException:
            for flight in flights:
                worker.abandon(flight, [], fast)
            for name in set(worker.buckets) - known:  # so that all ranks know the same tensors
                for table in (worker.buckets, worker.states, worker.steps):
                    table.pop(name, None)
            raise
        factor = 1.0 / worker.world if op == "average" else 1.0
        worker.take_request()  # it went out with the status; what finish() asks for is of the next
        for flight in flights:
            members = [outs[member.name].reshape(-1) for member in flight.bucket.members]
            if status.non_finite:
                worker.abandon(flight, members, fast)
            else:
                worker.finish(flight, members, factor, fast)
        self.ledger.steps += not status.non_finite
        if status.triggered:
            worker.trigger()
        return outs

    def _exchange(self, tensors: _Tensors, arrays: Mapping[str, Array], op: Op, flights: list[Flight]) -> Status:
        """Run every bucket's exchange to its end, as ``flights``; the ranks' status."""
        net, worker, scale = self._net, self.worker, self.current_loss_scale()
        steps = sorted((name, step) for name, step in worker.steps.items() if step)
        state = fingerprint(tensors.fingerprint, op, steps)
        mine = Status(triggered=worker.asks_for_trigger, state=state, loss_scale=scale)
        begun = self._maximum(mine.numbers())
        status = None
        for bucket in tensors.buckets:
            flights.append(self._launch(bucket, arrays, scale))
            status = status or self._agreed(begun, tensors.specs, op)  # the first was encoded while it was on its way
            self._submit(flights[-1])
            net.progress()
        status = status or self._agreed(begun, tensors.specs, op)
        net.flush()
        while under_way := [flight for flight in flights if flight.handle is not None]:
            for flight in under_way:
                if net.advance(flight.handle):
                    flight.advance(net.result(flight.handle))
                    self._submit(flight)
            net.flush()
        end = self._maximum([float(not all(flight.finite for flight in flights))])
        net.advance(end)
        return replace(status, non_finite=bool(net.result(end)[0]))

    def _known(self, arrays: Mapping[str, Array], op: Op) -> _Tensors:
        """What follows from the arrays' names, shapes and dtypes: mostly the same as in the last step.

        Raises:
            ValueError, TypeError: an input is wrong, or ``op``.
        """
        if op not in ("average", "sum"):
            raise ValueError(f'op = {op!r} must be "average" or "sum"')
        given = tuple((name, array.shape, array.dtype) for name, array in arrays.items())
        if self._tensors is None or given != self._tensors.given:
            specs = {name: _spec(name, shape, dtype) for name, shape, dtype in given}
            facts = fingerprint(sorted(map(str, specs.values())), self.plan.source)
            buckets = sorted(self.plan.buckets(specs.values()), key=lambda bucket: -bucket.spec.size)
            self._tensors = _Tensors(given, specs, buckets, facts)
        return self._tensors

    def _launch(self, bucket: Bucket, arrays: Mapping[str, Array], scale: float) -> Flight:
        """Run a bucket's exchange to its first verb."""
        work = self.worker.work_dtype(bucket)
        with np.errstate(over="ignore"):  # a float64 beyond float32 is Inf, and undoes the step as such
            flats = [arrays[member.name].astype(work, copy=False).ravel() for member in bucket.members]
        try:
            return self.worker.start(bucket, self.worker.join(bucket, flats, fast), fast, scale)
        except ExchangeError:
            raise
        except Exception as error:
            raise ExchangeError(f"tensor {bucket.spec.name!r}: {type(error).__name__}: {error}") from error

    def _submit(self, flight: Flight) -> None:
        """Start the collective that the flight waits for, if there is one."""
        flight.handle = None if flight.verb is None else self._net.submit(flight.name, flight.verb)

    def _maximum(self, numbers: list[float]) -> Pending:
        pending = self._net.submit("status", AllReduce(np.array(numbers, np.float64), "max"))
        self._net.flush()
        return pending

    def _agreed(self, begun: Pending, specs: Mapping[str, TensorSpec], op: Op) -> Status:
        """The status of all ranks.

        Raises:
            PeerError: they differ in something; it says in what.
        """
        self._net.advance(begun)
        status = Status.of(self._net.result(begun).tolist())
        if status.alike and status.loss_scale == status.least_loss_scale:
            return status
        # all ranks take part in this, so that one which has failed meanwhile still finds the others
        tensors = {name: f"{spec.shape} {spec.dtype}" for name, spec in specs.items()}
        texts = self._net.gather_text("status", json.dumps([{**self.plan.to_dict(), "op": op}, tensors]))
        compare_plans([json.loads(text) for text in texts])
        status.check_loss_scale()
        raise PeerError("ranks disagree on the step: load every rank's own state, of the same step")

    # -- state -------------------------------------------------------------------------------------------

    def residual(self, name: str) -> Array:
        """This rank's residual of a tensor, in its shape (a copy); zeros where none is kept.

        Raises:
            KeyError: no such tensor has gone through.
        """
        bucket, _ = self.worker.find(name)
        shape = next(member.shape for member in bucket.members if member.name == name)
        flat = self.worker.residual(name)
        return np.zeros(shape, np.float32) if flat is None else flat.reshape(shape).copy()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state (every rank has its own: save one file a rank): plan, steps, residuals as numpy arrays."""
        saved = self.worker.state_dict()
        for table in TABLES if self._waiting else ():
            saved[table] = {**self._waiting[table], **saved[table]}  # type: ignore[index]
        return saved

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` saved on this rank; before the first step, too.

        Raises:
            ValueError: it is of another rank or world, or of other shapes; nothing is changed then. Shapes that are
                not known yet are compared in the first step with them.
        """
        self.worker.check_origin(saved)
        known = [bucket for bucket in self.worker.buckets.values() if bucket.members[0].name in saved["steps"]]
        fresh = Worker(self.plan, self.worker.rank, self.worker.world, self.ledger)
        names = [member.name for bucket in known for member in bucket.members]
        fresh.load_state_dict(only(saved, names), known, np.concatenate)
        self.worker = fresh
        self._waiting = only(saved, sorted(saved["steps"].keys() - set(names)))

    def _take_over(self, buckets: list[Bucket]) -> None:
        """Give tensors that have just become known their part of a state that was loaded earlier."""
        waiting = self._waiting
        come = [bucket for bucket in buckets if waiting and any(m.name in waiting["steps"] for m in bucket.members)]
        if not come:
            return
        assert waiting is not None
        names = [member.name for bucket in come for member in bucket.members]
        restored = Worker(self.plan, self.worker.rank, self.worker.world)
        restored.load_state_dict(only(waiting, names), come, np.concatenate)
        for table in ("buckets", "states", "steps", "triggers", "restarts"):
            getattr(self.worker, table).update(getattr(restored, table))
        self._waiting = only(waiting, sorted(waiting["steps"].keys() - set(names)))

    def describe(self) -> str:
        """Which method each group of tensors gets, and its memory on this rank; known after a tensor's first step."""
        return describe(self.worker.buckets.values())


class _Tensors(NamedTuple):
    """The tensors of a step."""

    given: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]
    specs: dict[str, TensorSpec]
    buckets: list[Bucket]
    fingerprint: float  #: of them and of the plan


def _spec(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> TensorSpec:
    if not isinstance(name, str):
        raise TypeError(f"a tensor's name is a string, not {name!r}")
    if dtype.kind != "f" or dtype.itemsize > 8:
        raise ValueError(f"{name!r}: {dtype} cannot be reduced; float16, float32 and float64 can")
    return TensorSpec(name, shape, str(dtype))


class _Together:
    """Within it, what one rank raises ends the others' wait: they raise PeerError."""

    def __init__(self, net: Net):
        self.net = net

    def __enter__(self) -> None:
        self.net.begin()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Alarm):
            raise self.net.fail(None) from None
        if isinstance(error, Exception) and not isinstance(error, PeerError):
            common = self.net.fail(error)
            if isinstance(error, ExchangeError):
                raise common from error  # else it is this rank's own mistake, and goes its way


TABLES = ("steps", "restarts", "merge", "state")
