"""All ranks in one process, in lockstep: for tests, for trying out methods, and for simulating many ranks.

>>> import numpy as np
>>> net = Loopback("topk", world_size=2, density=0.5, min_elements=1)
>>> net.allreduce([np.float32([1, 5]), np.float32([3, 4])], name="w")
[array([0. , 4.5], dtype=float32), array([0. , 4.5], dtype=float32)]
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

import hvdcompress.ops
from hvdcompress.engine import late, lockstep
from hvdcompress.engine.agreement import SharedConfig, Status, compare_checksums
from hvdcompress.engine.compressor import Op, plain_array
from hvdcompress.engine.levels import network_over
from hvdcompress.engine.nodes import Nodes, Placement, find_nodes
from hvdcompress.engine.state import RankState
from hvdcompress.engine.step import Framework, Step, evaluate_loss_scale
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.engine.telemetry.reports import Figures, Writer, figures, log_to, openmetrics, summary
from hvdcompress.engine.transport import Request
from hvdcompress.method import Array, Method, TensorSpec
from hvdcompress.ops.spec import Ops
from hvdcompress.parts.momentum import heavy_ball
from hvdcompress.plan import Bucket, Grouping, Plan, Program, plan_of


class Loopback:
    """Simulates ``world_size`` ranks under one plan.

    Args:
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, a plan's dict or YAML file.
        world_size: number of ranks, 1 or more.
        loss_scale: the factor by which gradients are multiplied: a number, or a function that returns the current
            number. Residuals are kept unscaled.
        ops: the array backend; by default the fastest one on the CPU. Methods get arrays of its library, such as
            tensors for ``hvdcompress.ops.torch``.
        grouping: how tensors are grouped into buckets if the plan does not say it; by default they are not.
        **settings: hyper-parameters and plan keys (``min_elements``, ``seed``, ``warmup``, …).

    Attributes:
        ledger: bytes and seconds of all ranks.
        ranks: the state of each rank.
        nodes: the nodes of an exchange with two levels (``nodes`` in the plan); None with one level.
    """

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any],
        world_size: int,
        *,
        loss_scale: float | Callable[[], float] = 1.0,
        ops: Ops | None = None,
        grouping: Grouping | None = None,
        **settings: Any,
    ):
        if world_size < 1:
            raise ValueError(f"world_size = {world_size} must be 1 or more")
        self.plan = plan_of(method, **settings)
        self.world_size = world_size
        self.ops = ops or hvdcompress.ops.fast
        self.loss_scale = loss_scale
        self.grouping = grouping
        self._framework = _Framework(self.ops)
        self.ledger = Ledger(world_size)
        self._last: tuple[tuple[TensorSpec, ...], list[Bucket]] | None = None  # tensors and their buckets
        self.ranks = [RankState(self.plan, rank, world_size, self.ledger) for rank in range(world_size)]
        self.nodes = find_nodes(self.plan.nodes, 0, world_size, None)
        for rank in self.ranks:
            rank.placement = Placement(self.nodes, rank.rank) if self.nodes else None
            rank.copy = lambda parts: self.ops.asarray(joined := np.concatenate(parts), like=joined)

    def allreduce(self, tensors: Sequence[Any], name: str = "tensor", op: Op = "average") -> list[Any]:
        """Reduce named arrays of each rank in one step, as :meth:`hvdcompress.mpi.Compressor.allreduce`.

        Args:
            tensors: of each rank, in rank order, {name: array}; or one array of each rank.
            name: the name of the one array.
            op: "average" or "sum".

        Returns:
            {name: result} of each rank, or the one result of each rank: new arrays of the same shapes and dtypes.

        Raises:
            ValueError: ranks differ in names, shapes or dtypes.
            PeerError: ``verify_every`` in the plan found that the ranks' shared state differs.
        """
        if tensors and not isinstance(tensors[0], Mapping):
            return [out[name] for out in self.allreduce([{name: array} for array in tensors], op=op)]
        gradients: Sequence[Mapping[str, np.ndarray]] = tensors
        buckets = self._buckets(self._specs(gradients, op))
        scale = evaluate_loss_scale(self.loss_scale)
        outs = [{name: np.empty(np.shape(g), np.asarray(g).dtype) for name, g in one.items()} for one in gradients]
        network = _Network(self._carry_out)
        steps: list[Step] = []
        for rank in self.ranks:
            rank.begin_round()
            transport = _Transport(network, "world", rank.rank, self.world_size)
            over = network_over(transport, rank.observers, self.nodes)
            step = Step(rank, over, SharedConfig({}, {}), framework=self._framework)
            step.loss_scale = scale
            step.factor = 1.0 / self.world_size if op == "average" else 1.0
            steps.append(step)
        try:
            for bucket in buckets:
                self._exchange(bucket, network, steps, gradients, outs)
            reduced = Status(*np.max([step.status() for step in steps], axis=0).tolist())
            local_size = self.nodes.local_size if self.nodes else 1
            compare_checksums([step.checksums for step in steps], self.ranks[0].steps_done(), local_size)
        except BaseException:
            for step in steps:
                step.abandon()
            raise
        for step in steps:
            step.apply_status(reduced)
            step.close()
        self.ledger.steps += not reduced.non_finite
        self.ranks[0].warn_about_unused()
        return outs

    def _exchange(
        self,
        bucket: Bucket,
        network: _Network,
        steps: Sequence[Step],
        gradients: Sequence[Mapping[str, np.ndarray]],
        outs: Sequence[Mapping[str, np.ndarray]],
    ) -> None:
        """Run the exchange of one bucket on all ranks."""
        indices = range(len(bucket.members))
        for step, given, out in zip(steps, gradients, outs, strict=True):
            work = step.rank_state.next_step(bucket).dtype
            with np.errstate(over="ignore"):  # float64 values beyond float32 become Inf, which discards the step
                members = [np.asarray(given[m.name]).astype(work, copy=False).ravel() for m in bucket.members]
            outs_of_bucket = [out[m.name].reshape(-1) for m in bucket.members]
            step.add(bucket, indices, self._of_ops(members), self._of_ops(outs_of_bucket))
        while any(step.is_busy for step in steps):
            if not network.results:
                raise RuntimeError(f"{bucket.spec.name!r}: not all ranks yielded a collective in the same round")
            for step in steps:
                step.advance_ready()
        for step in steps:
            step.advance_ready()  # writes the results of methods that use no collective at all

    def trigger(self) -> None:
        """Restart the phases of all methods in the next step."""
        self.ranks[0].trigger_requested = True

    def discard(self) -> None:
        """Undo the last step, as :meth:`hvdcompress.mpi.Compressor.discard`.

        Raises:
            RuntimeError: there is no step to undo.
        """
        for rank in self.ranks:
            rank.discard()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager that reduces gradients uncompressed, as :meth:`hvdcompress.mpi.Compressor.paused`."""
        before = self.ranks[0].paused
        for rank in self.ranks:
            rank.paused = True
        try:
            yield
        finally:
            for rank in self.ranks:
                rank.paused = before

    def report_metrics(self, **metrics: float) -> None:
        """Report training metrics to the methods, such as ``loss=0.7`` or ``learning_rate=0.1``."""
        for rank in self.ranks:
            rank.report_metrics(metrics)

    def add_observer(self, observer: Observer) -> None:
        """Register an observer for the later events of every rank."""
        for rank in self.ranks:
            rank.observers.append(observer)

    def summary(self, rank: int = 0) -> str:
        """Return a table of a rank's work so far, as :meth:`hvdcompress.mpi.Compressor.summary`."""
        return summary(self.figures(rank), self.ledger, rank)

    def log_to(self, writer: Writer, step: int | None = None, rank: int = 0) -> None:
        """Write a rank's figures to a TensorBoard writer, which has ``add_scalar(tag, value, step)``."""
        log_to(writer, step, self.figures(rank), self.ledger, rank)

    def openmetrics(self, rank: int = 0, **labels: str) -> str:
        """Return a rank's figures as OpenMetrics text.

        Args:
            rank: the rank.
            **labels: further labels of every sample.

        Raises:
            ValueError: a label name is malformed, or is "rank", "program" or "counter".
        """
        return openmetrics(self.figures(rank), self.ledger, rank, labels)

    def figures(self, rank: int = 0) -> list[Figures]:
        """Return a rank's figures by program, as numbers."""
        return figures(self.ranks[rank], self.ledger, self.ranks[rank].buckets())

    @contextlib.contextmanager
    def adapted(
        self,
        buffers: Mapping[str, np.ndarray],
        gradients: Mapping[str, np.ndarray],
        *,
        momentum: float,
        nesterov: bool = False,
        dampening: float = 0.0,
        rank: int = 0,
    ) -> Iterator[None]:
        """Context manager around an optimizer's step, as :meth:`hvdcompress.mpi.Compressor.adapted`."""
        moment = heavy_ball(momentum, 1.0 - dampening, nesterov)
        with late.adapted(self.ranks[rank].late.values(), buffers, gradients, moment, lambda array: array.reshape(-1)):
            yield

    def residual(self, name: str, rank: int) -> np.ndarray:
        """Return a copy of a rank's residual of one tensor, in the tensor's shape; zeros if the method keeps none.

        Raises:
            KeyError: no tensor of that name was reduced.
        """
        return self.ranks[rank].residual(name)

    def _specs(self, gradients: Sequence[Mapping[str, np.ndarray]], op: Op) -> dict[str, TensorSpec]:
        if op not in ("average", "sum"):
            raise ValueError(f'op = {op!r} must be "average" or "sum"')
        if len(gradients) != self.world_size:
            raise ValueError(f"expected one array per rank, that is {self.world_size}, got {len(gradients)}")
        specs: dict[str, TensorSpec] = {}
        for rank, given in enumerate(gradients):
            for name, array in given.items():
                array = plain_array(array, f"{name!r}, rank {rank}")
                spec = TensorSpec(name, array.shape, str(array.dtype))
                if rank and specs.get(name) != spec:
                    raise ValueError(f"{name!r}, rank {rank}: {spec} differs from {specs.get(name)} on rank 0")
                specs[name] = spec
            if given.keys() != specs.keys():
                raise ValueError(f"rank {rank} lacks {', '.join(sorted(specs.keys() - given.keys()))}")
        return specs

    def _buckets(self, specs: Mapping[str, TensorSpec]) -> Sequence[Bucket]:
        """Return the buckets of these tensors.

        The buckets of the last call are reused. If the tensors have changed, their states move into new buckets.
        """
        given = tuple(specs.values())
        if self._last is None or self._last[0] != given:
            buckets, *_ = [rank.group(given, self.grouping) for rank in self.ranks]
            for rank in self.ranks:
                rank.regroup(buckets)
            self._last = (given, buckets)
        return self._last[1]

    def _carry_out(self, name: str, requests: Sequence[Request]) -> list[Array]:
        """Perform one collective of all ranks; errors name the tensor."""
        on_host = [replace(request, payload=lockstep.to_numpy(request.payload)) for request in requests]
        try:
            return self._of_ops(lockstep.carry_out(on_host))
        except RuntimeError as error:
            raise RuntimeError(f"{name!r}: {error}") from None

    def _of_ops(self, arrays: Iterable[np.ndarray]) -> list[Array]:
        return [self.ops.asarray(array, like=array) for array in arrays]


LARGE = 1 << 20  #: maximum number of elements of the sample tensors in :func:`warm_up`


def warm_up(plan: Plan, specs: Iterable[TensorSpec], grouping: Grouping | None = None) -> None:
    """Import and compile the kernels that a plan needs on the CPU, by trial steps of two simulated ranks.

    Otherwise the first training step would do so. A kernel that the trial steps do not call is compiled later.

    Args:
        plan: the plan.
        specs: the tensors of the model.
        grouping: how tensors are grouped into buckets.
    """
    tensors: dict[Method, list[TensorSpec]] = {}
    for spec in specs:
        for _, method in plan.program_of(spec).periods:
            tensors.setdefault(method, []).append(spec)
    for method, suited in tensors.items():
        only = replace(plan, program=Program(((0, method),)), rules=(), verify_every=0, nodes=0, source="{}")
        compressed = [spec for spec in suited if spec.size >= plan.min_elements and method.suits(spec)]
        sample = {spec.name: spec for spec in (*_sample(suited)[:1], *_sample(compressed))}.values()
        _try(only, tuple(replace(spec, name=str(number)) for number, spec in enumerate(sample)), grouping)


@cache  # a process may create many Compressors with equal plans
def _try(plan: Plan, specs: tuple[TensorSpec, ...], grouping: Grouping | None) -> None:
    """Run steps of two simulated ranks, at first with ops that the processes of this host share out for compiling."""
    try:
        from hvdcompress.ops.numba.sharing import SharedOps
    except ImportError:  # Numba is not available: there is nothing to compile
        shared = None
    else:
        shared = SharedOps()
        _steps(plan, specs, grouping, shared)
    if shared is None or shared.skipped:
        _steps(plan, specs, grouping, None)


def _steps(plan: Plan, specs: Sequence[TensorSpec], grouping: Grouping | None, ops: Ops | None) -> None:
    net = Loopback(plan, world_size=2, grouping=grouping, ops=ops)
    for rank in net.ranks:
        rank.observers.clear()
    random = np.random.default_rng(0)
    for _ in range(3):  # the first step has no state yet, and phases may alternate
        # NumPy has no bfloat16, and the engine converts it to float32
        gradients = {
            spec.name: random.standard_normal(spec.shape, np.float32).astype(spec.dtype.replace("bfloat16", "float32"))
            for spec in specs
        }
        reduced = net.allreduce([gradients, gradients])[0]
        with net.adapted({name: np.zeros_like(array) for name, array in reduced.items()}, reduced, momentum=0.9):
            pass


def _sample(specs: list[TensorSpec]) -> list[TensorSpec]:
    """Return three representative tensors: the two smallest, and the largest with at most ``LARGE`` elements."""
    ordered = sorted(specs, key=lambda spec: spec.size)
    fitting = [spec for spec in ordered if spec.size <= LARGE]
    if ordered and not fitting:
        shape = list(ordered[0].shape)
        while math.prod(shape) > LARGE:
            shape[shape.index(max(shape))] //= 2
        return [replace(ordered[0], shape=tuple(shape))]
    return [*fitting[:2], *fitting[-1:]]


@dataclass
class _Framework(Framework):
    """Framework functions with a fixed array backend."""

    fixed: Ops

    def ops(self, like: Array) -> Ops:
        """Return the array ops of the network."""
        return self.fixed


@dataclass
class _Network:
    """The collectives of one step that not all ranks have started, and the results that ranks have not taken.

    Keys begin with the name of the group of ranks: all of them or, with two levels, those inside or between nodes.
    """

    carry_out: Callable[[str, Sequence[Request]], list[Array]]
    requests: dict[tuple[str, str], dict[int, Request]] = field(default_factory=dict)
    results: dict[tuple[str, str, int], Array] = field(default_factory=dict)


@dataclass
class _Transport:
    """Transport of one rank of a group. It performs a collective when all ranks of the group have started it.

    A handle is the name of a collective.
    """

    network: _Network
    group: str
    rank: int
    world_size: int
    ordered = False
    native_broadcast = True
    variable_lengths = True
    shards_sums: tuple[str, ...] = ()

    def split(self, nodes: Nodes) -> list[_Transport]:
        """Return transports to the owners of a node, between nodes, and from the owners of a node."""
        node = nodes.node_of(self.rank)
        local_rank = nodes.local_rank(self.rank)
        return [
            _Transport(self.network, f"to the owner on node {node}", local_rank, nodes.local_size),
            _Transport(self.network, f"between nodes, {local_rank}", node, nodes.num_nodes),
            _Transport(self.network, f"from the owner on node {node}", local_rank, nodes.local_size),
        ]

    def start(self, name: str, request: Request) -> str:
        """Start a collective."""
        requests = self.network.requests.setdefault((self.group, name), {})
        requests[self.rank] = request
        if len(requests) == self.world_size:
            del self.network.requests[self.group, name]
            in_order = [requests[rank] for rank in range(self.world_size)]
            for rank, result in enumerate(self.network.carry_out(name.rpartition(".")[0], in_order)):
                self.network.results[self.group, name, rank] = result
        return name

    def ready(self, handle: str) -> bool:
        """Return whether all ranks have started the collective."""
        return (self.group, handle, self.rank) in self.network.results

    def wait(self, handle: str) -> Array:
        """Return the result."""
        return self.network.results.pop((self.group, handle, self.rank))

    def idle(self, handle: str) -> None:
        """Raise an error: in lockstep, no rank ever waits.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"rank {self.rank} waits for {handle!r}, which other ranks have not started")
