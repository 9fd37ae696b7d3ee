"""Alarms: end a step on all ranks of an ordered network after one of them failed in the middle of it.

Ordered collectives cannot be cancelled. The failed rank therefore sounds an *alarm*, which the other ranks notice while
they wait. Then all ranks exchange the list of collectives that they have started in this step, and each rank starts the
missing ones with zeros. So no rank waits forever, and the next step starts in order. The transport implements how an
alarm is sent and noticed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from hvdcompress.engine.agreement import PeerError, peer_error
from hvdcompress.engine.exchange import ExchangeError


class Alarm(Exception):
    """Another rank has failed in this step and waits in :meth:`AlarmTransport.fail`."""


class Call(NamedTuple):
    """A collective that this rank has started, without its payload, for ranks that have not started it.

    Attributes:
        kind: the kind of collective, as in :class:`~hvdcompress.engine.transport.Request`.
        dtype: dtype of the payload.
        size: number of elements of the payload.
        op: the reduction of an all-reduce.
        send_lengths: bytes to each rank.
        recv_lengths: bytes from each rank.
        device: kind of memory of the payload, for networks that support several.
    """

    kind: str
    dtype: str
    size: int
    op: str
    send_lengths: Sequence[int] | None
    recv_lengths: Sequence[int] | None
    device: str = "cpu"


class AlarmTransport(ABC):
    """Base of the transports that match collectives by order, and can end a step on all ranks.

    Args:
        alarms: the alarms of all ranks, with a method ``exchange``.
        ranks: the ranks that take part, as ranks of the alarms.

    Attributes:
        calls: the collectives that this rank has started in this step.
        running: those that are in flight.
        parts: transports of some of the ranks, for exchanges with two levels.
    """

    rank: int
    ordered = True
    native_broadcast = False
    variable_lengths = False
    shards_sums: tuple[str, ...] = ()

    def __init__(self, alarms: Any, ranks: Sequence[int]):
        self.alarms = alarms
        self.ranks = ranks
        self.calls: list[Call] = []
        self.running: list[Any] = []
        self.parts: list[Any] = []

    def begin(self) -> None:
        """Begin a step. Forget the last one, which may have failed."""
        self.alarms.step += 1
        for transport in (self, *self.parts):
            transport.calls.clear()

    def fail(self, caught: Exception, mine: Exception | None = None) -> Exception:
        """End the step on all ranks after an error, and return the exception that this rank must raise.

        Every rank tells all others its error and the collectives that it has started. Then each rank joins, with
        zeros, the collectives that only others have started, so that none of them waits forever.

        Args:
            caught: the exception that ended the step on this rank.
            mine: an error in the input of this rank, which the status has reported to the other ranks.

        Returns:
            The error of this rank, if its status or its alarm has one; or PeerError with the errors of all ranks, the
            same everywhere; or another exception if the ranks cannot reach each other.
        """
        # A PeerError is raised on all ranks, so no alarm is needed
        if isinstance(caught, PeerError):
            return mine or caught
        transports = [self, *self.parts]
        try:
            calls = [transport.calls for transport in transports]
            everyone = self.alarms.exchange(None if isinstance(caught, Alarm) else caught, calls)
            for number, transport in enumerate(transports):
                started = [everyone[rank][1][number] for rank in transport.ranks]
                transport.join(missing_calls(started, transport.rank))
            common: Exception = peer_error([text for text, _ in everyone])
        except RuntimeError as lost:
            common = lost
        if isinstance(caught, ExchangeError):
            common.__cause__ = caught
        return common if isinstance(caught, Alarm | ExchangeError) else caught

    @abstractmethod
    def join(self, calls: Sequence[Call]) -> None:
        """Start collectives with zeros, and wait for all collectives in flight.

        Raises:
            RuntimeError: the network does not work any more.
        """


def missing_calls(everyone: Sequence[Sequence[Call]], rank: int) -> list[Call]:
    """Return the collectives of this step that other ranks have started and this rank has not.

    Args:
        everyone: the calls of each rank in order, in rank order.
        rank: this rank.

    Returns:
        The calls in order. This rank must start each of them with ``size`` zeros.
    """
    calls = []
    for number in range(len(everyone[rank]), max(map(len, everyone))):
        started = {r: begun[number] for r, begun in enumerate(everyone) if number < len(begun)}
        call = next(iter(started.values()))
        if call.kind == "all_gather":
            call = call._replace(size=(call.recv_lengths or ())[rank])
        elif call.kind == "all_to_all":
            # Mirror what each rank that has started expects from this one; the others exchange nothing
            ranks = range(len(everyone))
            send_lengths = tuple((started[r].recv_lengths or ())[rank] if r in started else 0 for r in ranks)
            recv_lengths = tuple((started[r].send_lengths or ())[rank] if r in started else 0 for r in ranks)
            call = call._replace(size=sum(send_lengths), send_lengths=send_lengths, recv_lengths=recv_lengths)
        calls.append(call)
    return calls
