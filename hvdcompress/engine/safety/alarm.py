"""When a rank fails in the middle of a step whose collectives go by order: what was begun cannot be taken back.

The rank sounds an *alarm*, for which the others look wherever they wait. Then all ranks tell each other which
collectives of the step they have begun, and each makes up, with zeros, for those that it has not: nobody waits for
ever, and the next step finds all in order. How an alarm is sounded and heard is the transport's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from hvdcompress.engine.agreement import PeerError
from hvdcompress.engine.exchange import ExchangeError


class Alarm(Exception):
    """Another rank has failed in this step and waits in the transport's ``fail``."""


class Call(NamedTuple):
    """A collective that this rank has begun, for ranks that have not: without the payload.

    ``device`` is the kind of memory that the payload lies in, where a network takes several.
    """

    kind: str
    dtype: str
    size: int
    op: str
    send_lengths: tuple[int, ...] | None
    recv_lengths: tuple[int, ...] | None
    device: str = "cpu"


class AlarmTransport(Protocol):
    """A transport that can end a step on all ranks."""

    def fail(self, error: Exception | None) -> Exception:
        """End the step on all ranks, one of which has failed.

        The rank that failed calls it with its error, and the others, which then meet an :class:`Alarm`, with None.

        Returns:
            The error that every rank raises, the same everywhere.
        """


def missing_calls(everyone: Sequence[Sequence[Call]], rank: int) -> list[Call]:
    """The collectives of this step that some rank has begun and this one has not, as it must begin them now.

    Args:
        everyone: what each rank has begun, in order.
        rank: this rank.

    Returns:
        Calls in order, each to be begun with ``size`` zeros.
    """
    calls = []
    for number in range(len(everyone[rank]), max(map(len, everyone))):
        there = {r: begun[number] for r, begun in enumerate(everyone) if number < len(begun)}
        call = next(iter(there.values()))
        if call.kind == "all_gather":
            call = call._replace(size=(call.recv_lengths or ())[rank])
        elif call.kind == "all_to_all":
            ranks = range(len(everyone))
            send_lengths = tuple((there[r].recv_lengths or ())[rank] if r in there else 0 for r in ranks)
            recv_lengths = tuple((there[r].send_lengths or ())[rank] if r in there else 0 for r in ranks)
            call = call._replace(size=sum(send_lengths), send_lengths=send_lengths, recv_lengths=recv_lengths)
        calls.append(call)
    return calls


def common_error(transport: Any, caught: Exception, mine: Exception | None = None) -> Exception:
    """End the step on all ranks after an error; returns what this rank raises.

    Args:
        transport: its network, which can end a step on all ranks (:class:`AlarmTransport`).
        caught: what ended the step here.
        mine: what was wrong with this rank's input, of which the others were told by the status.
    """
    if isinstance(caught, Alarm):
        return transport.fail(None)
    if isinstance(caught, PeerError):  # all ranks have it
        return mine or caught
    common = transport.fail(caught)
    if isinstance(caught, ExchangeError):
        common.__cause__ = caught
        return common
    return caught
