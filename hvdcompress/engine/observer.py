"""What can be observed of a rank's exchanges: base class for benchmarks, timelines and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Observer:
    """Is told what one rank does. Every method does nothing unless it is overridden.

    Give one to ``compressor.watch(observer)``. Methods are called on the rank's main thread, in the order of the
    events; the time they take is part of the exchange's.
    """

    def begun(self, rank: int, name: str, num_bytes: int) -> None:
        """A gradient came in.

        Args:
            rank: whose.
            name: the tensor's.
            num_bytes: its size.
        """

    def encoded(self, rank: int, name: str, seconds: float) -> None:
        """The codec worked before the exchange's last collective.

        Args:
            rank: whose codec.
            name: the bucket's.
            seconds: how long.
        """

    def sent(
        self,
        rank: int,
        name: str,
        verb: str,
        payload: Any,
        num_bytes: int,
        lengths: Sequence[int] | None = None,
        splits: Sequence[int] | None = None,
    ) -> None:
        """A payload was handed to a collective.

        Args:
            rank: who sends it.
            name: the bucket's.
            verb: the collective's name, such as "AllReduce".
            payload: the array.
            num_bytes: its size.
            lengths: of an all-gather: every rank's payload in bytes, where they differ.
            splits: of an all-to-all: the bytes for each rank, where they differ.
        """

    def waited(self, rank: int, seconds: float) -> None:
        """The rank was blocked in the transport.

        Args:
            rank: who waited.
            seconds: how long.
        """

    def decoded(self, rank: int, name: str, seconds: float) -> None:
        """The codec worked after the exchange's last collective, or results were written.

        Args:
            rank: whose codec.
            name: the bucket's.
            seconds: how long.
        """

    def committed(self, rank: int, name: str, counters: dict[str, int]) -> None:
        """A new state was kept.

        Args:
            rank: whose.
            name: the bucket's.
            counters: what the method counted in this exchange.
        """
