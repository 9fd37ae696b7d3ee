"""One optimizer step of the PyTorch driver: from the first gradient that arrives to the last that is handed back."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hvdcompress.engine.agreement import PeerError, Status, failure, fingerprint
from hvdcompress.engine.rank import Flight
from hvdcompress.method import AllReduce
from hvdcompress.ops import fast
from hvdcompress.plan import Bucket
from hvdcompress.torch.transport import Net, Pending

if TYPE_CHECKING:
    from hvdcompress.torch import Compressor


class Step:
    """Collects gradients into buckets, launches and pumps their exchanges, and agrees with the other ranks."""

    def __init__(self, compressor: Compressor, net: Net):
        self.compressor, self.net, self.worker = compressor, net, compressor.worker
        self.arrived: dict[str, dict[str, torch.Tensor]] = {}  # bucket -> member -> gradient
        self.flights: dict[str, Flight] = {}  # bucket -> its exchange
        self.waiting: deque[Flight] = deque()  # flights with a collective under way, oldest first
        self.order: list[str] = []  # members as they arrived
        self.left: set[str] = set()  # members not handed back yet
        self.error: Exception | None = None  # this rank's first one
        self.finite = True
        self.sealed = False  # the first decompress has happened: all exchanges are under way
        self.factor = 1.0  # of a sum over ranks, to be what the optimizer asks for; known when sealed
        self.done: list[Flight] = []  # exchanges at their end, whose results have not gone out

        self._status: Pending | None = None  # how the step went, on its way
        self._told = ""  # what this rank says has failed

    # -- gradients come in ----------------------------------------------------------------------------

    def take_in(self, name: str, gradient: torch.Tensor) -> bool:
        """Note a gradient, and start its bucket once it is whole; whether it rides on the stock all-reduce."""
        bucket = self.compressor.bucket_of[name]
        members = self.arrived.setdefault(bucket.spec.name, {})
        if name in members:
            raise RuntimeError(
                f"a second gradient of {name!r} came before the first was used: call optimizer.step() "
                "(or synchronize()) after every backward_passes_per_step backward passes"
            )
        members[name] = gradient
        self.order.append(name)
        self.left.add(name)
        return len(members) == len(bucket.members) and self._launch(bucket)

    def _launch(self, bucket: Bucket) -> bool:
        """Start a bucket's exchange. A member that has no gradient on this rank takes part as zeros."""
        members = self.arrived[bucket.spec.name]
        for member in bucket.members:
            if member.name not in members:
                members[member.name] = torch.zeros_like(self.compressor.parameters[member.name])
        ops = ops_for(next(iter(members.values())), self.compressor.force_torch)
        dtype = getattr(torch, self.worker.work_dtype(bucket))
        flats = [as_flat(members[m.name], dtype, ops) for m in bucket.members]
        flight = self.worker.start(
            bucket, self.worker.join(bucket, flats, ops), ops, self.compressor.current_loss_scale()
        )
        flight.extra["flats"], flight.extra["ops"] = flats, ops
        self.flights[bucket.spec.name] = flight
        self.finite = self.finite and flight.finite
        rides = self.compressor.ride_length(bucket, flight.ctx.phase) is not None
        if not rides:
            self._submit(flight)
        return rides

    def _submit(self, flight: Flight) -> None:
        assert flight.verb is not None
        flight.handle = self.net.submit(flight.name, flight.round, flight.verb)
        self.waiting.append(flight)

    def _advance(self, flight: Flight) -> None:
        """Give a flight the result that is there, and submit its next round."""
        result = self.net.wait(flight.handle, native=flight.extra["ops"] is not fast)
        flight.handle = None
        if flight.advance(result) is not None:
            self._submit(flight)
        else:
            self.done.append(flight)

    def pump_ready(self) -> None:
        """Launch next rounds of what is there already, so that they overlap with what is still to come.

        Oldest first, and no further than the first that is not there: one poll a gradient, not one a flight.
        """
        while self.waiting and self.net.ready(self.waiting[0].handle):
            self._advance(self.waiting.popleft())

    # -- the ranks agree ------------------------------------------------------------------------------

    def seal(self) -> None:
        """At the first decompress: start what is left, and say how the step went on this rank.

        Raises:
            PeerError: the ranks' plans differ; on every rank, in the first step.
        """
        if self.sealed:
            return
        with self._errors_wait():
            for name in sorted(self.arrived.keys() - self.flights.keys()):
                self._launch(self.compressor.buckets[name])
        self.sealed = True
        self.compressor.compare_plans_once(self.net)
        state = fingerprint(self.worker.plan.fingerprint, sorted(self.worker.steps.items()))
        scale = self.compressor.current_loss_scale() if self.error is None else 1.0
        self._told = "" if self.error is None else str(self.error) or type(self.error).__name__
        mine = Status(self.error is not None, not self.finite, self.worker.take_request(), state, scale)
        self._status = self.net.submit("status", 0, AllReduce(np.array(mine.numbers(), np.float64), "max"))

    def take_back(self, name: str, rode: torch.Tensor | None, factor: float) -> None:
        """At each decompress: go on with what has come, this tensor's payload if it ``rode``; waits for nothing."""
        self.left.discard(name)
        self.factor = factor
        with self._errors_wait():
            if rode is not None:
                flight = self.flights[self.compressor.bucket_of[name].spec.name]
                payload = rode.numpy() if flight.extra["ops"] is fast else rode
                self._deliver(flight, self.worker.take_ride(flight, payload, factor))
            self.pump_ready()
            self._deliver_done()

    @contextlib.contextmanager
    def _errors_wait(self) -> Iterator[None]:
        """Inside, an error waits for the status: it may come of what another rank failed to send, or sent otherwise."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error

    def end(self) -> None:
        """At the last decompress: hear how the step went on all ranks, end all exchanges, keep their state or drop it.

        Nothing is waited for before the status is there, and then no tensor in particular: ranks whose gradients
        come in different order would wait for each other.

        Raises:
            PeerError: a rank failed, or ranks disagree; on every rank.
        """
        assert self._status is not None  # sealed
        while not self.net.ready(self._status):
            with self._errors_wait():
                self._pump_or_pause()
        self._obey(Status.of(self.net.wait(self._status, native=False).tolist()))
        while self.waiting:
            self._pump_or_pause()
        for flight in self.flights.values():
            if self.finite:
                self.worker.commit(flight)
            else:
                self.worker.abandon(flight, flight.extra["flats"], flight.extra["ops"])
                self._store(flight)

    def _obey(self, status: Status) -> None:
        """What the ranks agreed upon."""
        if status.failed:
            raise failure(self.net.gather_text("error", self._told)) from self.error
        if not status.alike:
            raise PeerError("ranks disagree on the step: load every rank's own state, of the same step")
        status.check_loss_scale()
        if self.error:
            raise self.error
        self.finite = not status.non_finite
        if status.triggered and self.finite:
            self.worker.trigger()
        elif status.triggered:  # as if the step had not been: the request waits for the next
            self.worker.asks_for_trigger = True

    def _pump_or_pause(self) -> None:
        """Go on with whatever has come; a short sleep if nothing has."""
        for number, flight in enumerate(self.waiting):
            if self.net.ready(flight.handle):
                del self.waiting[number]
                self._advance(flight)
                self._deliver_done()
                return
        self.net.pause()

    # -- results go out -------------------------------------------------------------------------------

    def _deliver_done(self) -> None:
        while self.done:
            self._deliver(self.done.pop(), self.factor)

    def _deliver(self, flight: Flight, factor: float) -> None:
        """Write a bucket's reduced gradients into their own memory. Its state waits for the status."""
        self.worker.deliver(flight, flight.extra["flats"], factor, flight.extra["ops"])
        self._store(flight)

    def _store(self, flight: Flight) -> None:
        """Bring results into the gradients' memory, where they are not there already."""
        members = self.arrived[flight.name]
        for member, out in zip(flight.bucket.members, flight.extra["flats"], strict=True):
            gradient, result = members[member.name], torch.as_tensor(out)
            if result.data_ptr() != gradient.data_ptr() or result.dtype != gradient.dtype:
                gradient.detach().copy_(result.view(gradient.shape))


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
