"""Framework-independent base class of all Compressors: a plan, the state of one rank, its ledger and its observers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from hvdcompress.engine import late
from hvdcompress.engine.agreement import SharedConfig
from hvdcompress.engine.fallback import SPREAD, WORTH, Verdict
from hvdcompress.engine.levels import Network
from hvdcompress.engine.lockstep import gathers
from hvdcompress.engine.nodes import Location, Placement, find_nodes
from hvdcompress.engine.safety.watchdog import Progress, Watchdog
from hvdcompress.engine.saving import checkpoint
from hvdcompress.engine.state import RankState
from hvdcompress.engine.step import Framework, Step, evaluate_loss_scale
from hvdcompress.engine.telemetry import log
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.engine.telemetry.reports import (
    Figures,
    Writer,
    describe,
    explanation,
    figures,
    first_step,
    log_to,
    openmetrics,
    summary,
)
from hvdcompress.method import TensorSpec
from hvdcompress.parts.momentum import Moment, heavy_ball
from hvdcompress.plan import Bucket, Plan

Op = Literal["average", "sum"]
PLAIN = (np.ndarray, np.memmap)  #: types of arrays whose elements are all that they contain
EVERY = 30  #: steps between exchanges of parameters, in estimates of local steps; their guide has accuracies for it


class Compressor:
    """Framework-independent base class of all Compressors.

    Args:
        plan: assigns a method to each tensor.
        rank: this rank.
        world_size: number of ranks.
        loss_scale: the factor by which the loss is multiplied: a number, or a function that returns the current number.
        location: where the launcher has put this rank; None if it does not tell, or if not all of its ranks take part.

    Attributes:
        plan: the plan.
        local: this rank's state.
        is_adapted: whether the momentum of an optimizer was adapted, or need not be.
        ledger: bytes and seconds of this rank so far.
    """

    driver = "unnamed"  #: the name of the driver, which is saved with the state
    _framework = Framework()  #: functions of the driver's framework that the engine calls
    _no_fallback_reason = ""  #: why this driver cannot measure uncompressed steps; empty if it can
    _local_steps = ""  #: how local steps are taken under this driver; empty if they are not
    _network: Network  #: the collectives of this rank, once the driver is connected
    _refused: Mapping[str, str] = {}  #: {plan key that this driver does not support: the reason}

    def __init__(
        self,
        plan: Plan,
        rank: int,
        world_size: int,
        loss_scale: float | Callable[[], float] = 1.0,
        location: Location | None = None,
    ):
        for key, reason in self._refused.items():
            if getattr(plan, key):
                raise ValueError(f"{key} must be 0: {reason}")
        self.plan = plan
        self.loss_scale = loss_scale
        self.ledger = Ledger(world_size, rank)
        self.rank_state = RankState(plan, rank, world_size, self.ledger)
        self.is_adapted = False
        self._step: Step | None = None  # the open step; None between steps
        self._use_nodes(location)
        if world_size == 1:
            log.warn_once(
                "there is only one rank, so nothing is sent, although gradients are compressed as on several; start "
                "several ranks"
            )
        if self.rank_state.fallback.on and self._no_fallback_reason:
            self.rank_state.fallback.on = False
            if rank == 0:
                log.warn_once(f"fallback is ignored, and compression is always kept: {self._no_fallback_reason}")
        # The watchdog's thread must not keep the Compressor alive
        myself = weakref.ref(self)
        self.watchdog = Watchdog(rank, world_size, plan, lambda: _progress_of(myself()))

    def _use_nodes(self, location: Location | None) -> None:
        """Choose between one level and two, as the plan's ``nodes`` says.

        Raises:
            ValueError: the ranks cannot be distributed as the plan says.
        """
        local = self.rank_state
        nodes = find_nodes(self.plan.nodes, local.rank, local.world_size, location)
        methods = [program.main for program in (self.plan.program, *(rule.program for rule in self.plan.rules))]
        sample = TensorSpec("sample", (256, 256))
        if nodes and self.plan.nodes == "auto" and not any(gathers(method, sample) for method in methods):
            # A sum crosses a node's link once, whatever the number of ranks, so a second level would only add to it
            nodes = None
            if local.rank == 0:
                log.info_once("one level, although nodes is auto: the plan's methods only send sums")
        local.placement = Placement(nodes, local.rank) if nodes else None
        if nodes and local.rank == 0:
            log.info_once(f"exchange with two levels: {nodes}, uncompressed inside a node")

    # -- state ----------------------------------------------------------------------------------------------

    def residual(self, name: str) -> Any:
        """Return a copy of this rank's residual of a tensor, in the tensor's shape; zeros if the method keeps none.

        Args:
            name: the tensor's name.

        Raises:
            KeyError: no tensor with this name has been reduced.
        """
        return self.rank_state.residual(name)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: plan, steps and residuals. Ranks differ, so save the state of every rank.

        Its key ``made_by`` has the driver and the versions of the packages in use.
        """
        return self._state()

    def _state(self) -> dict[str, Any]:
        return self.rank_state.state_dict(self.driver)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a value of :meth:`state_dict` that was saved on the same rank; also before the first step.

        Rank 0 logs a warning if the plan or the library's version was another one.

        Raises:
            ValueError: rank, number of ranks or tensors do not match. Then nothing is changed.
        """
        self.rank_state.load_state_dict(saved)

    def save(self, folder: str | Path) -> Path:
        """Write this rank's state to its own file in ``folder``. Call it on every rank, after the same step.

        The file name contains the step. Files older than the previous save are removed.

        Returns:
            The path of the file.

        Raises:
            OSError: writing failed, for example because the disk is full. Earlier files are unchanged.
        """
        return checkpoint.save(self._state(), folder)

    def load(self, folder: str | Path) -> None:
        """Load this rank's state from ``folder``. States of a different number of ranks are re-sharded.

        The newest step that all ranks have saved is loaded. A warning names the missing files of newer steps.

        Raises:
            FileNotFoundError: the folder has no complete set of saved states.
            ValueError: the files are damaged, or the state does not match. Then nothing is changed.
        """
        local = self.rank_state
        self.load_state_dict(checkpoint.load(folder, local.rank, local.world_size, local.nodes))

    def release(self) -> None:
        """Delete residuals and other state, and free their memory. Tensors start again from step 0."""
        self.rank_state.release()

    def _waits_for(self) -> str | None:
        """Describe what the current step waits for; None outside of a step. The watchdog's thread calls it."""
        step = self._step
        return step.waits_for() if step else None

    def _is_over(self) -> bool:
        """Return whether the ranks of this Compressor are gone, as after a reset of elastic training."""
        return False

    def _open_step(self, config: SharedConfig) -> Step:
        """Open a step with the current loss scale, whose error is deferred."""
        step = self._step = Step(self.rank_state, self._network, config, self._framework)
        with step.defer_errors():
            step.loss_scale = evaluate_loss_scale(self.loss_scale)
        return step

    def _run_ordered(
        self, config: SharedConfig, factor: float, add: Callable[[Step], object], error: Exception | None = None
    ) -> Step:
        """Run a whole step on an ordered network; see :meth:`Step.run`.

        Args:
            config: plan and tensors, which must be equal on all ranks.
            factor: factor of sums over ranks.
            add: function that adds all gradients to the step.
            error: an error in the input of this rank.
        """
        step = self._open_step(config)
        step.factor = factor
        step.error = error or step.error
        try:
            step.run(lambda: add(step))
        finally:
            self._step = None
        return step

    def _end_step(self, step: Step) -> None:
        """Count a step; log a report after the first one, and update the fallback with the ranks' votes."""
        self.ledger.steps += step.finite
        fallback = self.rank_state.fallback
        if self.rank_state.paused or not step.finite:
            return
        if self.ledger.steps == 1 and self.rank_state.rank == 0:
            self._log_first_step()
        if self.ledger.steps == 2:
            self._warn_if_not_adapted()
        self.rank_state.end_flush()
        if fallback.compares:
            fallback.decide(step.max_votes)
            if not fallback.compares and self.rank_state.rank == 0:
                sends = f"; the next {SPREAD} steps also send the residuals"
                log.warn_once(f"{fallback}{sends if fallback.verdict is Verdict.FLUSH else ''}")

    def _log_first_step(self) -> None:
        """Log which tensors the first step compressed, or warn that it compressed none."""
        buckets = self._own_buckets()
        if done := first_step(buckets, self.ledger.dense_bytes(), self.ledger.bytes_sent()):
            log.info_once(f"{done}, on rank 0" if self.rank_state.nodes else done)
        elif self.plan.program.main.id != "none":
            largest = max((member.size for bucket in buckets for member in bucket.members), default=0)
            log.warn_once(
                f"no tensor is compressed: min_elements is {self.plan.min_elements}, the largest tensor has {largest} "
                "elements, and rules may select uncompressed methods"
            )

    def _warn_if_not_adapted(self) -> None:
        """Warn on rank 0 if no optimizer's momentum was adapted, although gradients have waited in residuals."""
        if self.rank_state.late and not self.is_adapted and self.rank_state.rank == 0:
            log.warn_once(
                "the momentum of your optimizer is not adapted: on top of residuals it costs accuracy. Put its step "
                'inside of `with compressor.adapted(…):`, or set optimizer_momentum="keep" if it has no momentum'
            )

    def _decision(self) -> str:
        fallback = self.rank_state.fallback
        return f"\n{fallback}" if fallback.on and not fallback.compares else ""

    # -- user interface -------------------------------------------------------------------------------------

    def report_metrics(self, **metrics: float) -> None:
        """Report training metrics to the methods, such as ``loss=0.7`` or ``learning_rate=0.1``.

        Call it on one rank or on several, at any time. If a method requests a restart of the phases on one rank, all
        ranks restart them in the next step. GradiVeQ recomputes its basis when the learning rate drops; FFT sends more
        when the loss gets worse.
        """
        self.rank_state.report_metrics(metrics)

    def trigger(self) -> None:
        """Restart the phases of all methods on all ranks in the next step. A call on one rank is enough."""
        self.rank_state.trigger_requested = True

    def discard(self) -> None:
        """Undo the last step: all state is restored, except for an agreed restart of the phases.

        A decision of ``fallback`` in that step is undone, too. The ledger still counts what the step sent.

        Use it when gradients are thrown away, for example by ``zero_grad()`` after a backward pass for another network:
        otherwise error feedback sends the residuals of these gradients in later steps. Call it on every rank, before
        the next gradient. After a step with an Inf or a NaN it is a no-op.

        Raises:
            RuntimeError: a step is in progress, or there is no step to undo.
        """
        self._refuse_in_step(
            "call discard() after the step: after backward() under DDP, after synchronize() under Horovod"
        )
        self.rank_state.discard()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager that averages gradients uncompressed and leaves residuals, step counts and phases unchanged.

        Use it for gradients whose exact average is needed, or that do not belong to the training. Enter and leave it on
        every rank, between steps.

        Raises:
            RuntimeError: a step is in progress.
        """
        # Not allowed within a step, because a step must not mix both kinds of exchanges
        between = "enter and leave paused() between steps; under Horovod, call synchronize() inside of it"
        self._refuse_in_step(between)
        before = self.rank_state.paused
        self.rank_state.paused = True
        try:
            yield
            self._refuse_in_step(between)
        finally:
            self.rank_state.paused = before

    @contextlib.contextmanager
    def adapted(
        self,
        buffers: Mapping[str, Any],
        gradients: Mapping[str, Any],
        *,
        momentum: Any,
        nesterov: bool = False,
        dampening: Any = 0.0,
        learning_rate: Any = None,
    ) -> Iterator[None]:
        """Context manager around a step of SGD that the program implements itself, to adapt its momentum.

        Gradients that waited in residuals are applied with less momentum; see docs/momentum.md. Optimizers of PyTorch
        and of Keras, if the driver wraps or knows them, need no call. Example::

            reduced = compressor.allreduce(gradients)
            with compressor.adapted(velocity, reduced, momentum=0.9):
                for name, gradient in reduced.items():
                    velocity[name][:] = 0.9 * velocity[name] + gradient
            for name in reduced:
                weights[name] -= 0.1 * velocity[name]

        Args:
            buffers: {tensor name: momentum buffer}, contiguous; each is changed in place, and must be updated in place.
            gradients: {tensor name: gradient} as the step uses them, e.g. after clipping.
            momentum: the momentum factor μ of v = μ·v + (1 − dampening)·gradient.
            nesterov: whether the step applies gradient + μ·v instead of v.
            dampening: as in ``torch.optim.SGD``.
            learning_rate: the learning rate, if the buffer includes it, as in v = μ·v − learning_rate·gradient.

        Raises:
            ValueError: the momentum is not in [0, 1); a tensor has a buffer but no gradient, or one of another size.
        """
        if isinstance(momentum, int | float) and not 0 <= momentum < 1:
            raise ValueError(f"momentum = {momentum!r} must be at least 0 and less than 1")
        rate = 1.0 - dampening if learning_rate is None else -learning_rate
        with self._adapting(buffers, gradients, heavy_ball(momentum, rate, nesterov)):
            yield

    @contextlib.contextmanager
    def _adapting(self, buffers: Mapping[str, Any], gradients: Mapping[str, Any], moment: Moment) -> Iterator[None]:
        self.is_adapted = True
        self.rank_state.tracks_ages = True
        with late.adapted(self.rank_state.late.values(), buffers, gradients, moment, self._flat):
            yield

    def _flat(self, array: Any) -> Any:
        """Return an array as a flat view."""
        flat = array.reshape(-1)
        if not np.shares_memory(flat, array):
            raise ValueError("a buffer is not contiguous, so it cannot be changed in place")
        return flat

    def allreduce(
        self,
        tensors: Any,
        name: str = "",
        op: Op = "average",
        out: Any = None,
    ) -> Any:
        """Reduce named tensors over all ranks in one step; also a single tensor, with its name.

        All ranks call it equally often, with the same names. Exchanges overlap, and small tensors share a bucket. If
        any tensor of any rank contains NaN or Inf, all results are NaN on all ranks, and state stays as it was. After
        an error the Compressor can be used again.

        Under PyTorch, it is for programs with a loop of their own: give the Compressor to no optimizer and to no model
        then, and give it one tensor for each of its parameters. Under MPI, tensors are NumPy arrays of any shape, of
        float16, float32 or float64.

        Args:
            tensors: {name: tensor}; or one tensor.
            name: the name of the one tensor. Residuals are kept by name.
            op: "average" or "sum".
            out: contiguous tensors of the same names, shapes and dtypes that receive the results. ``out=tensors`` is
                the fastest choice: writing to newly allocated memory may take longer than the exchange. After an
                error, the contents of ``out`` are undefined.

        Returns:
            {name: result}; or the one result. The tensors of ``out``, or new ones.

        Raises:
            ValueError, TypeError: an argument is wrong on this rank; the other ranks raise PeerError.
            PeerError: a rank failed, or ranks differ in names, shapes, dtypes, op, step or loss scale; on every rank.
            RuntimeError: a step is in progress.
            NotImplementedError: the driver has no exchange outside of its framework (TensorFlow, FSDP).
        """
        if isinstance(tensors, Mapping):
            return self._allreduce(tensors, op, out)
        if not name:
            raise TypeError(
                "name is missing: residuals are kept by name, so each tensor needs its own: "
                'compressor.allreduce(gradient, name="layer1.weight")'
            )
        return self._allreduce({name: tensors}, op, None if out is None else {name: out})[name]

    def _allreduce(self, tensors: Mapping[str, Any], op: Op, out: Mapping[str, Any] | None) -> dict[str, Any]:
        raise NotImplementedError(f"allreduce() is not available under {self.driver}")

    def close(self) -> None:  # Horovod owns what a Compressor under it uses
        """Free process groups, communicators and threads of the Compressor. Call it between steps, on every rank."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_in_step(self, instead: str) -> None:
        if self._waits_for() is not None:
            raise RuntimeError(f"a step is in progress: {instead}")

    def add_observer(self, observer: Observer) -> None:
        """Register an observer for the events of all later exchanges: encoding, sending, waiting, decoding, commits."""
        self.rank_state.observers.append(observer)

    def describe(self) -> str:
        """Return the method, the tensors and the memory of state of each group of tensors, one line per group."""
        nodes = self.rank_state.nodes
        levels = f"\ntwo levels: {nodes}; each tensor has its state on one rank of a node" if nodes else ""
        return describe(self._buckets()) + levels + self._decision()

    def summary(self, link_gbits: float | None = None) -> str:
        """Return a table of this rank's work so far and an analysis of the step time, at most 80 columns wide.

        The table has one line per program of methods; see :func:`hvdcompress.engine.telemetry.reports.summary`. If the
        driver sees steps (not TensorFlow and FSDP2), the analysis gives the means of recent steps: computing, codec
        time, waiting, bytes, and the duration of uncompressed steps if some were measured. All times are measured on
        the host.

        Args:
            link_gbits: speed of this rank's network link in Gbit/s. It separates the time of the link from waiting for
                slower ranks.
        """
        table = summary(self.figures(), self.ledger, self.rank_state.rank)
        step = self.ledger.mean_step()
        if step is None:
            return table + self._decision()
        return f"{table}\n{explanation(step, self._uncompressed_steps(step.computing), link_gbits)}"

    def _uncompressed_steps(self, computing: float) -> str:
        """Describe the measured duration of uncompressed steps, and estimate that of local steps.

        Args:
            computing: seconds of a step in which nothing is exchanged.
        """
        fallback = self.rank_state.fallback
        if not fallback.on:
            return "uncompressed steps: not measured; fallback: true in the plan measures some"
        if fallback.compares:
            return "uncompressed steps: being measured"
        compressed, dense = (1e3 * each for each in fallback.seconds)
        text = f"uncompressed steps: {dense:.1f} ms, compressed {compressed:.1f} ms; compression is {fallback.outcome}"
        # An exchange of parameters takes at most as long as one of uncompressed gradients
        local = 1e3 * computing + max(0.0, dense - 1e3 * computing) / EVERY
        if self._local_steps and local < WORTH * min(dense, compressed):
            text += f"\n  {self._local_steps} = {EVERY}: about {local:.1f} ms, with exchanges of parameters"
        return text

    def log_to(self, writer: Writer, step: int | None = None) -> None:
        """Write this rank's figures to a TensorBoard writer, under ``hvdcompress/``.

        Args:
            writer: an object with ``add_scalar(tag, value, step)``, such as torch.utils.tensorboard.SummaryWriter.
            step: step of the training; by default the number of steps done.
        """
        log_to(writer, step, self.figures(), self.ledger, self.rank_state.rank)

    def openmetrics(self, **labels: str) -> str:
        """Return this rank's figures as OpenMetrics text.

        Args:
            **labels: further labels of every sample, such as ``job="a"``.

        Raises:
            ValueError: a label name is malformed, or is "rank", "program" or "counter".
        """
        return openmetrics(self.figures(), self.ledger, self.rank_state.rank, labels)

    def figures(self) -> list[Figures]:
        """Return this rank's figures by program, as numbers. It reads every residual once.

        With two levels, these are the figures of the tensors that this rank exchanges between nodes.
        """
        return figures(self.rank_state, self.ledger, self._own_buckets(), self._to_host)

    def _to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """Convert an array of state to a NumPy array."""
        return np.asarray(array)

    def _buckets(self) -> list[Bucket]:
        """Return the buckets that are known so far."""
        return self.rank_state.buckets()

    def _own_buckets(self) -> list[Bucket]:
        """Return the buckets that this rank exchanges: with two levels, other ranks of its node exchange others."""
        return [bucket for bucket in self._buckets() if self.rank_state.owns(bucket)]


def _progress_of(compressor: Compressor | None) -> Progress | None:
    """Return the progress of a rank for its watchdog."""
    if compressor is None or compressor._is_over():
        return None
    # list() because the main thread may replace the dictionary in the middle of this call
    steps = max((state.step for state in list(compressor.rank_state.states.values())), default=0)
    ledger = compressor.ledger
    counts = (ledger.steps, ledger.collectives(), ledger.dense_bytes(), ledger.seconds()["codec"])
    return Progress(steps, compressor._waits_for(), first=ledger.steps == 0, counts=counts)


def plain_array(given: Any, what: str) -> np.ndarray[Any, Any]:
    """Return a tensor as an array of float16, float32 or float64.

    Args:
        given: an array, or an object that ``numpy.asarray`` converts.
        what: the name of the tensor, for messages.

    Raises:
        TypeError: an array contains more than its elements, such as a mask or a unit, which would be lost.
        ValueError: the dtype or the byte order is another one.
    """
    if isinstance(given, np.ndarray) and type(given) not in PLAIN:
        kind = f"{type(given).__module__}.{type(given).__qualname__}"
        raise TypeError(f"{what} is a {kind}: only its elements would be reduced; give a plain array, numpy.asarray(…)")
    array = np.asarray(given)
    if array.dtype.kind != "f" or array.dtype.itemsize > 8 or not array.dtype.isnative:
        raise ValueError(
            f"{what}: {array.dtype} cannot be reduced; use float16, float32 or float64, in native byte order"
        )
    return array
