"""The MPI driver: every method on numpy arrays, under plain ``mpirun -np N``, without a deep-learning framework.

    from mpi4py import MPI
    from hvdcompress.mpi import Compressor

    comp = Compressor("scalecom", MPI.COMM_WORLD, density=0.01)           # on every rank
    gradient = comp.allreduce(gradient, name="layer1")                    # on every rank: the average
    gradients = comp.allreduce_many({"layer1": g1, "layer2": g2})         # better: they overlap

If one rank raises an error outside of ``allreduce``, the others wait forever, as in any MPI program. Start the program
with ``mpirun -np N python -m mpi4py program.py``, which ends all ranks.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

# Importing mpi4py.MPI initializes MPI. Without mpirun, Open MPI then starts a daemon, which fails if ssh is missing. A
# single rank needs no daemon, so this variable turns it off during the import
_ISOLATED = "OMPI_MCA_ess_singleton_isolated"
_is_set = _ISOLATED in os.environ
os.environ.setdefault(_ISOLATED, "1")
from mpi4py import MPI  # noqa: E402

if not _is_set:
    del os.environ[_ISOLATED]

from hvdcompress.engine import compressor  # noqa: E402
from hvdcompress.engine.agreement import SharedConfig, compare_configs, peer_error  # noqa: E402
from hvdcompress.engine.arrays import PLAIN, plain_array  # noqa: E402
from hvdcompress.engine.collectives import Collectives  # noqa: E402
from hvdcompress.engine.node_step import Levels, new_step  # noqa: E402
from hvdcompress.engine.nodes import Location, find_nodes  # noqa: E402
from hvdcompress.engine.signals import deferred  # noqa: E402
from hvdcompress.engine.step import Agree, Step  # noqa: E402
from hvdcompress.method import Method, TensorSpec  # noqa: E402
from hvdcompress.mpi.transport import MPITransport  # noqa: E402
from hvdcompress.plan import IN_ORDER, Bucket, Plan, plan_of  # noqa: E402

Array = np.ndarray[Any, Any]
Op = Literal["average", "sum"]


class Compressor(compressor.Compressor):
    """Compressed all-reduces of named arrays over one communicator.

    Constructing a Compressor is collective: all ranks of ``comm`` must do it.

    Args:
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, or a plan's dict.
        comm: an mpi4py intracommunicator. The Compressor uses duplicates of it.
        loss_scale: the factor by which gradients are multiplied: a number, or a function that returns it. Residuals
            are kept unscaled, so the factor may change between steps.
        settings: hyper-parameters and plan keys (``min_elements``, ``seed``, ``warmup``, ``bucket_elements``, …).

    Attributes:
        plan: the plan: which method each tensor gets, and with which hyper-parameters.
        ledger: bytes and seconds so far, on this rank. Besides the tensors it lists "plan" (once), "status" (64 bytes
            per step) and "lengths" (8 bytes per all-gather whose lengths are not known in advance).

    Raises:
        ValueError: the plan is wrong; ``comm`` is not an intracommunicator.
        PeerError: the plan of another rank is wrong, or differs from this rank's plan.
    """

    driver = "MPI"

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any],
        comm: MPI.Comm = MPI.COMM_WORLD,
        *,
        loss_scale: float | Callable[[], float] = 1.0,
        **settings: Any,
    ):
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ValueError(f"comm must be an mpi4py intracommunicator, not {comm!r}")
        error: Exception | None = None
        try:
            plan = plan_of(method, **settings)
            find_nodes(plan.nodes, comm.rank, comm.size, None)  # raises if the ranks cannot be distributed
        except Exception as caught:
            # The other ranks wait below to compare plans: tell them about the error before it is raised
            error = caught
            plan = plan_of("none")
        super().__init__(plan, comm.rank, comm.size, loss_scale)
        self._tensors: _Tensors | None = None  # the tensors of the last step
        self._step: Step | None = None  # the open step; None between steps
        with self.watchdog.rendezvous("every rank's Compressor"):
            self._transport = MPITransport(comm)
            self._finalizer = weakref.finalize(self, self._transport.alarms.stop_listening)
            self._collectives = Collectives(self._transport, self.local.observers)
            message = json.dumps([str(error) if error else "", plan.to_dict(), self.watchdog.endpoint()])
            everyone = self._collectives.gather_text("plan", message)
        errors, plans, addresses = zip(*map(json.loads, everyone), strict=True)
        if error:
            raise error
        if any(errors):
            raise peer_error(errors)
        compare_configs([(plan, {}) for plan in plans])
        self.watchdog.set_peers(addresses)
        if plan.nodes == "auto":
            self._use_nodes(_locate(comm))
        nodes = self.local.nodes
        self._network: Collectives | Levels = self._collectives
        if nodes:
            self._network = Levels.over(self._transport, self._transport.split(nodes), self.local.observers)

    def close(self) -> None:
        """Free the Compressor's communicators; collective. Without this call, they are kept until MPI is finalized."""
        self._finalizer.detach()
        self._transport.close()

    # -- the exchange ---------------------------------------------------------------------------------------

    def allreduce(self, array: Array, name: str = "", op: Op = "average", out: Array | None = None) -> Array:
        """Reduce one array over all ranks.

        Args:
            array: this rank's array; any shape; float16, float32 or float64. A subclass of ``numpy.ndarray`` is refused
                because its further contents, such as a mask or a unit, would be lost; so is another byte order.
            name: a name that no other tensor has. It is required, because residuals are kept by name.
            op: "average" or "sum".
            out: an array that receives the result; may be ``array`` itself. See :meth:`allreduce_many`.

        Returns:
            ``out``, or a new array of the same shape and dtype.

        Raises:
            TypeError: ``name`` is missing, or not a string.
            ValueError, PeerError: see :meth:`allreduce_many`.
        """
        if not name:
            raise TypeError(
                "name is missing: residuals are kept by name, so each tensor needs its own: "
                'compressor.allreduce(gradient, name="layer1.weight")'
            )
        return self.allreduce_many({name: array}, op, None if out is None else {name: out})[name]

    def allreduce_many(
        self, arrays: Mapping[str, Array], op: Op = "average", out: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Reduce named arrays over all ranks in one step. Exchanges overlap, and small arrays share a bucket.

        If any array of any rank contains NaN or Inf, all results are NaN on all ranks, and state stays as it was. After
        an error the Compressor can be used again. The order of the arrays does not matter.

        A signal handler of the program that raises an exception, as for Ctrl-C, raises it at the end of the step.

        Args:
            arrays: this rank's arrays by name; any shapes; float16, float32 or float64.
            op: "average" or "sum".
            out: contiguous arrays of the same names, shapes and dtypes that receive the results. ``out=arrays`` is the
                fastest choice: writing to newly allocated memory may take longer than the exchange. After an error,
                the contents of ``out`` are undefined.

        Returns:
            The arrays of ``out``, or new arrays of the same shapes and dtypes.

        Raises:
            ValueError, TypeError: an argument is wrong on this rank; the other ranks raise PeerError.
            PeerError: a rank failed, or ranks differ in names, shapes, dtypes, op, step or loss scale; on every rank.
        """
        with deferred():
            return self._reduce(arrays, op, out)

    def _reduce(self, arrays: Mapping[str, Array], op: Op, out: Mapping[str, Array] | None) -> dict[str, Array]:
        began = time.perf_counter()
        self._transport.begin()
        self.local.begin_round()
        placement = self.local.placement
        error: Exception | None = None
        scale = 1.0
        tensors = _Tensors((), (), SharedConfig({}, {}))
        try:
            given = {name: plain_array(array, repr(name)) for name, array in arrays.items()}
            outs = _check_outs(out, given)
            tensors = self._describe_tensors(given, op)
            scale = self.current_loss_scale()
        except Exception as caught:
            # Raised here, it would leave the other ranks waiting for the status of this one. step.run() raises it
            # after it has told them
            error = caught
        step = self._step = new_step(self.local, self._network, tensors.terms, Agree.FIRST_AND_LAST)
        step.loss_scale = scale
        step.error = error
        step.factor = 1.0 / self.local.world_size if op == "average" else 1.0
        try:
            step.run(lambda: self._add_all(step, tensors, given, outs))
        except BaseException:
            # A rank that failed early has chosen no owners for new tensors, so no rank may keep its choice
            self.local.placement = placement
            self._tensors = None
            raise
        finally:
            self._step = None
        self.ledger.steps += step.finite
        self._end_step(step)
        self.local.note_step(began, time.perf_counter())
        self.local.warn_about_unused()
        return outs

    def _add_all(self, step: Step, tensors: _Tensors, given: Mapping[str, Array], outs: Mapping[str, Array]) -> None:
        """Give all arrays to the engine, bucket by bucket."""
        for bucket in tensors.buckets:
            dtype = self.local.next_step(bucket).dtype
            flat_outs = [outs[member.name].reshape(-1) for member in bucket.members]
            # A float64 value beyond the range of float32 becomes Inf, and the step is then treated as non-finite
            with np.errstate(over="ignore"):
                flats = [given[member.name].astype(dtype, copy=False).reshape(-1) for member in bucket.members]
            pairs = zip(flats, flat_outs, strict=True)
            in_place = all(flat.dtype == out.dtype and flat.ctypes.data == out.ctypes.data for flat, out in pairs)
            step.add(bucket, range(len(flats)), flats, None if in_place else flat_outs)

    def _describe_tensors(self, arrays: Mapping[str, Array], op: Op) -> _Tensors:
        """Return the buckets and terms of these arrays, from the last step if names, shapes and dtypes are the same.

        Raises:
            ValueError, TypeError: a name, a dtype or ``op`` is wrong.
        """
        if op not in ("average", "sum"):
            raise ValueError(f'op = {op!r} must be "average" or "sum"')
        given = (op, *((name, array.shape, array.dtype) for name, array in arrays.items()))
        if self._tensors is None or given != self._tensors.given:
            specs = [_spec(name, array.shape, array.dtype) for name, array in arrays.items()]
            tensors = {spec.name: f"{spec.shape} {spec.dtype}" for spec in specs}
            terms = SharedConfig({**self.plan.to_dict(), "op": op}, tensors)
            # Largest bucket first: its collective overlaps with the encoding of all others
            found = self.local.group(specs, IN_ORDER)
            buckets = sorted(found, key=lambda bucket: -bucket.spec.size)
            self.local.regroup(buckets)
            self._tensors = _Tensors(given, tuple(buckets), terms)
        return self._tensors

    def _waits_for(self) -> str | None:
        step = self._step
        return step.waits_for() if step else None

    # -- state ----------------------------------------------------------------------------------------------

    def residual(self, name: str) -> Array:
        """Return a copy of this rank's residual of a tensor, in the tensor's shape; zeros if the method keeps none.

        Args:
            name: the tensor's name.

        Raises:
            KeyError: no tensor with this name has been reduced.
        """
        state, index = self.local.find(name)
        shape = state.bucket.members[index].shape
        flat = self.local.residual(name)
        return np.zeros(shape, np.float32) if flat is None else flat.reshape(shape).copy()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned on this rank. May be called before the first step.

        Raises:
            ValueError: the state belongs to another rank, number of ranks, or to tensors of other shapes; nothing is
                changed. Shapes that are not known yet are checked in the first step.
        """
        self.local.load_state_dict(saved)
        self._tensors = None  # the restored steps may put tensors into other buckets


def _locate(comm: MPI.Intracomm) -> Location | None:
    """Return where this rank is, by the ranks with which it shares memory; collective.

    Returns:
        None unless nodes have equally many, consecutive ranks.

    Args:
        comm: the communicator.
    """
    inside = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    first = comm.rank - inside.rank
    everyone = comm.allgather((inside.bcast(comm.rank), inside.rank, inside.size))
    local_rank = inside.rank
    local_size = inside.size
    inside.Free()
    consecutive = [(rank - rank % local_size, rank % local_size, local_size) for rank in range(comm.size)]
    if everyone != consecutive:
        return None
    return Location(first // local_size, comm.size // local_size, local_rank, local_size)


class _Tensors(NamedTuple):
    """The tensors of a step.

    Attributes:
        given: op, names, shapes and dtypes, to compare with the next step.
        buckets: the buckets, in the order in which they are started.
        terms: the terms that all ranks must have in common.
    """

    given: tuple[Any, ...]
    buckets: tuple[Bucket, ...]
    terms: SharedConfig


def _check_outs(out: Mapping[str, Array] | None, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays that receive the results: those of ``out``, or new ones.

    Raises:
        ValueError: an array of ``out`` is missing, read-only, non-contiguous, or has another shape or dtype.
    """
    if out is None:
        return {name: np.empty(array.shape, array.dtype) for name, array in arrays.items()}
    for name, array in arrays.items():
        found: Any = out.get(name)
        matches = type(found) in PLAIN and (found.shape, found.dtype) == (array.shape, array.dtype)
        if not matches or not (found.flags.writeable and found.flags.c_contiguous):
            raise ValueError(
                f"out[{name!r}] must be a contiguous, writeable array of shape {array.shape} and dtype {array.dtype}"
            )
    return {name: out[name] for name in arrays}


def _spec(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> TensorSpec:
    if not isinstance(name, str):
        raise TypeError(f"the name of a tensor must be a string, not {name!r}")
    return TensorSpec(name, shape, str(dtype))
