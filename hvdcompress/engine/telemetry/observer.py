"""Looking on: the events of a rank's exchanges, for the ledger, benchmarks, timelines and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hvdcompress.method import Array


class Sent(NamedTuple):
    """A payload that was handed to a collective.

    Attributes:
        collective: "AllReduce", "AllGather", "Broadcast" or "AllToAll".
        payload: what was handed over; None for a broadcast of another rank, for a driver's own probe, and for a
            gradient that TensorFlow hands to Horovod itself.
        num_bytes: its size; of a broadcast, which every rank is charged, that of the root's.
        lengths: of an all-gather, the bytes of every rank.
        splits: of an all-to-all of unequal pieces, the bytes for each rank.
    """

    collective: str
    payload: Array | None
    num_bytes: int
    lengths: Sequence[int] | None = None
    splits: Sequence[int] | None = None


class Completed(NamedTuple):
    """The result of a collective that a method asked for.

    Attributes:
        method: the method's id.
        round: which collective of the exchange it was, from 0.
        collective: "AllReduce", "AllGather", "Broadcast" or "AllToAll".
        num_bytes: what this rank handed over; of a broadcast, what the root did.
        seconds: from when the method asked until it was given the result: a rank may do other work meanwhile.
    """

    method: str
    round: int
    collective: str
    num_bytes: int
    seconds: float


class Compared(NamedTuple):
    """Compressed gradients compared with the uncompressed average, of the step ``step``, counted from 1.

    Attributes:
        step: the step.
        cosine: of the angle between them, all tensors together.
        name: the tensor whose cosine is least.
        least: its cosine.
    """

    step: int
    cosine: float
    name: str
    least: float

    def __str__(self) -> str:
        return (
            f"cosine with the uncompressed average: {self.cosine:.3f} in step {self.step}, "
            f"least {self.least:.3f} ({self.name!r})"
        )


class Observer:
    """Base class of all that look on; ``compressor.watch(observer)`` adds one. Override the events you need.

    Every event says which ``rank`` it happened on (in loopback there are several) and, where that applies, the
    ``name`` of the tensor or bucket.
    """

    def begun(self, rank: int, name: str, num_bytes: int) -> None:
        """A gradient of ``num_bytes``, in its own dtype, came in."""

    def encoded(self, rank: int, name: str, seconds: float) -> None:
        """The codec worked for ``seconds`` before the exchange's last collective."""

    def sent(self, rank: int, name: str, what: Sent) -> None:
        """A payload was handed to a collective; ``name`` may be something else than a tensor, such as "status"."""

    def completed(self, rank: int, name: str, what: Completed) -> None:
        """The result of a collective that a method asked for is there."""

    def waited(self, rank: int, seconds: float) -> None:
        """The rank was blocked in its transport for ``seconds``."""

    def decoded(self, rank: int, name: str, seconds: float) -> None:
        """The codec worked for ``seconds`` after the exchange's last collective; writing results included."""

    def compared(self, rank: int, what: Compared) -> None:
        """Gradients were compared with the uncompressed average, as the plan's ``cosine_every`` says."""

    def committed(self, rank: int, name: str, counters: dict[str, Any]) -> None:
        """The exchange ended well and its new state is kept; ``counters``: what the method counted."""
