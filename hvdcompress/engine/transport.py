"""Interface of a network: start one collective, ask whether it is done, wait for it.

A driver implements :class:`Transport` for its framework. The engine does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from hvdcompress.method import Array

Handle = Any  #: the value that a transport returns from ``start``; the engine passes it back unchanged


class Group(NamedTuple):
    """The ranks of a collective: this rank's index among them, and their number."""

    rank: int
    world_size: int


@dataclass(frozen=True, eq=False)
class Request:
    """One collective of the network; ``collectives.lower`` creates it from a method's collective.

    Attributes:
        kind: the kind of collective.
        payload: this rank's flat array [n], possibly empty. The dtype is uint8, except for all-reduces. None for a
            broadcast on ranks other than the root. The engine reuses the memory once ``wait`` has returned on this
            rank: a transport whose ranks share memory, or that sends from another thread, must copy it.
        op: the reduction of an all-reduce.
        send_lengths: for an all-to-all, the bytes to each rank; for a broadcast, (its bytes,).
        recv_lengths: for an all-to-all, the bytes from each rank; for an all-gather, the length of each rank's payload.
            None if the transport determines them.
        root: the rank that broadcasts.
        may_overwrite: whether an all-reduce may write its result over the payload.
    """

    kind: Literal["all_reduce", "all_gather", "all_to_all", "broadcast"]
    payload: Array
    op: Literal["sum", "max"] = "sum"
    send_lengths: tuple[int, ...] | None = None
    recv_lengths: tuple[int, ...] | None = None
    root: int | None = None
    may_overwrite: bool = False


class Transport(Protocol):
    """Collectives of ``world_size`` ranks; this process is rank ``rank``."""

    rank: int
    world_size: int
    ordered: bool
    """True if the network matches collectives by order, so that every rank must start them in the same order (MPI,
    torch.distributed). False if it matches them by name, so that ranks may start them in any order (Horovod)."""
    native_broadcast: bool
    """Whether a broadcast is as fast as a sum. If not, the engine requests a sum with zeros on non-root ranks."""
    variable_lengths: bool
    """Whether all-gathers and all-to-alls accept payloads of lengths that receivers do not know in advance."""
    shards_sums: tuple[str, ...]
    """The dtypes of which a large sum costs less as an all-to-all of shards, which each rank adds up, and an all-gather
    of them."""

    def start(self, name: str, request: Request) -> Handle:
        """Start a collective without waiting.

        Args:
            name: equal on all ranks, and unique among the collectives in flight on this rank. Names repeat in every
                step, and a faster rank may start a name again before a slower rank has its result: keep the messages
                from each rank in order. After a failed step, some ranks have started collectives that others never
                start. A transport that matches by name must not match them with those of the next step; the Horovod
                driver refuses further steps with the same names.
            request: the collective.
        """

    def ready(self, handle: Handle) -> bool:
        """Return whether the result is available (:meth:`wait` would not block)."""

    def wait(self, handle: Handle) -> Array:
        """Wait for the result: a flat array of the payload's library, dtype and device.

        The pieces of an all-gather or all-to-all are concatenated in rank order. If the lengths were known, the result
        may also be the list of the pieces.
        """

    def idle(self, handle: Handle) -> None:
        """Block until the result of ``handle`` may be available, or for a moment."""
