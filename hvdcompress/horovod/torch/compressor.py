"""The Horovod driver for PyTorch: every method behind the unmodified ``hvd.DistributedOptimizer(compression=…)``.

Horovod calls ``compress(gradient)`` from backward hooks, all-reduces the tensor that it returns (the *stock*
all-reduce), and calls ``decompress(output, ctx)`` inside ``synchronize()``. It passes neither a name nor a step. So
``compress`` finds the parameter by identity, starts its own, named collectives, and returns a placeholder for the stock
all-reduce: a probe whose reduction tells Average from Sum. See ``docs/drivers.md``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Unpack

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import _basics
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvdcompress._torch.compressor import TensorCompressor, named
from hvdcompress.engine.agreement import PeerError, SharedConfig, compare_configs
from hvdcompress.engine.collectives import Collectives
from hvdcompress.engine.exchange import SMALL
from hvdcompress.engine.levels import Network, network_over
from hvdcompress.engine.nodes import Location
from hvdcompress.engine.state import RankState
from hvdcompress.engine.step import Step
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.horovod.process_sets import factor_of, has_changed, number_compressor
from hvdcompress.horovod.torch.transport import HorovodTransport
from hvdcompress.launchers import is_elastic
from hvdcompress.method import Method
from hvdcompress.plan import BY_NAME, Bucket, Plan, plan_of
from hvdcompress.settings import Settings

_hook_handles: list[Any] = []  # at most one: of the optimizers' pre-step hook, registered with the first Compressor


@dataclass(eq=False, slots=True)
class GradientContext:
    """The ``ctx`` that Horovod passes from ``compress`` to ``decompress``: one gradient of one step.

    Attributes:
        gradient: the gradient, in the parameter's ``.grad``.
        name: the name of its parameter; empty until it is known.
        passed: whether the stock all-reduce reduces the gradient itself.
    """

    gradient: torch.Tensor
    name: str = ""
    passed: bool = False


class Clock:
    """Measures the time of one step: Horovod calls ``compress`` for each gradient, and then ``decompress`` for each.

    Attributes:
        began: time of the first gradient (``time.perf_counter()``, seconds).
        waited: seconds between calls of ``decompress``, in which Horovod waits for the stock all-reduces.
    """

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._codec = ledger.seconds()["codec"]
        self.began = self._returned = time.perf_counter()
        self.waited = 0.0
        self._hooks_ended: float | None = None  # when the last call of compress() returned
        self._codec_in_hooks = 0.0  # codec time until then, in seconds

    def leave(self) -> None:
        """Record that ``compress`` or ``decompress`` returns to Horovod."""
        self._returned = time.perf_counter()

    def enter_decompress(self) -> None:
        """Record that Horovod calls ``decompress``."""
        if self._hooks_ended is None:
            self._hooks_ended = self._returned
            self._codec_in_hooks = self._ledger.seconds()["codec"] - self._codec
        self.waited += time.perf_counter() - self._returned

    def note_step(self, local: RankState) -> None:
        """Record the time of the step at its end.

        The backward pass is blocked while gradients are encoded in its hooks, and from the last hook to the end.
        """
        now = time.perf_counter()
        blocked = now - (self._hooks_ended or self.began) + self._codec_in_hooks
        local.note_step(self.began, now, blocked, self.waited)


@dataclass(eq=False)
class Arrivals:
    """The gradients that have arrived in the open step.

    Attributes:
        step: the engine's step.
        clock: measures the time of the step.
        passing: contexts of the gradients that the stock all-reduce reduces, until the engine is told about them.
        order: parameter names in the order in which their gradients arrived.
        outstanding: names of the gradients for which ``decompress`` has not been called yet.
        launched: whether every exchange is in flight, which is the case from the first ``decompress`` on.
    """

    step: Step
    clock: Clock
    passing: list[GradientContext] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    outstanding: set[str] = field(default_factory=set)
    launched: bool = False


class Compressor(TensorCompressor, hvd.compression.Compressor):
    """Compresses the gradients of one optimizer: ``hvd.DistributedOptimizer(…, compression=Compressor(…))``.

    Each optimizer needs its own Compressor. Make several in the same order on every rank.

    Args:
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, a plan's dict or YAML file.
        named_parameters: as given to the optimizer, for example ``model.named_parameters()``. State is kept by name.
            Parameters that the optimizer does not have, or that require no gradient now, are not exchanged. A
            parameter that is frozen later keeps its residual.
        process_set: the Horovod process set that the optimizer uses (default: all ranks).
        loss_scale: the factor by which the loss is multiplied: a number, or a function that returns it, such as
            ``scaler.get_scale``. Residuals are kept unscaled, so the factor may change between steps.
        backend: "auto" (the numpy core for CPU gradients, Triton for CUDA where it is installed), or "torch".
        settings: hyper-parameters and plan keys (``min_elements``, ``seed``, ``warmup``, ``bucket_elements``, …).

    Attributes:
        plan: the plan: which method each tensor gets, and with which hyper-parameters.
        ledger: bytes and seconds so far, on this rank.
        parameters: the parameters by name.

    Raises:
        ValueError: the plan is wrong; two parameters have the same name; ``hvd.init()`` was not called; a Compressor
            under DistributedDataParallel already has one of the parameters.
    """

    driver = "Horovod"
    _local_steps = "LocalSteps, every"
    _grouping = BY_NAME

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any] = "auto",
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] = (),
        *,
        process_set: Any = hvd.global_process_set,
        loss_scale: float | Callable[[], float] = 1.0,
        backend: str = "auto",
        **settings: Unpack[Settings],
    ):
        if not hvd.is_initialized():
            raise ValueError("call hvd.init() before making a Compressor")
        plan = plan_of(method, **settings)
        rank = process_set.rank()
        world_size = process_set.size()
        pairs = named(named_parameters)
        trained = [(name, parameter) for name, parameter in pairs if parameter.requires_grad]
        for name, parameter in trained:
            if parameter.is_complex():
                raise ValueError(
                    f"{name!r} is {parameter.dtype}: Horovod cannot reduce complex gradients; store the parameter as "
                    "real numbers (torch.view_as_real)"
                )
        location = None
        if plan.nodes:
            location = _location(process_set, plan.nodes)
        super().__init__(plan, rank, world_size, trained, loss_scale, backend, location)
        self._framework.parameters = dict(pairs)
        self.process_set = process_set
        self._arrivals: Arrivals | None = None
        number = number_compressor(hvd, partial(torch.tensor, device="cpu"), process_set, self.watchdog)
        self.prefix = f"hvdcompress.set{process_set.process_set_id}.compressor{number}"
        self._probe = torch.tensor(
            [1.0 / world_size, (self.rank_state.rank + 1.0) / world_size**2], dtype=torch.float32, device="cpu"
        )
        self._network = self._make_network()
        self._last_order: list[str] = []  # order of the gradients in the last step, as a guess for the next one
        self._plans_compared = False  # True after the first step, in which the ranks compare their plans
        self._hooked_parameters: set[int] = set()  # ids of the parameters that Horovod has hooked for this Compressor
        self._failure: PeerError | None = None  # raised again by every later call
        if not _hook_handles:
            _hook_handles.append(register_optimizer_step_pre_hook(_before_step))

    def _make_network(self) -> Network:
        """Return the collectives of all ranks; with two levels, also those of nodes, which all ranks make.

        Raises:
            PeerError: the nodes differ between ranks.
        """
        transport = HorovodTransport(self.prefix, self.process_set)
        observers = self.rank_state.observers
        nodes = self.rank_state.nodes
        if _one_level_reason():
            return network_over(transport, observers)
        with self.watchdog.rendezvous("every rank's Compressor"):
            # A rank that alone makes process sets would wait for the others forever
            everyone = Collectives(transport, observers).gather_text("plan", str(nodes or "one level"))
            compare_configs([({"nodes": each}, {}) for each in everyone])
            return network_over(transport, observers, nodes)

    # -- Horovod's interface --------------------------------------------------------------------------------

    def compress(self, tensor: torch.Tensor = None) -> tuple[torch.Tensor, GradientContext]:  # type: ignore[assignment]
        """Start the exchange of a gradient. Horovod calls this method from a backward hook.

        Errors of this rank are not raised here but by :meth:`decompress`, on all ranks. The other ranks are waiting in
        the stock all-reduce of this tensor, so this rank must still take part in it.

        Args:
            tensor: the gradient of one of the parameters.

        Returns:
            The tensor that Horovod all-reduces, and the context for :meth:`decompress`.

        Raises:
            PeerError: an earlier step has failed.
            HorovodInternalError: another rank is gone.
        """
        # Horovod's own compressors are classes with static methods, so people pass the class and not an instance
        if not isinstance(self, Compressor):
            raise TypeError(
                "compression=Compressor is the class: give an instance, "
                'compression=Compressor("topk", model.named_parameters())'
            )
        if self._failure:
            raise self._failure
        if not self._plans_compared:
            # The caller is a method of Horovod's optimizer, which is not passed to compress()
            optimizer = sys._getframe(1).f_locals.get("self")
            self._hooked_parameters |= {id(parameter) for parameter in getattr(optimizer, "_requires_update", ())}
        ctx = GradientContext(tensor)
        arrivals = self._open_arrivals()
        step = arrivals.step
        try:
            ctx.name = self._identify(tensor, len(arrivals.order))
            self._add(arrivals, ctx)
            # While plans may still differ, ranks may start collectives of different shapes. Waiting for one would
            # raise Horovod's error about shapes in place of ours about plans
            if self._plans_compared:
                step.poll()
        except HorovodInternalError:
            self._discard_step()  # elastic training catches this error and goes on, so state must be as it was
            raise
        except Exception as error:
            step.fail(error)
        stock = self._stock_input(ctx, step)
        arrivals.clock.leave()
        return stock, ctx

    def decompress(self, output: torch.Tensor, ctx: GradientContext | None) -> torch.Tensor:
        """Advance the exchanges of the step, and finish them at its last gradient.

        Args:
            output: the result of the stock all-reduce.
            ctx: the context that :meth:`compress` returned.

        Returns:
            The gradient. It holds the reduced values only when the last call of the step has returned. That is
            early enough: Horovod's ``synchronize()`` calls this method for all gradients before it returns.

        Raises:
            PeerError: a rank failed, or ranks disagree; on every rank, with the same message.
            HorovodInternalError: another rank is gone.
        """
        if ctx is None:
            self._refuse_sparse(output)
            return output
        if self._failure:
            raise self._failure
        arrivals = self._arrivals
        assert arrivals is not None
        arrivals.clock.enter_decompress()
        try:
            if not arrivals.launched:
                self._launch(arrivals)
            self._resume(arrivals, ctx, output)
            if not arrivals.outstanding:
                arrivals.step.finish()
                # Horovod also reduces the old gradient of a parameter that was frozen after the optimizer was made
                for name in self._frozen & set(arrivals.order):
                    self.parameters[name].grad.zero_()  # type: ignore[union-attr]
        except HorovodInternalError:
            self._discard_step()
            raise
        except PeerError as failure:
            self._failure = failure
            self._discard_step()
            raise
        if not arrivals.outstanding:
            if not self._plans_compared:
                self._keep_hooked_parameters()
            self._last_order = arrivals.order
            self._arrivals = None
            self._step = None
            self._plans_compared = True
            self._end_step(arrivals.step)
            arrivals.clock.note_step(self.rank_state)
        arrivals.clock.leave()
        return ctx.gradient

    # -- a step ---------------------------------------------------------------------------------------------

    def _open_arrivals(self) -> Arrivals:
        """Return the open step. Discard an unfinished one and start a new one."""
        if self._arrivals is None or self._arrivals.launched:
            if self.process_set.size() != self.rank_state.world_size:
                raise RuntimeError(
                    f"the Compressor was made for {self.rank_state.world_size} ranks, and the process set has "
                    f"{self.process_set.size()} now; make the Compressor and the optimizer again"
                )
            self._discard_step()
            self._arrivals = Arrivals(self._begin_step(), Clock(self.ledger))
        return self._arrivals

    def _begin_step(self) -> Step:
        self._note_frozen()
        self.rank_state.begin_round()
        step = self._open_step(self._config)
        with step.defer_errors():
            self.watchdog.endpoint()  # this starts the watchdog
        return step

    def _run_step(self, add: Callable[[Step], None], factor: float) -> None:
        step = self._begin_step()
        step.factor = factor
        try:
            with step.defer_errors():
                add(step)
            step.send_status()
            if not self._plans_compared:
                self._end_first_status(step)
            step.finish()
        except Exception:
            step.abandon()
            raise
        finally:
            self._step = None
        self._plans_compared = True
        self._end_step(step)

    def _end_first_status(self, step: Step) -> None:
        """In the first step: compare plans with the other ranks, and exchange the watchdogs' addresses."""
        step.receive_status()
        if self.watchdog.on:
            self.watchdog.set_peers(step.collectives.gather_text("watchdog", self.watchdog.endpoint()))

    def _keep_hooked_parameters(self) -> None:
        """After the first step, keep only the parameters that Horovod has hooked for this Compressor.

        A program with several optimizers may give all parameters of the model to each Compressor.
        """
        hooked = {name: param for name, param in self.parameters.items() if id(param) in self._hooked_parameters}
        if 0 < len(hooked) < len(self.parameters):
            others = self.parameters.keys() - hooked.keys()
            self.parameters = hooked
            self._config = SharedConfig(self._config.plan, {name: self._config.tensors[name] for name in hooked})
            self._group(self.rank_state.ages())
            self.rank_state.regroup(self._buckets())
            self.rank_state.forget(others)

    def _is_over(self) -> bool:
        return has_changed(self.process_set, self.rank_state.world_size)

    def _discard_step(self) -> None:
        """Discard the open step, if there is one. State stays as it was before the step."""
        if self._arrivals:
            self._arrivals.step.abandon()
        self._arrivals = None
        self._step = None

    def _add(self, arrivals: Arrivals, ctx: GradientContext) -> None:
        """Give a gradient to the engine, or leave it to the stock all-reduce if its method changes nothing."""
        if ctx.name in arrivals.outstanding:
            raise RuntimeError(
                f"a second gradient of {ctx.name!r} arrived before the first was used: call optimizer.step() "
                "(or synchronize()) after every backward_passes_per_step backward passes"
            )
        arrivals.order.append(ctx.name)
        arrivals.outstanding.add(ctx.name)
        bucket, index = self._bucket_and_index[ctx.name]
        # In the first step, plans may differ between ranks. A rank that sent the gradient here, and another one the
        # probe, would get Horovod's error about unequal shapes instead of ours about unequal plans
        if self._plans_compared and self._passes_through(bucket):
            ctx.passed = True
            arrivals.passing.append(ctx)
            return
        vector = self._framework.vector(arrivals.step, bucket, ctx.gradient)
        arrivals.step.add(bucket, [index], [vector])

    def _passes_through(self, bucket: Bucket) -> bool:
        """Return whether the stock all-reduce reduces the gradient itself. It knows nothing of two levels."""
        return self.rank_state.nodes is None and self.rank_state.next_step(bucket).passes_through

    def _pass_on(self, arrivals: Arrivals) -> None:
        """Tell the engine about the gradients that stock all-reduces carry, which may be in flight already."""
        step = arrivals.step
        small: dict[torch.device, list[torch.Tensor]] = {}
        for ctx in arrivals.passing:
            gradient = ctx.gradient
            bucket, _ = self._bucket_and_index[ctx.name]
            vector = self._framework.flat(gradient)
            step.pass_through(bucket, gradient, vector)
            # A plan without state has nothing to undo, and a sum that contains NaN or Inf is non-finite by itself
            if self.plan.stateless:
                continue
            if gradient.numel() < SMALL:  # one call for many small gradients: a call costs more than the copy
                small.setdefault(gradient.device, []).append(gradient.detach().reshape(-1))
            else:
                step.check_finite(vector)
        for several in small.values():
            step.check_finite(self._framework.flat(torch.cat(several)))

    def _launch(self, arrivals: Arrivals) -> None:
        """At the first ``decompress``: start the remaining exchanges, and send the status of this rank."""
        arrivals.launched = True
        step = arrivals.step
        with step.defer_errors():
            step.fill_missing()
            self._pass_on(arrivals)
        step.send_status()
        # In the first step, wait for the status already here. synchronize() goes on to wait for the stock all-reduces
        # one after the other, and if models differ, only this rank may have started one of them
        if not self._plans_compared:
            self._end_first_status(step)

    def _resume(self, arrivals: Arrivals, ctx: GradientContext, output: torch.Tensor) -> None:
        """At each ``decompress``: take the result of the stock all-reduce, and advance exchanges that have results."""
        arrivals.outstanding.discard(ctx.name)
        step = arrivals.step
        if ctx.passed:  # the gradient is reduced already, as an average or a sum, usually in place
            if output.data_ptr() != ctx.gradient.data_ptr():
                ctx.gradient.detach().copy_(output)
        elif step.factor is None:
            step.factor = factor_of(output.tolist(), self.rank_state.world_size)
        with step.defer_errors():
            step.poll()

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check before a step of an optimizer with this Compressor that all of its gradients are reduced.

        Args:
            optimizer: Horovod's optimizer.

        Raises:
            ValueError: another optimizer shares this Compressor, and has gradients in flight; or Horovod does not
                reduce one of the optimizer's parameters.
        """
        # Horovod's step() wraps the original one, so this hook runs twice. This is the outer call, before
        # synchronize(): gradients are in flight, as they should be
        if self._arrivals and not self._arrivals.launched:
            return
        if self._arrivals:
            outstanding = ", ".join(sorted(self._arrivals.outstanding))
            self._discard_step()
            raise ValueError(
                f"an optimizer takes its step before all gradients of its Compressor are reduced (missing: "
                f"{outstanding}): give each optimizer a Compressor of its own, with its parameters, or call "
                "synchronize() on all of them first"
            )
        hooked = getattr(optimizer, "_requires_update", ())  # empty in a world of one, where Horovod reduces nothing
        if not hooked:
            return
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None and parameter not in hooked:
                name = next(
                    (n for n, p in self._framework.parameters.items() if p is parameter), tuple(parameter.shape)
                )
                raise ValueError(
                    f"the gradient of parameter {name!r} is not reduced: it was added to the optimizer, or made "
                    "trainable, after hvd.DistributedOptimizer was made; make the optimizer and the Compressor again, "
                    "with all parameters"
                )

    # -- stock all-reduces ----------------------------------------------------------------------------------

    def _stock_input(self, ctx: GradientContext, step: Step) -> torch.Tensor:
        """Return the tensor that Horovod all-reduces for a gradient.

        It is the probe [1/p, (rank+1)/p²], with p ranks, whose reduction shows the operation; or the gradient itself,
        if its method changes nothing. A rank that has failed sends the same as the others.
        """
        failed = step.error and self._plans_compared and ctx.name
        if ctx.passed or (failed and self._passes_through(self._bucket_and_index[ctx.name][0])):
            ctx.passed = True
            stock = ctx.gradient.contiguous()
        else:
            stock = self._probe.clone()  # Horovod reduces it in place
        payload = ctx.gradient if ctx.passed else None
        step.collectives.report(ctx.name, "AllReduce", payload, stock.nbytes)
        return stock

    def _identify(self, tensor: torch.Tensor, position: int) -> str:
        """Return the name of the parameter to which a gradient belongs.

        Args:
            tensor: the gradient.
            position: its index among the gradients of this step.

        Raises:
            ValueError: the tensor is not the gradient of any parameter of the Compressor.
        """
        if position < len(self._last_order):  # gradients usually arrive in the order of the last step
            name = self._last_order[position]
            if self.parameters[name].grad is tensor:
                return name
        for name, parameter in self.parameters.items():
            if parameter.grad is tensor:
                return name
            if parameter is tensor:
                raise ValueError("op=hvd.Adasum is not supported: it exchanges parameters, not gradients")
        for name, parameter in self._framework.parameters.items():
            if parameter.grad is tensor:
                raise ValueError(
                    f"{name!r} was frozen when the Compressor was made: make the Compressor again to train it"
                )
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and parameter.grad.is_sparse and parameter.shape == tensor.shape:
                raise ValueError(f"sparse_as_dense=True is not supported (parameter {name!r}): use dense gradients")
        raise ValueError(
            f"a gradient of shape {tuple(tensor.shape)} belongs to no parameter that the Compressor was given: "
            "give the Compressor the same named_parameters as the optimizer, and each optimizer its own Compressor"
        )

    def _refuse_sparse(self, output: torch.Tensor) -> None:
        """Raise ValueError for a sparse gradient, for which Horovod does not call :meth:`compress`."""
        if output.is_sparse:
            names = [n for n, p in self.parameters.items() if p.grad is not None and p.grad.is_sparse]
            raise ValueError(
                f"sparse gradients cannot be compressed ({', '.join(names)}): make them dense "
                "(torch.nn.Embedding(..., sparse=False)), or leave the parameter to another optimizer"
            )


def _one_level_reason() -> str:
    """Return why Horovod cannot make process sets now; empty if it can."""
    if is_elastic():
        return "elastic training changes the ranks of nodes"
    if os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") != "1":
        return "Horovod makes process sets only with HOROVOD_DYNAMIC_PROCESS_SETS=1 in the environment of all ranks"
    return ""


def _location(process_set: Any, setting: int | str) -> Location | None:
    """Return where horovodrun or mpirun has put this rank; None if two levels cannot be chosen automatically.

    Args:
        process_set: the Horovod process set.
        setting: the plan's ``nodes``.

    Raises:
        ValueError: the number of nodes is given, but Horovod cannot make process sets now.
    """
    reason = _one_level_reason()
    if reason and setting != "auto":
        raise ValueError(f"nodes = {setting}: {reason}")
    # Where nodes have different numbers of ranks, Horovod's numbers describe only some of the nodes
    if reason or process_set.size() != hvd.size() or not _basics.is_homogeneous():
        return None
    return Location(hvd.cross_rank(), hvd.cross_size(), hvd.local_rank(), hvd.local_size())


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Optimizer pre-step hook: check the gradients if the optimizer is Horovod's and has a Compressor."""
    compressor = getattr(optimizer, "_compression", None)  # the name that hvd.DistributedOptimizer uses
    if isinstance(compressor, Compressor):
        compressor._check(optimizer)
