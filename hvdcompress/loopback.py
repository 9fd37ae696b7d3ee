"""N ranks in lockstep in one process: for tests, for trying methods out, and for simulating many workers.

>>> import numpy as np
>>> net = Loopback("topk", world=2, density=0.5, min_elements=1)
>>> net.allreduce([np.float32([1, 5]), np.float32([3, 4])], name="w")
[array([0. , 4.5], dtype=float32), array([0. , 4.5], dtype=float32)]
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import numpy as np

import hvdcompress.ops
from hvdcompress.engine import lockstep
from hvdcompress.engine.agreement import SharedConfig, Status
from hvdcompress.engine.collectives import Collectives
from hvdcompress.engine.exchange import Stage
from hvdcompress.engine.safety import verify
from hvdcompress.engine.state import RankState
from hvdcompress.engine.step import Framework, Step, loss_scale_now
from hvdcompress.engine.telemetry.figures import Figures, figures
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.metrics import Writer, openmetrics, scalars
from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.engine.telemetry.summary import summary
from hvdcompress.engine.transport import Request
from hvdcompress.method import Array, Method, TensorSpec
from hvdcompress.ops.spec import Ops
from hvdcompress.optimizers import SGD, described
from hvdcompress.plan import Bucket, Grouping, Plan, Program, plan_of

Op = Literal["average", "sum"]


class Loopback:
    """``world`` ranks under one plan.

    Args:
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, or a plan's dict.
        world: number of ranks, 1 or more.
        loss_scale: a number, or a function that returns one, by which gradients are multiplied; residuals are
            kept unscaled.
        optimizer: describes the optimizer that gets the results, whose momentum is then adapted; without it nothing
            is.
        ops: the array backend (default: the fast CPU one).
        grouping: which tensors travel together where the plan does not say so (default: none do).
        settings: hyper-parameters and plan keys (``min_elements``, ``seed``, ``warmup``, …).

    Attributes:
        ledger: bytes and seconds of all ranks.
        ranks: every rank's state.
    """

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any],
        world: int,
        *,
        loss_scale: float | Callable[[], float] = 1.0,
        optimizer: SGD | None = None,
        ops: Ops | None = None,
        grouping: Grouping | None = None,
        **settings: Any,
    ):
        if world < 1:
            raise ValueError(f"world = {world} must be 1 or more")
        self.plan = plan_of(method, **settings)
        self.world = world
        self.ops = ops or hvdcompress.ops.fast
        self.loss_scale = loss_scale
        self.grouping = grouping
        self._framework = _Framework(self.ops)
        self.ledger = Ledger(world)
        self._last: tuple[tuple[TensorSpec, ...], list[Bucket]] | None = None  # tensors and their buckets
        self.ranks = [RankState(self.plan, rank, world, self.ledger) for rank in range(world)]
        for rank in self.ranks:
            rank.optimizer = described(optimizer)

    def allreduce(self, arrays: Sequence[np.ndarray], name: str = "tensor", op: Op = "average") -> list[np.ndarray]:
        """Reduce one array of each rank.

        Args:
            arrays: one per rank, of equal shape and dtype.
            name: tells tensors apart: residuals are kept by it.
            op: "average" or "sum".

        Returns:
            Each rank's result: new arrays of the same shape and dtype.

        Raises:
            ValueError: there is not one array per rank, or shapes or dtypes differ.
        """
        return [out[name] for out in self.allreduce_many([{name: array} for array in arrays], op)]

    def allreduce_many(self, gradients: Sequence[Mapping[str, np.ndarray]], op: Op = "average") -> list[dict]:
        """Reduce named arrays of each rank in one step, joined into buckets as the plan says.

        If any rank has a number that is not finite, all come out as NaN on all ranks, and state is as it was.

        Raises:
            ValueError: ranks differ in names, shapes or dtypes.
            PeerError: the plan's ``verify_every`` has found that ranks differ in their shared state.
        """
        buckets = self._buckets(self._specs(gradients, op))
        scale = loss_scale_now(self.loss_scale)
        outs = [{name: np.empty(np.shape(g), np.asarray(g).dtype) for name, g in one.items()} for one in gradients]
        medium = _Medium(self.world, self._carry_out)
        steps: list[Step] = []
        for rank in self.ranks:
            rank.begin_round()
            collectives = Collectives(_Transport(rank.rank, medium), rank.observers)
            step = Step(rank, collectives, SharedConfig({}, {}), framework=self._framework)
            step.loss_scale = scale
            step.factor = 1.0 / self.world if op == "average" else 1.0
            steps.append(step)
        try:
            for bucket in buckets:
                self._exchange(bucket, medium, steps, gradients, outs)
            together = Status.of(np.max([step.status().numbers() for step in steps], axis=0).tolist())
            verify.compare([step.checksums for step in steps], self.ranks[0].steps_done())
        except BaseException:
            for step in steps:
                step.abandon()
            raise
        for step in steps:
            step.apply_status(together)
            step.start_comparison()
        for step in steps:
            step.finish_comparison()
            step.close()
        self.ledger.steps += not together.non_finite
        self.ranks[0].warn_about_unused()
        return outs

    def _exchange(
        self,
        bucket: Bucket,
        medium: _Medium,
        steps: Sequence[Step],
        gradients: Sequence[Mapping[str, np.ndarray]],
        outs: Sequence[Mapping[str, np.ndarray]],
    ) -> None:
        """One bucket's exchange on all ranks, to its end."""
        indices = range(len(bucket.members))
        for step, given, out in zip(steps, gradients, outs, strict=True):
            work = step.local.next_step(bucket).dtype
            with np.errstate(over="ignore"):  # a float64 beyond float32 is Inf, and undoes the step as such
                members = [np.asarray(given[m.name]).astype(work, copy=False).ravel() for m in bucket.members]
            step.add(bucket, indices, members, [out[m.name].reshape(-1) for m in bucket.members])
        name = bucket.spec.name
        while waiting := [step for step in steps if step.exchanges[name].stage is Stage.RUNNING]:
            if not medium.results:
                raise RuntimeError(f"{name!r}: not all ranks ask for a collective in one round")
            for step in waiting:
                step.poll()
        for step in steps:
            step.poll()  # writes the results of a method that asks for no collective at all

    def trigger(self) -> None:
        """Restart every method's schedule after the next step."""
        self.ranks[0].trigger_requested = True

    def discard(self) -> None:
        """Take the last step back, as :meth:`hvdcompress.mpi.Compressor.discard`.

        Raises:
            RuntimeError: there is none to take back.
        """
        for rank in self.ranks:
            rank.discard()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager: gradients are reduced uncompressed, as in :meth:`hvdcompress.mpi.Compressor.paused`."""
        before = self.ranks[0].paused
        for rank in self.ranks:
            rank.paused = True
        try:
            yield
        finally:
            for rank in self.ranks:
                rank.paused = before

    def observe(self, **metrics: float) -> None:
        """Show metrics to the methods, ``loss=…`` or ``learning_rate=…``: some restart their schedule on them."""
        for rank in self.ranks:
            rank.observe(metrics)

    def watch(self, observer: Observer) -> None:
        """Tell an observer of every event on every rank from now on."""
        for rank in self.ranks:
            rank.observers.append(observer)

    def summary(self, rank: int = 0) -> str:
        """What a rank has done so far, as a table; as :meth:`hvdcompress.mpi.Compressor.summary`."""
        return summary(self.figures(rank), self.ledger, rank)

    def log_to(self, writer: Writer, step: int | None = None, rank: int = 0) -> None:
        """Write a rank's figures to a writer of TensorBoard's events, which has ``add_scalar(tag, value, step)``."""
        for tag, value in scalars(self.figures(rank), self.ledger, rank).items():
            writer.add_scalar(tag, value, self.ledger.steps if step is None else step)

    def openmetrics(self, rank: int = 0, **labels: str) -> str:
        """A rank's figures as OpenMetrics text.

        Raises:
            ValueError: a label's name is none, or "program" or "counter".
        """
        return openmetrics(self.figures(rank), self.ledger, rank, labels)

    def figures(self, rank: int = 0) -> list[Figures]:
        """A rank's figures by program, as numbers."""
        return figures(self.ranks[rank], self.ledger, self.ranks[rank].buckets())

    def gradient_norm(self) -> float:
        """The norm of the last step's reduced gradients, before clipping.

        Raises:
            RuntimeError: the plan has no ``clip_norm``, so norms are not measured.
        """
        return self.ranks[0].measured_norm()

    def residual(self, name: str, rank: int) -> np.ndarray:
        """A rank's residual of one tensor, in the tensor's shape; zeros where none is kept.

        Raises:
            KeyError: no tensor of that name has gone through.
        """
        state, index = self.ranks[rank].find(name)
        shape = state.bucket.members[index].shape
        residual = self.ranks[rank].residual(name)
        return np.zeros(shape, np.float32) if residual is None else np.asarray(residual).reshape(shape)

    def _specs(self, gradients: Sequence[Mapping[str, np.ndarray]], op: Op) -> dict[str, TensorSpec]:
        if op not in ("average", "sum"):
            raise ValueError(f'op = {op!r} must be "average" or "sum"')
        if len(gradients) != self.world:
            raise ValueError(f"{self.world} ranks need {self.world} arrays, {len(gradients)} came")
        specs: dict[str, TensorSpec] = {}
        for rank, given in enumerate(gradients):
            for name, array in given.items():
                array = np.asarray(array)
                if array.dtype.kind != "f":
                    raise ValueError(f"{name!r}, rank {rank}: {array.dtype} is not a floating-point type")
                spec = TensorSpec(name, array.shape, str(array.dtype))
                if rank and specs.get(name) != spec:
                    raise ValueError(f"{name!r}, rank {rank}: {spec} differs from rank 0's {specs.get(name)}")
                specs[name] = spec
            if given.keys() != specs.keys():
                raise ValueError(f"rank {rank} lacks {', '.join(sorted(specs.keys() - given.keys()))}")
        return specs

    def _buckets(self, specs: Mapping[str, TensorSpec]) -> Sequence[Bucket]:
        """Return the buckets of these tensors, into which what ranks keep of them is brought: mostly as it is."""
        given = tuple(specs.values())
        if self._last is None or self._last[0] != given:
            buckets = self.plan.buckets(given, self.grouping, self.ranks[0].ages())
            for rank in self.ranks:
                rank.regroup(buckets)
            self._last = (given, buckets)
        return self._last[1]

    def _carry_out(self, name: str, requests: Sequence[Request]) -> list[Array]:
        """Every rank's request -> every rank's result."""
        try:
            return lockstep.carry_out(requests)
        except RuntimeError as error:
            raise RuntimeError(f"{name!r}: {error}") from None


LARGE = 1 << 20  #: elements of the tensors that stand for all in :func:`warm_up`


def warm_up(plan: Plan, specs: Iterable[TensorSpec], grouping: Grouping | None = None) -> None:
    """Import and compile what the methods of a plan need on the CPU, by trial steps of two simulated ranks.

    Without it, the first step of a training would. A kernel that the trial does not call is compiled in that step.

    Args:
        plan: the plan.
        specs: the tensors that the plan is for.
        grouping: which tensors travel together.
    """
    tensors: dict[Method, list[TensorSpec]] = {}
    for spec in specs:
        for _, method in plan.program_of(spec).stages:
            tensors.setdefault(method, []).append(spec)
    for method, suited in tensors.items():
        only = replace(plan, program=Program(((0, method),)), rules=(), verify_every=0, source="{}")
        compressed = [spec for spec in suited if spec.size >= plan.min_elements and method.suits(spec)]
        sample = {spec.name: spec for spec in (*_sample(suited)[:1], *_sample(compressed))}.values()
        _try(only, tuple(replace(spec, name=str(number)) for number, spec in enumerate(sample)), grouping)


@cache  # a process may make many Compressors alike
def _try(plan: Plan, specs: tuple[TensorSpec, ...], grouping: Grouping | None) -> None:
    """Take steps of two simulated ranks with random gradients."""
    net = Loopback(plan, world=2, grouping=grouping)
    for rank in net.ranks:
        rank.observers.clear()
    random = np.random.default_rng(0)
    for _ in range(3):  # the first step has no history, and phases may alternate
        net.allreduce_many([{spec.name: _numbers(random, spec) for spec in specs} for _ in range(2)])


def _numbers(random: np.random.Generator, spec: TensorSpec) -> np.ndarray:
    dtype = "float32" if spec.dtype == "bfloat16" else spec.dtype  # which numpy does not have
    return random.standard_normal(spec.shape, np.float32).astype(dtype)


def _sample(specs: list[TensorSpec]) -> list[TensorSpec]:
    """Return three tensors that stand for all: the two smallest, and the largest of at most ``LARGE`` elements."""
    ordered = sorted(specs, key=lambda spec: spec.size)
    fitting = [spec for spec in ordered if spec.size <= LARGE]
    if ordered and not fitting:
        shape = list(ordered[0].shape)
        while math.prod(shape) > LARGE:
            shape[shape.index(max(shape))] //= 2
        return [replace(ordered[0], shape=tuple(shape))]
    return [*fitting[:2], *fitting[-1:]]


class _Framework(Framework):
    """The array ops that the network was given."""

    def __init__(self, ops: Ops):
        self._ops = ops

    def ops(self, like: Array) -> Ops:
        """Return them."""
        return self._ops


class _Medium:
    """What connects the ranks: a collective is carried out once all of them have started it."""

    def __init__(self, world: int, carry_out: Callable[[str, Sequence[Request]], list[Array]]):
        self.world = world
        self.carry_out = carry_out
        self.asked: dict[str, dict[int, Request]] = {}
        self.results: dict[tuple[str, int], Array] = {}

    def start(self, name: str, rank: int, request: Request) -> None:
        asked = self.asked.setdefault(name, {})
        asked[rank] = request
        if len(asked) == self.world:
            del self.asked[name]
            tensor = name.rpartition(".")[0]
            for number, result in enumerate(self.carry_out(tensor, [asked[r] for r in range(self.world)])):
                self.results[name, number] = result


class _Transport:
    """One rank's end of the medium; a handle is the collective's name."""

    ordered = False
    native_broadcast = True
    variable_lengths = True

    def __init__(self, rank: int, medium: _Medium):
        self.rank = rank
        self.world = medium.world
        self.medium = medium

    def start(self, name: str, request: Request) -> str:
        """Hand a request to the medium."""
        self.medium.start(name, self.rank, request)
        return name

    def ready(self, handle: str) -> bool:
        """Whether all ranks have started it."""
        return (handle, self.rank) in self.medium.results

    def wait(self, handle: str) -> Array:
        """The result."""
        return self.medium.results.pop((handle, self.rank))

    def idle(self, handle: str) -> None:
        """Never called: no rank waits for itself.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"rank {self.rank} waits for {handle!r}, which other ranks have not started")
