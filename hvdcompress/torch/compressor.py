"""The PyTorch driver: any method behind the unmodified ``hvd.DistributedOptimizer(compression=…)``.

Horovod calls ``compress(gradient)`` from backward hooks, all-reduces what it returns, and calls
``decompress(output, ctx)`` inside ``synchronize()``. It passes no name, no step, and offers no other
collective. So this driver

* finds the parameter by identity (``p.grad is tensor``),
* starts its own, named collectives in ``compress`` and returns a tiny placeholder (a probe, which tells
  Average from Sum) for the stock all-reduce; a method that needs just one float32 all-reduce returns its
  payload with the probe appended, and costs no collective of its own;
* on a step's first ``decompress``, sends a status to all ranks, and on its last reads theirs, before it waits for any
  collective of its own, so that a rank that failed, or has another plan, is an error on all of them and a hang on
  none; and then
* pumps: exchanges are advanced as their results come, until all are done. Waiting for one tensor after the other
  deadlocks as soon as two ranks' hooks fire in different order.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import isclose
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvdcompress.engine.agreement import PeerError
from hvdcompress.engine.compressor import RankState
from hvdcompress.engine.ledger import Ledger
from hvdcompress.engine.rank import Worker
from hvdcompress.engine.state import describe
from hvdcompress.method import Method, TensorSpec
from hvdcompress.ops import fast
from hvdcompress.plan import Bucket, Plan, plan_of
from hvdcompress.torch.step import Step, ops_for
from hvdcompress.torch.transport import Net

__all__ = ["Compressor", "PeerError"]

# Collectives are named by the number of their Compressor within its process set: ranks outside of a set make none
_numbers: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)


class Ticket:
    """What ``compress`` hands to ``decompress``: whose gradient it was, and whether its payload went along."""

    def __init__(self, gradient: torch.Tensor):
        self.gradient, self.name, self.rides = gradient, "", False


class Compressor(RankState):
    """One optimizer's compression, for ``hvd.DistributedOptimizer(…, compression=Compressor(…))``.

    A program with several makes them in the same order on every rank.

    Args:
        method: a method id with hyper-parameters, a Method, a Plan, or a plan's dict.
        named_parameters: as given to the optimizer, e.g. ``model.named_parameters()``. State is kept by name.
        process_set: the Horovod process set that the optimizer uses (default: all ranks).
        loss_scale: a number, or a function such as ``scaler.get_scale``, by which the loss was multiplied;
            residuals are kept unscaled, so it may change between steps.
        ops: "auto" (the numpy core for CPU gradients, torch for CUDA), or "torch".
        settings: hyper-parameters and plan keys (``min_elements``, ``seed``, ``warmup``, ``bucket_elements``, …).

    Attributes:
        plan: what each tensor gets. ledger: bytes and seconds so far, on this rank. parameters: by name.

    Raises:
        ValueError: a bad plan; two parameters with one name; ``hvd.init()`` was not called.
    """

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
        if ops not in ("auto", "torch"):
            raise ValueError(f'ops = {ops!r} must be "auto" or "torch"')
        self.plan = plan_of(method, **settings)
        pairs = list(named_parameters)
        self.parameters = dict(pairs)
        if len(self.parameters) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"two parameters have one name: {sorted({n for n in names if names.count(n) > 1})}")
        self.process_set, self.loss_scale, self.force_torch = process_set, loss_scale, ops == "torch"
        set_id = process_set.process_set_id
        self.prefix = f"hvdcompress.{set_id}.{next(_numbers[set_id])}"
        specs = [TensorSpec(n, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in pairs]
        self.buckets = {bucket.spec.name: bucket for bucket in self.plan.buckets(specs)}
        self.bucket_of = {member.name: bucket for bucket in self.buckets.values() for member in bucket.members}
        rank, world = process_set.rank(), process_set.size()
        self.ledger = Ledger(world, rank)
        self.worker = Worker(self.plan, rank, world, self.ledger)
        self._probe = torch.tensor([1.0 / world, (rank + 1.0) / world**2])
        self._last_order: list[str] = []  # names as gradients came in the last step: a guess at the next one's
        self._step: Step | None = None
        self._agreed = False  # the ranks' plans have been compared
        self._failure: PeerError | None = None

    # -- Horovod's interface -------------------------------------------------------------------------

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Ticket]:
        """Start the exchange of a gradient; returns what Horovod shall all-reduce, and a ticket.

        An error is not raised here but by ``decompress``, on all ranks: the others wait in the stock all-reduce
        of this very tensor before they ask anything, so this rank must still take part in it.
        """
        if self._failure:
            raise self._failure
        ticket = Ticket(tensor)
        step = self._current_step()
        try:
            ticket.name = self._identify(tensor, len(step.order))
            ticket.rides = step.take_in(ticket.name, tensor)
            step.pump_ready()
        except HorovodInternalError:
            self._step = None  # a peer is gone: nothing of this step is kept, so an elastic run can go on
            raise
        except Exception as error:
            step.error = step.error or error
        return self._for_stock_allreduce(ticket, step), ticket

    def decompress(self, output: torch.Tensor, ctx: Ticket | None) -> torch.Tensor:
        """Go on with the step's exchanges, and end them at its last gradient; returns the gradient, in whose own memory
        the reduced one is by then (Horovod hands out none before it has asked for all).

        Raises:
            PeerError: a rank failed, or ranks disagree; on every rank, with one message.
            HorovodInternalError: a peer is gone.
        """
        if ctx is None:
            self._refuse_sparse(output)
            return output
        if self._failure:
            raise self._failure
        step = self._step
        assert step is not None
        try:
            step.seal()
            step.take_back(ctx.name, output[:-2] if ctx.rides else None, self._factor(output[-2:]))
            if not step.left:
                step.end()
        except HorovodInternalError:
            self._step = None
            raise
        except PeerError as failure:
            self._failure = failure
            raise
        if not step.left:
            self._last_order = step.order
            self.ledger.steps += step.finite
            self._step = None
        return ctx.gradient

    # -- state -------------------------------------------------------------------------------------------

    def residual(self, name: str) -> torch.Tensor:
        """This rank's residual of a parameter, in its shape (a copy); zeros where none is kept."""
        shape = self.parameters[name].shape
        flat = self.worker.residual(name) if name in self.worker.names() else None
        return torch.zeros(shape) if flat is None else torch.as_tensor(flat).clone().reshape(shape)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state (every rank has its own: save one file a rank): plan, steps, residuals as tensors.

        Raises:
            RuntimeError: a step is under way.
        """
        if self._step and self._step.flights:
            raise RuntimeError("a step is under way: save after optimizer.step(), not between backward() and it")
        saved = self.worker.state_dict()
        state = {name: {s: torch.as_tensor(a) for s, a in slots.items()} for name, slots in saved["state"].items()}
        return {**saved, "state": state}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` saved on this rank; residuals go to their parameters' device.

        Raises:
            ValueError: it is of another rank, world, or set of parameters; nothing is changed then.
        """
        anywhere = next(iter(self.parameters.values()), torch.zeros(0))

        def copy(parts: list[Any]) -> Any:
            joined = torch.cat([torch.as_tensor(part).reshape(-1) for part in parts]).clone().to(anywhere.device)
            return joined.numpy() if ops_for(anywhere, self.force_torch) is fast else joined

        self.worker.load_state_dict(saved, list(self.buckets.values()), copy)

    def describe(self) -> str:
        """Which method each group of parameters gets, and the memory that its residuals take on this rank."""
        return describe(self.buckets.values())

    # -- what a step asks ------------------------------------------------------------------------------

    def ride_length(self, bucket: Bucket, phase: int) -> int | None:
        """The length of the bucket's payload if it can be the stock all-reduce itself, else None.

        Never before the plans are known to agree: Horovod's complaint about unequal shapes would come before
        ours about unequal plans.
        """
        if not self._agreed or len(bucket.members) > 1 or self.worker.work_dtype(bucket) != "float32":
            return None
        return self.worker.method_now(bucket).piggyback(
            bucket.spec, phase, self.worker.states.get(bucket.spec.name, {})
        )

    def compare_plans_once(self, net: Net) -> None:
        """Before the first status: make sure that all ranks have the same plan and parameters."""
        if not self._agreed:
            net.compare_plans(
                self.plan.to_dict(), {name: f"{tuple(p.shape)} {p.dtype}" for name, p in self.parameters.items()}
            )
            self._agreed = True

    # -- inside ------------------------------------------------------------------------------------------

    def _current_step(self) -> Step:
        if self._step is None or self._step.sealed:  # a step that was not handed back to its end is dropped
            if self.process_set.size() != self.worker.world:
                raise RuntimeError(f"there were {self.worker.world} ranks, now there are {self.process_set.size()}")
            self._step = Step(self, Net(self.prefix, self.ledger, self.process_set))
        return self._step

    def _for_stock_allreduce(self, ticket: Ticket, step: Step) -> torch.Tensor:
        """The probe [1/p, (rank+1)/p²], whose reduction tells the operation; after the payload, if that rides."""
        rank = self.worker.rank
        probe = self._probe.clone()  # Horovod reduces it in place
        payload = None
        bucket = self.bucket_of.get(ticket.name)
        if bucket and ticket.rides:
            payload = torch.as_tensor(step.flights[bucket.spec.name].verb.x)  # type: ignore[union-attr]
        elif bucket and step.error:  # the others' payloads may ride: match their length
            length = self.ride_length(bucket, self.worker.phase_now(bucket)[0])
            payload = None if length is None else torch.zeros(length)
        stock = probe if payload is None else torch.cat([payload, probe.to(payload.device)])
        self.ledger.add(rank, ticket.name, "AllReduce", stock.nbytes)
        return stock

    def _factor(self, probe: torch.Tensor) -> float:
        """1/p if the optimizer averages, 1 if it sums.

        Raises:
            PeerError: it does something else.
        """
        p = self.worker.world
        first, second = probe.tolist()
        for factor in (1.0 / p, 1.0):
            if isclose(first, factor, rel_tol=0.01) and isclose(second, factor * (p + 1) / (2 * p), rel_tol=0.01):
                return factor
        raise PeerError("the optimizer's op must be hvd.Average or hvd.Sum; Min, Max, Product and Adasum are refused")

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
