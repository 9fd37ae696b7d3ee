"""What the engine asks of a network: one collective at a time, started, asked for, waited for.

A driver implements :class:`Transport` for its framework. The engine does everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from hvdcompress.method import Array

Handle = Any  #: whatever a transport returns from ``start``; the engine only hands it back


class Group(NamedTuple):
    """The ranks that take part in a collective: the rank of this one among them, and their number."""

    rank: int
    world: int


@dataclass(frozen=True, eq=False)
class Request:
    """One collective as it is really sent; ``collectives.lower`` makes it from a method's collective.

    Attributes:
        kind: the collective.
        payload: this rank's flat array [n], which may be empty; uint8 but for all-reduces. None for a broadcast, except
            on the root. Its memory belongs to the engine again when ``wait`` has returned on this rank: a transport
            whose ranks share memory, or that sends from another thread, copies it.
        op: the reduction of an all-reduce.
        send_lengths: of an all-to-all, the bytes for each rank; of a broadcast, (its bytes,).
        recv_lengths: of an all-to-all, the bytes from each rank; of an all-gather, every rank's length, or None where
            the transport finds that out.
        root: the rank that broadcasts.
        spent: nobody reads the payload afterwards: an all-reduce may write its result over it.
    """

    kind: Literal["all_reduce", "all_gather", "all_to_all", "broadcast"]
    payload: Array
    op: Literal["sum", "max"] = "sum"
    send_lengths: tuple[int, ...] | None = None
    recv_lengths: tuple[int, ...] | None = None
    root: int | None = None
    may_overwrite: bool = False


class Transport(Protocol):
    """Collectives among ``world`` ranks, of which this one is ``rank``."""

    rank: int
    world: int
    ordered: bool
    """Collectives have no names: every rank must start them in the same order (MPI, torch.distributed). Otherwise
    they are matched by name, and ranks may start them in any order (Horovod)."""
    native_broadcast: bool
    """Whether a broadcast is as fast as a sum. If not, the engine sends a sum to which the others give zeros."""
    variable_lengths: bool
    """Whether an all-gather takes payloads of different lengths without being told the lengths."""

    def start(self, name: str, request: Request) -> Handle:
        """Start a collective; returns at once.

        Args:
            name: equal on all ranks, and different from that of any other collective under way on this rank. Every step
                uses the same names, and a faster rank may start a name again before a slower one has its result: keep
                the messages from each rank in order. After a step that failed, some ranks have started collectives that
                others never start. A transport by name must not match those with the next step's; the Horovod driver
                makes no further step with the same names.
            request: what to send.
        """

    def ready(self, handle: Handle) -> bool:
        """Whether :meth:`wait` would return at once."""

    def wait(self, handle: Handle) -> Array:
        """The collective's result: a flat array of the payload's library, dtype and device.

        An all-gather's and an all-to-all's pieces stand one after another, in rank order.
        """

    def idle(self, handle: Handle) -> None:
        """Nothing has come yet: wait until ``handle``'s result may be there, or for a moment."""
