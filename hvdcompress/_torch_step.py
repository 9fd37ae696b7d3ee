"""One optimizer step of the PyTorch driver: from the first gradient that arrives to the last that is handed back."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from hvdcompress._torch_net import Net
from hvdcompress.agreement import PeerError, Status, failure, fingerprint
from hvdcompress.ops import fast
from hvdcompress.plan import Unit
from hvdcompress.worker import Flight

if TYPE_CHECKING:
    from hvdcompress.torch import Compressor


class Step:
    """Collects gradients into units, launches and pumps their exchanges, and agrees with the other ranks."""

    def __init__(self, compressor: Compressor, net: Net):
        self.compressor, self.net, self.worker = compressor, net, compressor.worker
        self.arrived: dict[str, dict[str, torch.Tensor]] = {}  # unit -> member -> gradient
        self.flights: dict[str, Flight] = {}  # unit -> its exchange
        self.waiting: deque[Flight] = deque()  # flights with a collective under way, oldest first
        self.order: list[str] = []  # members as they arrived
        self.left: set[str] = set()  # members not handed back yet
        self.error: Exception | None = None  # this rank's first one
        self.finite = True
        self.sealed = False  # the first decompress has happened: ranks have agreed, exchanges are done

    # -- gradients come in ----------------------------------------------------------------------------

    def take_in(self, name: str, gradient: torch.Tensor) -> bool:
        """Note a gradient, and start its unit once it is whole; whether it rides on the stock all-reduce."""
        unit = self.compressor.units[name]
        members = self.arrived.setdefault(unit.spec.name, {})
        if name in members:
            raise RuntimeError(
                f"a second gradient of {name!r} came before the first was used: call optimizer.step() "
                "(or synchronize()) after every backward_passes_per_step backward passes"
            )
        members[name] = gradient
        self.order.append(name)
        self.left.add(name)
        return len(members) == len(unit.members) and self._launch(unit)

    def _launch(self, unit: Unit) -> bool:
        """Start a unit's exchange. A member that has no gradient on this rank takes part as zeros."""
        members = self.arrived[unit.spec.name]
        for member in unit.members:
            if member.name not in members:
                members[member.name] = torch.zeros_like(self.compressor.parameters[member.name])
        ops = ops_for(next(iter(members.values())), self.compressor.force_torch)
        dtype = getattr(torch, self.worker.work_dtype(unit))
        flats = [as_flat(members[m.name], dtype, ops) for m in unit.members]
        flight = self.worker.start(unit, self.worker.join(unit, flats, ops), ops, self.compressor.current_loss_scale())
        flight.extra["flats"] = flats
        self.flights[unit.spec.name] = flight
        self.finite = self.finite and flight.finite
        rides = self.compressor.ride_length(unit, flight.me.phase) is not None
        if not rides:
            self._submit(flight)
        return rides

    def _submit(self, flight: Flight) -> None:
        assert flight.verb is not None
        flight.handle = self.net.submit(flight.name, flight.round, flight.verb)
        self.waiting.append(flight)

    def _advance(self, flight: Flight) -> None:
        """Give a flight the result it waits for, and submit its next round."""
        result = self.net.wait(flight.handle, native=isinstance(flight.like, torch.Tensor))
        flight.handle = None
        if flight.advance(result) is not None:
            self._submit(flight)

    def pump_ready(self) -> None:
        """Launch next rounds of what is there already, so that they overlap with the rest of the backward pass.

        Oldest first, and no further than the first that is not there: one poll a gradient, not one a flight.
        """
        while self.waiting and self.net.ready(self.waiting[0].handle):
            self._advance(self.waiting.popleft())

    # -- the ranks agree ------------------------------------------------------------------------------

    def seal(self) -> None:
        """At the first decompress: agree on how the step went, *before any wait*, then end every exchange.

        Raises:
            PeerError: a rank failed, or ranks disagree; on every rank.
        """
        if self.sealed:
            return
        try:
            for name in sorted(self.arrived.keys() - self.flights.keys()):
                self._launch(self.compressor.units_by_name[name])
        except Exception as error:
            self.error = self.error or error
        self.sealed = True
        self._agree()
        self.waiting.clear()
        flights = sorted(self.flights.values(), key=lambda flight: flight.name)
        # round by round and in name order on every rank: tensor by tensor, two ranks could wait for each other
        while flights := [flight for flight in flights if flight.handle is not None]:
            for flight in flights:
                self._advance(flight)

    def _agree(self) -> None:
        """One all-reduce of maxima (``agreement.Status``): did a rank fail, is all finite, does one ask for a trigger,
        do plan, step and loss scale agree?"""
        self.compressor.compare_plans_once(self.net)
        state = fingerprint(self.worker.plan.fingerprint, sorted(self.worker.steps.items()))
        scale = self.compressor.current_loss_scale() if self.error is None else 1.0
        mine = Status(self.error is not None, not self.finite, self.worker.take_request(), state, scale)
        status = Status.of(self.net.maximum("status", mine.numbers()))
        if status.failed:
            raise failure(self.net.gather_text("error", str(self.error or ""))) from self.error
        if not status.alike:
            raise PeerError("ranks disagree on the step: load every rank's own state, of the same step")
        status.check_loss_scale()
        self.finite = not status.non_finite
        if status.triggered and self.finite:
            self.worker.trigger()
        elif status.triggered:  # as if the step had not been: the request waits for the next
            self.worker.asks_for_trigger = True

    # -- results go out -------------------------------------------------------------------------------

    def hand_back(self, name: str, rode: torch.Tensor | None, factor: float) -> None:
        """Write the reduced gradient of ``name`` (and of its bucket) into its own memory, and commit its state."""
        unit = self.compressor.units[name]
        flight, members = self.flights[unit.spec.name], self.arrived[unit.spec.name]
        self.left.discard(name)
        if flight.extra.get("handed_back"):
            return  # with another member of its bucket
        flight.extra["handed_back"] = True
        ops = ops_for(members[name], self.compressor.force_torch)
        if rode is not None:
            factor = self.worker.take_ride(flight, rode.numpy() if ops is fast else rode, factor)
        outs = flight.extra["flats"]
        if self.finite:
            self.worker.finish(flight, outs, factor, ops)
        else:
            self.worker.abandon(flight, outs, ops)
        for member, out in zip(unit.members, outs, strict=True):
            _store(out, members[member.name])


def ops_for(tensor: torch.Tensor, force_torch: bool) -> Any:
    """The array verbs for a gradient: the numpy core on the CPU, through views; torch's on a GPU."""
    if tensor.device.type == "cpu" and not force_torch:
        return fast
    import hvdcompress.ops.torch as torch_ops

    return torch_ops


def as_flat(tensor: torch.Tensor, dtype: torch.dtype, ops: Any) -> Any:
    """The gradient as a flat array of the working dtype: a view of its memory where that can be."""
    flat = tensor.detach().to(dtype).contiguous().view(-1)
    return flat.numpy() if ops is fast else flat


def _store(out: Any, gradient: torch.Tensor) -> None:
    """Bring a result into the gradient's memory, if it is not there already."""
    result = torch.as_tensor(out)
    if result.data_ptr() != gradient.data_ptr() or result.dtype != gradient.dtype:
        gradient.detach().copy_(result.view(gradient.shape))
