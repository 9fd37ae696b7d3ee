"""The PyTorch driver: any method behind the unmodified ``hvd.DistributedOptimizer(compression=…)``.

Horovod calls ``compress(gradient)`` from backward hooks, all-reduces what it returns, and calls
``decompress(output, ctx)`` inside ``synchronize()``. It passes no name, no step, and offers no other
collective. So this driver

* finds the parameter by identity (``p.grad is tensor``),
* starts its own, named collectives in ``compress`` and returns a tiny placeholder (a probe, which tells
  Average from Sum) for the stock all-reduce; a method that needs just one float32 all-reduce returns its
  payload with the probe appended, and costs no collective of its own;
* on a step's first ``decompress``, exchanges one status with all ranks *before any wait*, so that a rank that
  failed, or has another plan, is an error on all of them and a hang on none; and then
* pumps: every tensor in flight is advanced by one round, in name order, until all are done. Waiting tensor
  by tensor in hook order deadlocks as soon as two ranks' hooks fire in different order.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from hvdcompress._torch_net import Net, PeerError
from hvdcompress.ledger import Ledger
from hvdcompress.method import AllReduce, Method, TensorSpec
from hvdcompress.ops import fast
from hvdcompress.plan import Plan, Unit, plan_of
from hvdcompress.worker import Flight, Worker, itemsize

__all__ = ["Compressor", "PeerError"]

_instances = itertools.count()


class Ticket:
    """What ``compress`` hands to ``decompress``: whose gradient it was."""

    def __init__(self, gradient: torch.Tensor):
        self.gradient, self.name, self.rides = gradient, "", False


class Compressor:
    """One optimizer's compression, for ``hvd.DistributedOptimizer(…, compression=Compressor(…))``.

    Args:
        method: a method id with hyper-parameters, a Method, a Plan, or a plan's dict.
        named_parameters: as given to the optimizer, e.g. ``model.named_parameters()``. State is kept by name.
        process_set: the Horovod process set that the optimizer uses (default: all ranks).
        loss_scale: a number, or a function such as ``scaler.get_scale``, by which the loss was multiplied;
            residuals are kept unscaled, so it may change between steps.
        ops: "auto" (the numpy core for CPU gradients, torch for CUDA), or "torch".
        settings: hyper-parameters and plan keys (``min_elements``, ``seed``, ``warmup``, ``bucket_elements``, …).

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
        self.plan = plan_of(method, **settings)
        pairs = list(named_parameters)
        self.parameters = dict(pairs)
        if len(self.parameters) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"two parameters have one name: {sorted({n for n in names if names.count(n) > 1})}")
        self.process_set, self.loss_scale, self._ops = process_set, loss_scale, ops
        self.prefix = f"hvdcompress.{next(_instances)}"
        specs = [TensorSpec(n, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in pairs]
        self.units = {member.name: unit for unit in self.plan.units(specs) for member in unit.members}
        rank, world = process_set.rank(), process_set.size()
        self.ledger = Ledger(world, rank)
        self.worker = Worker(self.plan, rank, world, self.ledger)
        self.net: Net | None = None
        self._by_id: dict[int, str] = {}  # id(gradient) -> name: a hint, always verified
        self._arrived: dict[str, dict[str, torch.Tensor]] = {}  # unit -> member -> gradient, this step
        self._flights: dict[str, Flight] = {}  # unit -> flight, this step
        self._finite = True
        self._sealed = False  # the step's first decompress has happened
        self._error: Exception | None = None  # this rank's first one, this step
        self._left: set[str] = set()  # members not yet decompressed
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
        try:
            self._open_step()
            ticket.name = self._identify(tensor)
            ticket.rides = self._take_in(ticket.name, tensor)
            self._pump_ready()
        except HorovodInternalError:
            self._close_step()  # a peer is gone: nothing of this step is kept, so an elastic run can go on
            raise
        except Exception as error:
            self._error = self._error or error
        return self._for_stock_allreduce(ticket), ticket

    def decompress(self, output: torch.Tensor, ctx: Ticket | None) -> torch.Tensor:
        """Finish the step's exchanges; returns the reduced gradient, in the gradient's own memory."""
        if ctx is None:
            if output.is_sparse:
                names = [n for n, p in self.parameters.items() if p.grad is not None and p.grad.is_sparse]
                raise ValueError(
                    f"sparse gradients cannot be compressed ({', '.join(names)}): make them dense "
                    "(torch.nn.Embedding(..., sparse=False)), or leave the parameter to another optimizer"
                )
            return output
        try:
            self._seal_step()
        except HorovodInternalError:
            self._close_step()
            raise
        factor = self._factor(output[-2:])
        unit = self.units[ctx.name]
        flight = self._flights[unit.spec.name]
        members = self._arrived[unit.spec.name]
        ops = self._ops_for(ctx.gradient)
        if ctx.rides and flight.reduced is None:
            total = output[:-2]
            flight.advance(total if ops is not fast else total.numpy())
        if not flight.extra.get("done"):
            flight.extra["done"] = True
            outs = [self._flat(members[m.name], flight.like.dtype) for m in unit.members]
            if self._finite:
                # what rode along was averaged by Horovod, if it averages at all
                self.worker.finish(flight, outs, 1.0 if ctx.rides else factor, ops)
            else:
                self.worker.abandon(flight, outs, ops)
            for member, out in zip(unit.members, outs, strict=True):
                _store(out, members[member.name])
        self._left.discard(ctx.name)
        if not self._left:
            self._close_step()
        return ctx.gradient

    # -- state -------------------------------------------------------------------------------------------

    def residual(self, name: str) -> torch.Tensor:
        """This rank's residual of a parameter, in its shape (a copy); zeros where none is kept."""
        parameter = self.parameters[name]
        try:
            flat = self.worker.residual(name)
        except KeyError:
            flat = None
        if flat is None:
            return torch.zeros(parameter.shape)
        return torch.as_tensor(flat).clone().reshape(parameter.shape)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state (every rank has its own: save one file a rank): plan, steps, residuals as tensors.

        Raises:
            RuntimeError: a step is under way.
        """
        if self._flights:
            raise RuntimeError("a step is under way: save after optimizer.step(), not between backward() and it")
        saved = self.worker.state_dict()
        state = {name: {s: torch.as_tensor(a) for s, a in slots.items()} for name, slots in saved["state"].items()}
        return {**saved, "state": state}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` saved on this rank; residuals go to their parameters' devices.

        Raises:
            ValueError: it is of another rank, world, or set of parameters; nothing is changed then.
        """
        units = list({unit.spec.name: unit for unit in self.units.values()}.values())
        device = next(iter(self.parameters.values())).device if self.parameters else "cpu"
        native = self._native(torch.device(device))

        def copy(parts: list[Any]) -> Any:
            joined = torch.cat([torch.as_tensor(part).reshape(-1) for part in parts]).clone()
            return joined.to(device) if native else joined.numpy()

        self.worker.load_state_dict(saved, units, copy)

    def describe(self) -> str:
        """Which method each group of parameters gets, and the memory that its residuals will take on this rank."""
        groups: dict[str, list[Unit]] = {}
        for unit in {unit.spec.name: unit for unit in self.units.values()}.values():
            groups.setdefault(str(unit.program), []).append(unit)
        lines = []
        for text, units in sorted(groups.items(), key=lambda item: -sum(u.spec.size for u in item[1])):
            elements = sum(unit.spec.size for unit in units)
            slots = [slot for unit in units for slot in self.worker.slots(unit).values()]
            # a residual has a second buffer, into which the next one is built
            memory = sum(2 * int(np.prod(slot.shape)) * itemsize(slot.dtype) for slot in slots)
            tensors = sum(len(unit.members) for unit in units)
            lines.append(f"{text}: {tensors} tensors, {elements:,} elements, {memory / 1e6:.2f} MB of residuals")
        return "\n".join(lines)

    # -- one step --------------------------------------------------------------------------------------

    def _open_step(self) -> None:
        if self._sealed:  # the last step was not decompressed to its end: its state stays as it was
            self._close_step()
        if self.net is None:
            self.net = Net(self.prefix, self.ledger, self.process_set)
        if self.process_set.size() != self.worker.world:
            raise RuntimeError(f"there were {self.worker.world} ranks, now there are {self.process_set.size()}")

    def _take_in(self, name: str, tensor: torch.Tensor) -> bool:
        """Note the gradient, and start its unit once it is whole; whether it rides on the stock all-reduce."""
        unit = self.units[name]
        members = self._arrived.setdefault(unit.spec.name, {})
        if name in members:
            raise RuntimeError(
                f"a second gradient of {name!r} came before the first was used: call optimizer.step() "
                "(or synchronize()) after every backward_passes_per_step backward passes"
            )
        members[name] = tensor
        self._left.add(name)
        return len(members) == len(unit.members) and self._launch(unit)

    def _launch(self, unit: Unit) -> bool:
        """Start a unit's exchange. A member that has no gradient on this rank takes part as zeros."""
        members = self._arrived[unit.spec.name]
        for member in unit.members:
            if member.name not in members:
                members[member.name] = torch.zeros_like(self.parameters[member.name])
        ops = self._ops_for(next(iter(members.values())))
        dtype = getattr(torch, self.worker.work_dtype(unit))
        flat = ops.concat([self._flat(members[m.name], dtype) for m in unit.members])
        scale = float(self.loss_scale() if callable(self.loss_scale) else self.loss_scale)
        if not scale > 0 or scale == float("inf"):
            raise ValueError(f"loss_scale is {scale}, it must be a positive finite number")
        flight = self.worker.start(unit, flat, ops, scale)
        self._flights[unit.spec.name] = flight
        self._finite = self._finite and flight.finite
        rides = self._rides(unit)
        if not rides:
            self._submit(flight)
        return rides

    def _rides(self, unit: Unit) -> bool:
        """Whether the unit needs no collective of its own (never before plans are known to agree: Horovod's
        complaint about unequal shapes would come before ours about unequal plans)."""
        single = len(unit.members) == 1 and self.worker.work_dtype(unit) == "float32"
        return self._agreed and single and self.worker.method_now(unit).rides

    def _for_stock_allreduce(self, ticket: Ticket) -> torch.Tensor:
        """The probe [1/p, (rank+1)/p²], whose reduction tells the operation; after the payload, if that rides."""
        p, rank = self.worker.world, self.worker.rank
        probe = torch.tensor([1.0 / p, (rank + 1.0) / p**2])
        payload = None
        unit = self.units.get(ticket.name)
        if ticket.rides:
            x = self._flights[self.units[ticket.name].spec.name].verb.x  # type: ignore[union-attr]
            payload = x if isinstance(x, torch.Tensor) else torch.from_numpy(x)
        elif self._error and unit and self._rides(unit):  # the others' payloads ride: match their length
            payload = torch.zeros(self.worker.method_now(unit).num_bytes(unit.spec, p) // 4)
        stock = probe if payload is None else torch.cat([payload, probe.to(payload.device)])
        self.ledger.add(rank, ticket.name, "AllReduce", stock.nbytes)
        return stock

    def _submit(self, flight: Flight) -> None:
        assert self.net is not None and flight.verb is not None
        flight.handle = self.net.submit(flight.name, flight.round, flight.verb)

    def _advance(self, flight: Flight) -> None:
        assert self.net is not None
        result = self.net.wait(flight.handle, native=isinstance(flight.like, torch.Tensor))
        flight.handle = None
        if flight.advance(result) is not None:
            self._submit(flight)

    def _pump_ready(self) -> None:
        """Launch next rounds of what has arrived, so that they overlap with the rest of the backward pass."""
        for flight in self._flights.values():
            if flight.handle is not None and self.net.ready(flight.handle):  # type: ignore[union-attr]
                self._advance(flight)

    def _seal_step(self) -> None:
        """At a step's first decompress: agree on how it went, then bring every exchange to its end."""
        if self._sealed:
            return
        assert self.net is not None
        try:
            for name in sorted(self._arrived.keys() - self._flights.keys()):
                self._launch(self._unit_named(name))
        except Exception as error:
            self._error = self._error or error
        self._sealed = True
        self._status()
        flights = sorted(self._flights.values(), key=lambda flight: flight.name)
        while flights := [flight for flight in flights if flight.handle is not None]:
            for flight in flights:
                self._advance(flight)

    def _unit_named(self, name: str) -> Unit:
        return next(unit for unit in self.units.values() if unit.spec.name == name)

    def _status(self) -> None:
        """One small all-reduce of maxima: did a rank fail, is all finite, do plan, step and loss scale agree?"""
        assert self.net is not None
        if not self._agreed:
            tensors = {name: f"{tuple(p.shape)} {p.dtype}" for name, p in self.parameters.items()}
            try:
                self.net.compare_plans(self.plan.to_dict(), tensors)
            except PeerError as failure:
                self._give_up(failure)
            self._agreed = True
        steps = zlib.crc32(repr(sorted(self.worker.steps.items())).encode(), self.plan.fingerprint)
        scale = float(self.loss_scale() if callable(self.loss_scale) else self.loss_scale)
        mine = [float(self._error is not None), float(not self._finite), float(steps), -float(steps), scale, -scale]
        failed, non_finite, high, low, scale_high, scale_low = self.net.maximum("status", mine)
        if failed:
            texts = self.net.gather_text("error", str(self._error or ""))
            message = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
            self._give_up(PeerError(f"a gradient exchange failed, so every rank stops. {message}"), self._error)
        if high != -low:
            self._give_up(PeerError("ranks disagree on the step: load every rank's own state, of the same step"))
        if scale_high != -scale_low:
            self._give_up(PeerError(f"ranks disagree on the loss scale: {-scale_low} to {scale_high}"))
        self._finite = not non_finite

    def _give_up(self, failure: PeerError, cause: Exception | None = None) -> NoReturn:
        self._failure = failure
        raise failure from cause

    def _close_step(self) -> None:
        self.ledger.steps += self._finite
        self._flights, self._arrived, self._left = {}, {}, set()
        self._finite, self._sealed, self._error = True, False, None

    # -- tensors -----------------------------------------------------------------------------------------

    def _identify(self, tensor: torch.Tensor) -> str:
        name = self._by_id.get(id(tensor))
        if name is not None and self.parameters[name].grad is tensor:
            return name
        for name, parameter in self.parameters.items():
            if parameter.grad is tensor:
                self._by_id[id(tensor)] = name
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

    def _factor(self, probe: torch.Tensor) -> float:
        """1/p if the optimizer averages, 1 if it sums.

        Raises:
            PeerError: it does something else.
        """
        p = self.worker.world
        got = [float(v) for v in probe.tolist()]
        for factor in (1.0 / p, 1.0):
            if np.allclose(got, [factor, factor * (p + 1) / (2 * p)], rtol=0.01):
                return factor
        raise PeerError("the optimizer's op must be hvd.Average or hvd.Sum; Min, Max, Product and Adasum are refused")

    def _native(self, device: torch.device) -> bool:
        return self._ops == "torch" or device.type != "cpu"

    def _ops_for(self, tensor: torch.Tensor) -> Any:
        if not self._native(tensor.device):
            return fast
        from hvdcompress.ops import torch as torch_ops

        return torch_ops

    def _flat(self, tensor: torch.Tensor, dtype: Any) -> Any:
        """The gradient as a flat array of the working dtype: a view of its memory where that can be."""
        dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype))
        flat = tensor.detach().to(dtype).contiguous().view(-1)
        return flat if self._native(tensor.device) else flat.numpy()


def _store(out: Any, gradient: torch.Tensor) -> None:
    """Bring a result into the gradient's memory, if it is not there already."""
    result = torch.as_tensor(out)
    if result.data_ptr() != gradient.data_ptr() or result.dtype != gradient.dtype:
        gradient.detach().copy_(result.view(gradient.shape))
