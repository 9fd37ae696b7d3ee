"""The MPI driver: every method on numpy arrays, under plain ``mpirun -np N``, without a deep-learning framework.

    from mpi4py import MPI
    from hvdcompress.mpi import Compressor

    comp = Compressor("scalecom", MPI.COMM_WORLD, density=0.01)           # on every rank
    gradient = comp.allreduce(gradient, name="layer1")                    # on every rank: the average
    gradients = comp.allreduce({"layer1": g1, "layer2": g2})              # better: they overlap

If one rank raises an error outside of ``allreduce``, the others wait forever, as in any MPI program. Start the program
with ``mpirun -np N python -m mpi4py program.py``, which ends all ranks.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Unpack

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
from hvdcompress.engine.collectives import Collectives  # noqa: E402
from hvdcompress.engine.compressor import PLAIN, Op, plain_array  # noqa: E402
from hvdcompress.engine.levels import network_over  # noqa: E402
from hvdcompress.engine.nodes import Location, find_nodes  # noqa: E402
from hvdcompress.engine.signals import deferred  # noqa: E402
from hvdcompress.engine.step import Step  # noqa: E402
from hvdcompress.method import Method, TensorSpec  # noqa: E402
from hvdcompress.mpi.transport import MPITransport  # noqa: E402
from hvdcompress.plan import IN_ORDER, Bucket, Plan, plan_of  # noqa: E402
from hvdcompress.settings import Settings  # noqa: E402

Array = np.ndarray[Any, Any]


class Compressor(compressor.Compressor):
    """Compressed all-reduces of named arrays over one communicator.

    Constructing a Compressor is collective: all ranks of ``comm`` must do it.

    Args:
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, a plan's dict or YAML file.
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
        method: str | Method | Plan | Mapping[str, Any] = "auto",
        comm: MPI.Comm = MPI.COMM_WORLD,
        *,
        loss_scale: float | Callable[[], float] = 1.0,
        **settings: Unpack[Settings],
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
        with self.watchdog.rendezvous("every rank's Compressor"):
            self._transport = MPITransport(comm)
            self._finalizer = weakref.finalize(self, self._transport.alarms.stop_listening)
            message = json.dumps([str(error) if error else "", plan.to_dict(), self.watchdog.endpoint()])
            everyone = Collectives(self._transport, self.rank_state.observers).gather_text("plan", message)
        errors, plans, addresses = zip(*map(json.loads, everyone), strict=True)
        if error:
            raise error
        if any(errors):
            raise peer_error(errors)
        compare_configs([(plan, {}) for plan in plans])
        self.watchdog.set_peers(addresses)
        if plan.nodes == "auto":
            self._use_nodes(_locate(comm))
        self._network = network_over(self._transport, self.rank_state.observers, self.rank_state.nodes)

    def close(self) -> None:
        """Free the Compressor's communicators; collective. Without this call, they are kept until MPI is finalized."""
        self._finalizer.detach()
        self._transport.close()

    # -- the exchange ---------------------------------------------------------------------------------------

    @deferred()
    def _allreduce(self, arrays: Mapping[str, Array], op: Op, out: Mapping[str, Array] | None) -> dict[str, Array]:
        began = time.perf_counter()
        self.rank_state.begin_round()
        placement = self.rank_state.placement
        error: Exception | None = None
        tensors = _Tensors((), (), SharedConfig({}, {}))
        try:
            given = {name: plain_array(array, repr(name)) for name, array in arrays.items()}
            outs = _check_outs(out, given)
            tensors = self._describe_tensors(given, op)
        except Exception as caught:
            # Raised here, it would leave the other ranks waiting for the status of this one. step.run() raises it
            # after it has told them
            error = caught
        factor = 1.0 / self.rank_state.world_size if op == "average" else 1.0
        try:
            step = self._run_ordered(
                tensors.config, factor, lambda step: self._add_all(step, tensors, given, outs), error
            )
        except BaseException:
            # A rank that failed early has chosen no owners for new tensors, so no rank may keep its choice
            self.rank_state.placement = placement
            self._tensors = None
            raise
        self._end_step(step)
        self.rank_state.note_step(began, time.perf_counter())
        self.rank_state.warn_about_unused()
        return outs

    def _add_all(self, step: Step, tensors: _Tensors, given: Mapping[str, Array], outs: Mapping[str, Array]) -> None:
        """Give all arrays to the engine, bucket by bucket."""
        for bucket in tensors.buckets:
            dtype = self.rank_state.next_step(bucket).dtype
            flat_outs = [outs[member.name].reshape(-1) for member in bucket.members]
            # A float64 value beyond the range of float32 becomes Inf, and the step is then treated as non-finite
            with np.errstate(over="ignore"):
                flats = [given[member.name].astype(dtype, copy=False).reshape(-1) for member in bucket.members]
            pairs = zip(flats, flat_outs, strict=True)
            in_place = all(flat.dtype == out.dtype and flat.ctypes.data == out.ctypes.data for flat, out in pairs)
            step.add(bucket, range(len(flats)), flats, None if in_place else flat_outs)

    def _describe_tensors(self, arrays: Mapping[str, Array], op: Op) -> _Tensors:
        """Return the buckets and config of these arrays, from the last step if names, shapes and dtypes are the same.

        Raises:
            ValueError, TypeError: a name, a dtype or ``op`` is wrong.
        """
        if op not in ("average", "sum"):
            raise ValueError(f'op = {op!r} must be "average" or "sum"')
        given = (op, *((name, array.shape, array.dtype) for name, array in arrays.items()))
        if self._tensors is None or given != self._tensors.given:
            if wrong := [name for name in arrays if not isinstance(name, str)]:
                raise TypeError(f"the name of a tensor must be a string, not {wrong[0]!r}")
            specs = [TensorSpec(name, array.shape, str(array.dtype)) for name, array in arrays.items()]
            tensors = {spec.name: f"{spec.shape} {spec.dtype}" for spec in specs}
            config = SharedConfig({**self.plan.to_dict(), "op": op}, tensors)
            # Largest bucket first: its collective overlaps with the encoding of all others
            found = self.rank_state.group(specs, IN_ORDER)
            buckets = sorted(found, key=lambda bucket: -bucket.spec.size)
            self.rank_state.regroup(buckets)
            self._tensors = _Tensors(given, tuple(buckets), config)
        return self._tensors

    # -- state ----------------------------------------------------------------------------------------------

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned on this rank. May be called before the first step.

        Raises:
            ValueError: the state belongs to another rank, number of ranks, or to tensors of other shapes; nothing is
                changed. Shapes that are not known yet are checked in the first step.
        """
        super().load_state_dict(saved)
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
        config: the config that all ranks must have in common.
    """

    given: tuple[Any, ...]
    buckets: tuple[Bucket, ...]
    config: SharedConfig


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
