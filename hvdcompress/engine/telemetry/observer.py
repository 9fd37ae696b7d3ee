"""Event hooks: the events of a rank's exchanges, for the ledger, benchmarks, timelines and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hvdcompress.engine.transport import Group
from hvdcompress.method import Array


class Sent(NamedTuple):
    """A payload that was passed to a collective.

    Attributes:
        collective: "AllReduce", "AllGather", "Broadcast" or "AllToAll".
        payload: the payload. None for a broadcast from another rank, for a driver's own probe, and for a gradient that
            TensorFlow passes to Horovod itself.
        num_bytes: size of the payload. For a broadcast it is the size on the root, which is charged to every rank.
        lengths: for an all-gather, the bytes of every rank.
        splits: for an all-to-all with unequal pieces, the bytes for each rank.
        group: this rank's index among the ranks that take part, and their number; None for all ranks.
        inside_node: whether all of these ranks are on one node, in an exchange with two levels.
    """

    collective: str
    payload: Array | None
    num_bytes: int
    lengths: Sequence[int] | None = None
    splits: Sequence[int] | None = None
    group: Group | None = None
    inside_node: bool = False


class Completed(NamedTuple):
    """A completed collective of a method.

    Attributes:
        method: the method's id.
        round: index of the collective in its exchange, from 0.
        collective: "AllReduce", "AllGather", "Broadcast" or "AllToAll".
        num_bytes: bytes that this rank sent; for a broadcast, the bytes that the root sent.
        seconds: from the request of the method until it received the result. The rank may do other work in between.
    """

    method: str
    round: int
    collective: str
    num_bytes: int
    seconds: float


class Observer:
    """Base class of event observers. Register one with ``compressor.add_observer(observer)``, and override events.

    Every event has the ``rank`` on which it happened (in loopback there are several) and, if applicable, the ``name``
    of the tensor or bucket.
    """

    def begun(self, rank: int, name: str, num_bytes: int) -> None:
        """A gradient of ``num_bytes``, in its own dtype, was added."""

    def encoded(self, rank: int, name: str, seconds: float) -> None:
        """The codec ran for ``seconds`` before the last collective of an exchange."""

    def sent(self, rank: int, name: str, what: Sent) -> None:
        """A payload was passed to a collective. ``name`` may be something other than a tensor, such as "status"."""

    def completed(self, rank: int, name: str, what: Completed) -> None:
        """A collective of a method completed."""

    def waited(self, rank: int, seconds: float) -> None:
        """The rank was blocked in its transport for ``seconds``."""

    def decoded(self, rank: int, name: str, seconds: float) -> None:
        """The codec ran for ``seconds`` after the last collective of an exchange, including writing the results."""

    def committed(self, rank: int, name: str, counters: dict[str, Any]) -> None:
        """The exchange was committed. ``counters`` are the method's counts."""
