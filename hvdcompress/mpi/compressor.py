"""The MPI driver: any method on numpy arrays, under plain ``mpirun -np N``, with no deep-learning framework.

    from mpi4py import MPI
    from hvdcompress.mpi import Compressor

    comp = Compressor("scalecom", MPI.COMM_WORLD, density=0.01)           # on every rank
    gradient = comp.allreduce(gradient, name="layer1")                    # on every rank: the average
    gradients = comp.allreduce_many({"layer1": g1, "layer2": g2})         # better: they overlap

An error *outside* of ``allreduce`` on one rank alone leaves the others waiting, as in any MPI program:
``mpirun -np N python -m mpi4py program.py`` ends them all.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

# Without mpirun Open MPI would start a daemon of its own, which fails where there is no ssh; one rank needs none
_ISOLATED = "OMPI_MCA_ess_singleton_isolated"
_is_set = _ISOLATED in os.environ
os.environ.setdefault(_ISOLATED, "1")
from mpi4py import MPI  # noqa: E402  (which starts MPI)

if not _is_set:
    del os.environ[_ISOLATED]

from hvdcompress.engine import compressor  # noqa: E402
from hvdcompress.engine.agreement import Terms, compare_terms, failure  # noqa: E402
from hvdcompress.engine.collectives import Collectives  # noqa: E402
from hvdcompress.engine.signals import deferred  # noqa: E402
from hvdcompress.engine.step import Agree, Step  # noqa: E402
from hvdcompress.engine.telemetry import log  # noqa: E402
from hvdcompress.method import Method, TensorSpec  # noqa: E402
from hvdcompress.mpi.transport import MPITransport  # noqa: E402
from hvdcompress.optimizers import SGD, UNKNOWN, described, may_adapt  # noqa: E402
from hvdcompress.plan import IN_ORDER, Bucket, Plan, plan_of  # noqa: E402

Array = np.ndarray[Any, Any]
Op = Literal["average", "sum"]


class Compressor(compressor.Compressor):
    """Compressed all-reduces over one communicator. Making one is collective: all ranks of ``comm`` do it together.

    Args:
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, or a plan's dict.
        comm: an intracommunicator of mpi4py; it is duplicated.
        loss_scale: a number, or a function that returns one, by which gradients were multiplied; residuals are kept
            unscaled, so it may change between steps.
        optimizer: describes the program's optimizer, whose momentum is adapted where error feedback delays gradients.
        settings: hyper-parameters and plan keys (``min_elements``, ``seed``, ``warmup``, ``bucket_elements``, …).

    Attributes:
        plan: what each tensor gets.
        ledger: bytes and seconds so far, on this rank. Besides the tensors it has "plan", once; "status", 64 bytes per
            step; and "lengths", 8 bytes per all-gather whose lengths are not known from before.

    Raises:
        ValueError: the plan is wrong; ``comm`` is not an intracommunicator.
        PeerError: another rank's plan is wrong, or differs from this one's.
    """

    driver = "MPI"

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any],
        comm: MPI.Comm = MPI.COMM_WORLD,
        *,
        loss_scale: float | Callable[[], float] = 1.0,
        optimizer: SGD | None = None,
        **settings: Any,
    ):
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ValueError(f"comm must be an intracommunicator of mpi4py, not {comm!r}")
        error: Exception | None = None
        try:
            plan = plan_of(method, **settings)
        except Exception as caught:  # the others wait to compare plans: tell them first
            error = caught
            plan = plan_of("none")
        super().__init__(plan, comm.rank, comm.size, loss_scale)
        try:
            self.local.optimizer = described(optimizer)
        except TypeError as caught:
            error = error or caught
        self._tensors: _Tensors | None = None  # those of the last step
        self._step: Step | None = None  # under way
        with self.watchdog.meeting("every rank's Compressor"):
            self._transport = MPITransport(comm)
            self._silence = weakref.finalize(self, self._transport.silence)
            self._collectives = Collectives(self._transport, self.local.observers)
            terms = {**plan.to_dict(), "optimizer": str(optimizer)}
            said = json.dumps([str(error) if error else "", terms, self.watchdog.address()])
            everyone = self._collectives.gather_text("plan", said)
        texts, plans, addresses = zip(*map(json.loads, everyone), strict=True)
        if error:
            raise error
        if any(texts):
            raise failure(texts)
        compare_terms([(plan, {}) for plan in plans])
        self.watchdog.meet(addresses)
        if optimizer is None and may_adapt(plan) and comm.rank == 0:
            log.warn_once(UNKNOWN)

    def close(self) -> None:
        """Free its communicators; collective. Without it they are kept until MPI ends."""
        self._silence.detach()
        self._transport.close()

    # -- the exchange ---------------------------------------------------------------------------------------

    def allreduce(self, array: Array, name: str = "", op: Op = "average", out: Array | None = None) -> Array:
        """Reduce one array over ranks.

        Args:
            array: any shape; float16, float32 or float64.
            name: must be given, as residuals are kept by it; each tensor has its own.
            op: "average" or "sum".
            out: receives the result; may be ``array`` itself. See :meth:`allreduce_many`.

        Returns:
            ``out``, or a new array of the same shape and dtype.

        Raises:
            TypeError: there is no name.
            ValueError, TypeError, PeerError: as :meth:`allreduce_many`.
        """
        if not name:
            raise TypeError(
                "a tensor needs a name of its own, by which its residual is kept: "
                'compressor.allreduce(gradient, name="layer1.weight")'
            )
        return self.allreduce_many({name: array}, op, None if out is None else {name: out})[name]

    def allreduce_many(
        self, arrays: Mapping[str, Array], op: Op = "average", out: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Reduce named arrays over ranks in one step, in which they overlap and small ones travel together.

        If any rank has a number that is not finite, all come out as NaN on all ranks, and state is as it was. After an
        error the Compressor can be used again. The dict's order does not matter.

        Args:
            arrays: by name, any shapes; float16, float32 or float64.
            op: "average" or "sum".
            out: arrays of the same names, shapes and dtypes, contiguous, that receive the results. ``arrays`` itself is
                the fastest: memory that is touched for the first time may cost more than the exchange. After an error
                their contents are undefined.

        Returns:
            The arrays of ``out``, or new ones of the same shapes and dtypes.

        Raises:
            ValueError, TypeError: an input is wrong on this rank; the others raise PeerError.
            PeerError: a rank failed, or ranks differ in names, shapes, dtypes, op, step or loss scale; on every rank.

        What a signal handler of the program's raises, as Ctrl-C does, is raised when the step is over.
        """
        with deferred():
            return self._reduce(arrays, op, out)

    def _reduce(self, arrays: Mapping[str, Array], op: Op, out: Mapping[str, Array] | None) -> dict[str, Array]:
        began = time.perf_counter()
        self._transport.begin()
        self.local.begin_round()
        error: Exception | None = None
        scale = 1.0
        tensors = _Tensors((), (), Terms({}, {}))
        try:
            given = {name: np.asarray(array) for name, array in arrays.items()}
            outs = _checked(out, given)
            tensors = self._known(given, op)
            scale = self.current_loss_scale()
        except Exception as caught:  # the others wait for this rank's status
            error = caught
        step = self._step = Step(self.local, self._collectives, tensors.terms, Agree.FIRST_AND_LAST)
        step.loss_scale = scale
        step.error = error
        step.factor = 1.0 / self.local.world if op == "average" else 1.0
        try:
            step.run(lambda: self._add_all(step, tensors, given, outs))
        finally:
            self._step = None
        self.ledger.steps += step.finite
        self._end_step(step)
        self.local.note_step(began, time.perf_counter())
        self.local.warn_of_what_is_idle()
        return outs

    def _add_all(self, step: Step, tensors: _Tensors, given: Mapping[str, Array], outs: Mapping[str, Array]) -> None:
        """Give all gradients to the engine."""
        for bucket in tensors.buckets:
            work = self.local.turn(bucket).dtype
            flat_outs = [outs[member.name].reshape(-1) for member in bucket.members]
            with np.errstate(over="ignore"):  # a float64 beyond float32 is Inf, and undoes the step as such
                flats = [given[member.name].astype(work, copy=False).reshape(-1) for member in bucket.members]
            pairs = zip(flats, flat_outs, strict=True)
            in_place = all(flat.dtype == out.dtype and flat.ctypes.data == out.ctypes.data for flat, out in pairs)
            step.add(bucket, range(len(flats)), flats, None if in_place else flat_outs)

    def _known(self, arrays: Mapping[str, Array], op: Op) -> _Tensors:
        """What follows from the arrays' names, shapes and dtypes: mostly the same as in the last step.

        Raises:
            ValueError, TypeError: an input is wrong, or ``op``.
        """
        if op not in ("average", "sum"):
            raise ValueError(f'op = {op!r} must be "average" or "sum"')
        given = (op, *((name, array.shape, array.dtype) for name, array in arrays.items()))
        if self._tensors is None or given != self._tensors.given:
            specs = [_spec(name, array.shape, array.dtype) for name, array in arrays.items()]
            tensors = {spec.name: f"{spec.shape} {spec.dtype}" for spec in specs}
            terms = Terms({**self.plan.to_dict(), "op": op}, tensors)
            # largest first: the link is busy with it while the others are encoded
            found = self.plan.buckets(specs, IN_ORDER, ages=self.local.ages())
            buckets = sorted(found, key=lambda bucket: -bucket.spec.size)
            self.local.regroup(buckets)
            self._tensors = _Tensors(given, tuple(buckets), terms)
        return self._tensors

    def _waits_for(self) -> str | None:
        step = self._step
        return step.waits_for() if step else None

    # -- state ----------------------------------------------------------------------------------------------

    def residual(self, name: str) -> Array:
        """This rank's residual of a tensor, in its shape (a copy); zeros where none is kept.

        Raises:
            KeyError: no such tensor has gone through.
        """
        state, index = self.local.find(name)
        shape = state.bucket.members[index].shape
        flat = self.local.residual(name)
        return np.zeros(shape, np.float32) if flat is None else flat.reshape(shape).copy()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` saved on this rank; before the first step, too.

        Raises:
            ValueError: it is of another rank or world, or of other shapes; nothing is changed then. Shapes that are
                not known yet are compared in the first step with them.
        """
        self.local.load_state_dict(saved, np.concatenate)
        self._tensors = None  # they may be grouped in another way now


class _Tensors(NamedTuple):
    """The tensors of a step, their buckets, and what ranks must have alike of them."""

    given: tuple[Any, ...]
    buckets: tuple[Bucket, ...]
    terms: Terms


def _checked(out: Mapping[str, Array] | None, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays that receive results.

    Raises:
        ValueError: one is missing, cannot be written, or is of another shape or dtype.
    """
    if out is None:
        return {name: np.empty(array.shape, array.dtype) for name, array in arrays.items()}
    for name, array in arrays.items():
        there = out.get(name)
        alike = isinstance(there, np.ndarray) and (there.shape, there.dtype) == (array.shape, array.dtype)
        if there is None or not alike or not (there.flags.writeable and there.flags.c_contiguous):
            raise ValueError(f"out[{name!r}] must be a contiguous, writeable array {array.shape} of {array.dtype}")
    return {name: out[name] for name in arrays}


def _spec(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> TensorSpec:
    if not isinstance(name, str):
        raise TypeError(f"a tensor's name is a string, not {name!r}")
    if dtype.kind != "f" or dtype.itemsize > 8:
        raise ValueError(f"{name!r}: {dtype} cannot be reduced; float16, float32 and float64 can")
    return TensorSpec(name, shape, str(dtype))
