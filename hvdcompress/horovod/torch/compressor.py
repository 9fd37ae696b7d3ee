"""The PyTorch driver: any method behind the unmodified ``hvd.DistributedOptimizer(compression=…)``.

Horovod calls ``compress(gradient)`` from backward hooks, all-reduces what it returns, and calls
``decompress(output, ctx)`` inside ``synchronize()``. It passes no name and no step. So ``compress`` finds the
parameter by identity, starts the exchange's own, named collectives, and returns a placeholder: a probe that tells
Average from Sum. ``docs/drivers.md`` says more.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvdcompress._torch.compressor import TensorCompressor, named
from hvdcompress.engine.agreement import PeerError, SharedConfig, factor_of
from hvdcompress.engine.collectives import Collectives
from hvdcompress.engine.compressor import next_compressor_number, process_set_changed
from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.intake import SMALL
from hvdcompress.engine.safety.watchdog import Watchdog
from hvdcompress.engine.state import RankState
from hvdcompress.engine.step import Agree, Step
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.observer import Sent
from hvdcompress.horovod.torch.transport import HorovodTransport
from hvdcompress.method import Method
from hvdcompress.ops.torch.tensors import uploaded
from hvdcompress.plan import BY_NAME, Plan, plan_of

_numbers: Counter[int] = Counter()  # see engine.compressor.next_number
_hooked: list[Any] = []  # the handle of the optimizers' hook, once there is a Compressor


def _number(process_set: Any, watchdog: Watchdog) -> int:
    """The next Compressor's number."""
    set_id = process_set.process_set_id

    def largest(number: int) -> int:
        name = f"hvdcompress.set{set_id}.number"
        return int(hvd.allreduce(torch.tensor([number]), name=name, op=hvd.Max, process_set=process_set)[0])

    return next_compressor_number(_numbers, set_id, largest, watchdog)


class Ticket:
    """What ``compress`` hands to ``decompress``.

    Attributes:
        gradient: whose ticket it is.
        name: its parameter.
        carried: the exchange whose payload went along in the stock all-reduce.
        passed: the payload was the gradient itself.
    """

    __slots__ = ("carried", "gradient", "name", "passed")

    def __init__(self, gradient: torch.Tensor):
        self.gradient = gradient
        self.name = ""
        self.carried: Exchange | None = None
        self.passed = False


class Clock:
    """Times one step, in which Horovod calls ``compress`` for each gradient and then ``decompress`` for each.

    Attributes:
        began: when the first gradient came.
        waited: seconds between calls of ``decompress``, in which Horovod waits for its own all-reduces.
    """

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._codec = ledger.seconds()["codec"]
        self.began = self._returned = time.perf_counter()
        self.waited = 0.0
        self._came: float | None = None  # when the last gradient had come
        self._in_hooks = 0.0  # seconds of codec work until then

    def leave(self) -> None:
        """Note that a call returns to Horovod."""
        self._returned = time.perf_counter()

    def enter_decompress(self) -> None:
        """Note that ``decompress`` is called."""
        if self._came is None:
            self._came = self._returned
            self._in_hooks = self._ledger.seconds()["codec"] - self._codec
        self.waited += time.perf_counter() - self._returned

    def note_step(self, local: RankState) -> None:
        """Note the step at its end. The codec's work in hooks holds the backward pass up, too."""
        now = time.perf_counter()
        blocked = now - (self._came or self.began) + self._in_hooks
        local.note_step(self.began, now, blocked, self.waited)


class Arrivals:
    """The gradients of one step, and the exchanges that they are part of.

    Attributes:
        step: the engine's step.
        passing: tickets of gradients that Horovod reduces, until the engine knows of them.
        order: tensor names as their gradients came.
        left: names of gradients that have not been handed back.
        probes: what Horovod reduces where no payload goes along.
        sealed: the first ``decompress`` has been called: every exchange is under way.
        clock: times the step.
    """

    def __init__(self, step: Step, probes: Iterator[torch.Tensor], clock: Clock):
        self.step = step
        self.probes = probes
        self.passing: list[Ticket] = []
        self.order: list[str] = []
        self.left: set[str] = set()
        self.sealed = False
        self.clock = clock


class Compressor(TensorCompressor, hvd.compression.Compressor):
    """One optimizer's compression, for ``hvd.DistributedOptimizer(…, compression=Compressor(…))``.

    A program with several makes them in the same order on every rank.

    Args:
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, or a plan's dict.
        named_parameters: as given to the optimizer, e.g. ``model.named_parameters()``. State is kept by name. What the
            optimizer does not have, or requires no gradient now, is not exchanged; what is frozen later keeps its
            residual.
        process_set: the Horovod process set that the optimizer uses (default: all ranks).
        loss_scale: a number, or a function such as ``scaler.get_scale``, by which the loss was multiplied;
            residuals are kept unscaled, so it may change between steps.
        ops: "auto" (the numpy core for CPU gradients, Triton for CUDA where it is installed), or "torch".
        settings: hyper-parameters and plan keys (``min_elements``, ``seed``, ``warmup``, ``bucket_elements``, …).

    Attributes:
        plan: what each tensor gets.
        ledger: bytes and seconds so far, on this rank.
        parameters: the parameters by name.

    Raises:
        ValueError: the plan is wrong; two parameters have one name; ``hvd.init()`` was not called; a Compressor under
            DistributedDataParallel has one of them.
    """

    driver = "Horovod"
    grouping = BY_NAME

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any],
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        process_set: Any = hvd.global_process_set,
        loss_scale: float | Callable[[], float] = 1.0,
        ops: str = "auto",
        **settings: Any,
    ):
        if not hvd.is_initialized():
            raise ValueError("call hvd.init() before making a Compressor")
        plan = plan_of(method, **settings)
        rank = process_set.rank()
        world = process_set.size()
        pairs = named(named_parameters)
        trained = [(name, parameter) for name, parameter in pairs if parameter.requires_grad]
        for name, parameter in trained:
            if parameter.is_complex():
                raise ValueError(f"{name!r} is {parameter.dtype}: Horovod does not reduce complex gradients")
        super().__init__(plan, rank, world, trained, loss_scale, ops)
        self.model_parameters = dict(pairs)
        self.process_set = process_set
        self._arrivals: Arrivals | None = None
        number = _number(process_set, self.watchdog)  # ranks may wait for each other here
        self.prefix = f"hvdcompress.set{process_set.process_set_id}.compressor{number}"
        self._probe = torch.tensor([1.0 / world, (self.local.rank + 1.0) / world**2], dtype=torch.float32, device="cpu")
        self._last_order: list[str] = []  # names as gradients came in the last step: a guess at the next one's
        self._agreed = False  # the ranks' plans have been compared
        self._theirs: set[int] = set()  # parameters, by their id, of the optimizers that have this Compressor
        self._address = ""  # the watchdog's
        self._failure: PeerError | None = None
        if not _hooked:
            _hooked.append(register_optimizer_step_pre_hook(_before_step))

    # -- Horovod's interface --------------------------------------------------------------------------------

    def compress(self, tensor: torch.Tensor = None) -> tuple[torch.Tensor, Ticket]:  # type: ignore[assignment]
        """Start the exchange of a gradient; returns what Horovod shall all-reduce, and a ticket.

        An error is not raised here but by :meth:`decompress`, on all ranks: the others wait in the stock all-reduce
        of this very tensor before they ask anything, so this rank must still take part in it.
        """
        if not isinstance(self, Compressor):  # Horovod's own compressions are classes
            raise TypeError(
                "compression=Compressor is the class: give an instance, "
                'compression=Compressor("topk", model.named_parameters())'
            )
        if self._failure:
            raise self._failure
        if not self._agreed:
            optimizer = sys._getframe(1).f_locals.get("self")  # Horovod's, which calls this
            self._theirs |= {id(parameter) for parameter in getattr(optimizer, "_requires_update", ())}
        ticket = Ticket(tensor)
        arrivals = self._current()
        step = arrivals.step
        # An error is kept for decompress(): a rank that raised here would leave the others in the stock all-reduce
        try:
            if not (self._agreed or arrivals.order):
                self._address = self.watchdog.endpoint()  # from now on it watches
            ticket.name = self._identify(tensor, len(arrivals.order))
            self._add(arrivals, ticket)
            if self._agreed:  # before that, what ranks differ in may look like a failure of Horovod's
                step.poll()
        except HorovodInternalError:
            self._drop()  # a peer is gone: nothing of this step is kept, so an elastic run can go on
            raise
        except Exception as error:
            step.fail(error)
        stock = self._for_stock_allreduce(ticket, step, arrivals.probes)
        arrivals.clock.leave()
        return stock, ticket

    def decompress(self, output: torch.Tensor, ctx: Ticket | None) -> torch.Tensor:
        """Go on with the step's exchanges, and end them at its last gradient.

        Returns:
            The gradient. The reduced one is in its memory when the step's last call returns: Horovod hands out none
            before it has asked for all.

        Raises:
            PeerError: a rank failed, or ranks disagree; on every rank, with one message.
            HorovodInternalError: a peer is gone.
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
            if not arrivals.sealed:
                self._seal(arrivals)
            self._hand_back(arrivals, ctx, output)
            if not arrivals.left:
                arrivals.step.finish()
                for name in self._frozen & set(arrivals.order):  # Horovod reduces a frozen parameter's old gradient
                    self.parameters[name].grad.zero_()  # type: ignore[union-attr]
        except HorovodInternalError:
            self._drop()
            raise
        except PeerError as failure:
            self._failure = failure
            self._drop()
            raise
        if not arrivals.left:
            if not self._agreed:
                self._keep_theirs()
            self._last_order = arrivals.order
            self._arrivals = None
            self._agreed = True
            self.ledger.steps += arrivals.step.finite
            self._end_step(arrivals.step)
            arrivals.clock.note_step(self.local)
        arrivals.clock.leave()
        return ctx.gradient

    # -- a step ---------------------------------------------------------------------------------------------

    def _current(self) -> Arrivals:
        """The step that gradients come in for now; one that was not handed back to its end is dropped."""
        if self._arrivals is None or self._arrivals.sealed:
            if self.process_set.size() != self.local.world:
                raise RuntimeError(f"there were {self.local.world} ranks, now there are {self.process_set.size()}")
            self._drop()
            self._note_frozen()
            self.local.begin_round()
            transport = HorovodTransport(self.prefix, self.process_set)
            collectives = Collectives(transport, self.local.observers)
            step = self._new_step(collectives, Agree.BEFORE_WAITING)
            with step.defer_errors:
                step.loss_scale = self.current_loss_scale()
            self._arrivals = Arrivals(step, self._probes(), Clock(self.ledger))
        return self._arrivals

    def _keep_theirs(self) -> None:
        """After the first step: of the parameters, keep those that the optimizers have which called :meth:`compress`.

        A program with several optimizers may have given all names of the model to each Compressor.
        """
        mine = {name: parameter for name, parameter in self.parameters.items() if id(parameter) in self._theirs}
        if 0 < len(mine) < len(self.parameters):
            others = self.parameters.keys() - mine.keys()
            self.parameters = mine
            self._terms = SharedConfig(self._terms.plan, {name: self._terms.tensors[name] for name in mine})
            self._group(self.local.ages())
            self.local.regroup(self._buckets())
            self.local.forget(others)  # they had no gradient

    def _is_under_way(self) -> bool:
        arrivals = self._arrivals
        return arrivals is not None and bool(arrivals.step.exchanges)

    def _waits_for(self) -> str | None:
        arrivals = self._arrivals
        return arrivals.step.waits_for() if arrivals else None

    def _is_over(self) -> bool:
        return process_set_changed(self.process_set, self.local.world)

    def _drop(self) -> None:
        """Leave the step that is under way, if any, as if it had not been."""
        if self._arrivals:
            self._arrivals.step.abandon()
            self._arrivals = None

    def _add(self, arrivals: Arrivals, ticket: Ticket) -> None:
        """Give a gradient to the engine, or leave it to Horovod."""
        if ticket.name in arrivals.left:
            raise RuntimeError(
                f"a second gradient of {ticket.name!r} came before the first was used: call optimizer.step() "
                "(or synchronize()) after every backward_passes_per_step backward passes"
            )
        arrivals.order.append(ticket.name)
        arrivals.left.add(ticket.name)
        bucket, index = self._place[ticket.name]
        # not in the first step: Horovod's complaint about unequal shapes would come before ours about unequal plans
        if self._agreed and self.local.next_step(bucket).passes_through:
            ticket.passed = True
            arrivals.passing.append(ticket)
            return
        vector = self.framework.vector(arrivals.step, bucket, ticket.gradient)
        ticket.carried = arrivals.step.add(bucket, [index], [vector], may_carry=self._agreed)

    def _pass_on(self, arrivals: Arrivals) -> None:
        """Tell the engine of the gradients that are left to Horovod, which may be reducing them already."""
        step = arrivals.step
        small: dict[torch.device, list[torch.Tensor]] = {}
        for ticket in arrivals.passing:
            gradient = ticket.gradient
            bucket, _ = self._place[ticket.name]
            vector = self.framework.flat(gradient)
            step.pass_through(bucket, gradient, vector)
            # under a plan that keeps nothing there is nothing to undo: the sum shows what is not finite by itself
            if self.plan.stateless:
                continue
            if gradient.numel() < SMALL:  # a call costs more than a copy
                small.setdefault(gradient.device, []).append(gradient.detach().reshape(-1))
            else:
                step.check_finite(vector)
        for several in small.values():
            step.check_finite(self.framework.flat(torch.cat(several)))

    def _seal(self, arrivals: Arrivals) -> None:
        """At the first ``decompress``: launch what is left, and say how the step stands on this rank."""
        arrivals.sealed = True
        step = arrivals.step
        with step.defer_errors:
            step.fill_missing()
            self._pass_on(arrivals)
        step.send_status()
        if not self._agreed:  # Horovod waits for each name of the optimizer's, which may be this rank's only
            step.receive_status()
            if self.watchdog.on:
                self.watchdog.set_peers(step.collectives.gather_text("watchdog", self._address))

    def _hand_back(self, arrivals: Arrivals, ticket: Ticket, output: torch.Tensor) -> None:
        """At each ``decompress``: go on with what has come, this gradient's payload if it went along."""
        arrivals.left.discard(ticket.name)
        step = arrivals.step
        if ticket.passed:  # Horovod has reduced it in its place, average or sum
            if output.data_ptr() != ticket.gradient.data_ptr():
                ticket.gradient.detach().copy_(output)
        elif step.factor is None:
            step.factor = factor_of(output[-2:].tolist(), self.local.world)
        with step.defer_errors:
            if ticket.carried and step.factor:
                step.receive_carried(ticket.carried, self.framework.flat(output[:-2]))
            step.poll()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Before an optimizer of this Compressor's takes its step: are its gradients reduced?

        Raises:
            ValueError: another optimizer has this Compressor, too, and gradients are still on their way; or the
                optimizer has a parameter of which Horovod does not know.
        """
        if self._arrivals and not self._arrivals.sealed:
            return  # Horovod's step() is a step of the optimizer's around another one: it has yet to synchronize
        if self._arrivals:
            left = ", ".join(sorted(self._arrivals.left))
            self._drop()
            raise ValueError(
                f"an optimizer takes its step before all gradients of the Compressor have come back ({left} have not): "
                "give each optimizer a Compressor of its own, with its parameters, or synchronize() all of them first"
            )
        hooked = getattr(optimizer, "_requires_update", ())  # none where Horovod has nothing to do
        for parameter in [p for group in optimizer.param_groups for p in group["params"]] if hooked else ():
            if parameter.grad is not None and parameter not in hooked:
                name = next((n for n, p in self.model_parameters.items() if p is parameter), tuple(parameter.shape))
                raise ValueError(
                    f"the gradient of parameter {name!r} is not reduced: it was added to the optimizer, or made "
                    "trainable, after hvd.DistributedOptimizer; make that and the Compressor again, with all parameters"
                )

    # -- inside ---------------------------------------------------------------------------------------------

    def _probes(self) -> Iterator[torch.Tensor]:
        """A step's probes, one after another; Horovod reduces them in place."""
        yield from self._probe.repeat(len(self.parameters), 1)
        while True:  # a gradient came twice
            yield self._probe.clone()

    def _for_stock_allreduce(self, ticket: Ticket, step: Step, probes: Iterator[torch.Tensor]) -> torch.Tensor:
        """The probe [1/p, (rank+1)/p²], whose reduction tells the operation; after the payload, if that goes along.

        A payload that is the gradient itself goes without a probe: it needs none.
        """
        failed = step.error and self._agreed and ticket.name and not ticket.carried
        planned = self.local.next_step(self._place[ticket.name][0]) if failed else None
        if ticket.passed or (planned and planned.passes_through):
            ticket.passed = True
            payload = ticket.gradient
            stock = ticket.gradient.contiguous()
        else:
            payload = None
            if ticket.carried:
                payload = torch.as_tensor(ticket.carried.collective.x)  # type: ignore[union-attr]
            elif planned:  # the others' payloads may go along: match their length
                length = planned.carried_elements()
                where = ticket.gradient.device
                payload = None if length is None else torch.zeros(length, dtype=torch.float32, device=where)
            stock = next(probes) if payload is None else torch.cat([payload, uploaded(self._probe, payload)])
        for observer in self.local.observers:
            observer.sent(self.local.rank, ticket.name, Sent("AllReduce", payload, stock.nbytes))
        return stock

    def _identify(self, tensor: torch.Tensor, position: int) -> str:
        """The name of the parameter whose gradient this is, the ``position``-th of its step."""
        if position < len(self._last_order):
            name = self._last_order[position]
            if self.parameters[name].grad is tensor:
                return name
        for name, parameter in self.parameters.items():
            if parameter.grad is tensor:
                return name
            if parameter is tensor:
                raise ValueError("op=hvd.Adasum is not supported: it exchanges parameters, not gradients")
        for name, parameter in self.model_parameters.items():
            if parameter.grad is tensor:
                raise ValueError(
                    f"{name!r} was frozen when the Compressor was made: make it again, with what is trained now"
                )
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and parameter.grad.is_sparse and parameter.shape == tensor.shape:
                raise ValueError(f"sparse_as_dense=True is not supported (parameter {name!r}): use dense gradients")
        raise ValueError(
            f"a gradient of shape {tuple(tensor.shape)} belongs to no parameter that the Compressor was given: "
            "give it the same named_parameters as the optimizer, and one Compressor to each optimizer"
        )

    def _refuse_sparse(self, output: torch.Tensor) -> None:
        if output.is_sparse:
            names = [n for n, p in self.parameters.items() if p.grad is not None and p.grad.is_sparse]
            raise ValueError(
                f"sparse gradients cannot be compressed ({', '.join(names)}): make them dense "
                "(torch.nn.Embedding(..., sparse=False)), or leave the parameter to another optimizer"
            )


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    compressor = getattr(optimizer, "_compression", None)  # Horovod's DistributedOptimizer has it
    if isinstance(compressor, Compressor):
        compressor.check(optimizer)
