"""Durations of recent steps, which ``Compressor.summary()`` analyses.

A driver that sees the beginning and end of steps calls :meth:`StepTimes.note` once per step. Codec time and waiting
come from the ledger.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import NamedTuple

from hvdcompress.engine.telemetry.ledger import Ledger

RECENT = 100  #: number of steps that are kept
FEWEST = 4  #: minimum number of steps for a mean


class StepTime(NamedTuple):
    """Seconds and bytes of one step, or the means of several steps.

    Attributes:
        whole: seconds from the first gradient of the step to the first gradient of the next one.
        blocked: seconds in which the program waited for the exchange.
        codec: codec time in seconds; it may overlap with the backward pass.
        waiting: seconds in which the exchange waited for collectives; they may overlap, too.
        on_wire: bytes that the rank transmits if collectives run as rings.
        dense: bytes that it would transmit without compression.
    """

    whole: float
    blocked: float
    codec: float
    waiting: float
    on_wire: float
    dense: float

    @property
    def computing(self) -> float:
        """Seconds in which the program was not blocked."""
        return max(0.0, self.whole - self.blocked)

    @property
    def overlap(self) -> float:
        """Lower bound of the codec time and waiting that overlap with the backward pass, in seconds."""
        return max(0.0, self.codec + self.waiting - self.blocked)

    @property
    def other(self) -> float:
        """Lower bound of the blocked time that is neither codec time nor waiting, in seconds."""
        return max(0.0, self.blocked - self.codec - self.waiting)


class StepTimes:
    """Durations of the recent steps of one rank.

    Args:
        ledger: the ledger of the rank, which counts codec time and waiting.
        rank: the rank.
    """

    def __init__(self, ledger: Ledger, rank: int):
        self._ledger = ledger
        self._rank = rank
        self._before = self._totals()
        # When each step began, whether it counts, and its times. ``whole`` is unknown until the next step begins
        self._recent: deque[tuple[float, bool, StepTime]] = deque(maxlen=RECENT + 1)

    def note(self, began: float, blocked: float, waited: float = 0.0, counts: bool = True) -> None:
        """Record a step at its end.

        Args:
            began: time of the first gradient, in seconds.
            blocked: seconds in which the program waited for the exchange.
            waited: seconds of waiting that the ledger does not count.
            counts: whether it is an ordinary, compressed step.
        """
        totals = self._totals()
        codec, waiting, on_wire, dense = (now - then for now, then in zip(totals, self._before, strict=True))
        self._before = totals
        was_reset = dense < 0
        time = StepTime(0.0, blocked, codec, waiting + waited, on_wire, dense)
        self._recent.append((began, counts and not was_reset, time))

    def mean(self) -> StepTime | None:
        """Return the mean of the middle half of the recent steps, sorted by duration; None if there are too few.

        Like a median, this ignores steps with an evaluation or with compiling kernels. Unlike medians of the parts, all
        parts of the mean belong to the same steps.
        """
        steps = sorted(
            time._replace(whole=following - began)
            for (began, counts, time), (following, *_) in pairwise(self._recent)
            if counts
        )
        if len(steps) < FEWEST:
            return None
        quarter = len(steps) // 4
        middle = steps[quarter : len(steps) - quarter]
        return StepTime(*(sum(values) / len(middle) for values in zip(*middle, strict=True)))

    def _totals(self) -> tuple[float, ...]:
        ledger = self._ledger
        seconds = ledger.seconds(self._rank)
        dense = 2 * (ledger.world_size - 1) / ledger.world_size * ledger.dense_bytes(self._rank)
        return seconds["codec"], seconds["wait"], ledger.bytes_on_wire(self._rank), dense
