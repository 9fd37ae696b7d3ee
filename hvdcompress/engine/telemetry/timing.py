"""How long steps take, and how much of that the exchange takes: what `summary()` explains.

A driver that sees where steps begin and end calls :meth:`StepTimes.note` once per step. The seconds of the codec and of
waiting are those that the ledger counts in any case.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from hvdcompress.engine.telemetry.ledger import Ledger

RECENT = 100  #: steps that are kept
FEWEST = 4  #: steps of which a mean is made


class StepTime(NamedTuple):
    """Seconds and bytes of a step, or the means of several.

    Attributes:
        whole: seconds from the step's first gradient to that of the next step.
        blocked: seconds of these in which the program could not go on because of the exchange.
        codec: seconds of codec work, which may overlap with the backward pass.
        waiting: seconds in which the exchange waited for a collective; they may overlap, too.
        on_wire: bytes that the rank transmits where collectives run as rings.
        dense: the same if gradients were sent uncompressed.
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
        """Seconds of codec and waiting that overlap with the backward pass, at least."""
        return max(0.0, self.codec + self.waiting - self.blocked)

    @property
    def other(self) -> float:
        """Seconds that block the program, and are neither codec nor waiting, at least."""
        return max(0.0, self.blocked - self.codec - self.waiting)


class StepTimes:
    """The times of recent steps of one rank.

    Args:
        ledger: counts the seconds of the codec and of waiting.
        rank: the rank.
    """

    def __init__(self, ledger: Ledger, rank: int):
        self._ledger = ledger
        self._rank = rank
        self._recent: deque[StepTime] = deque(maxlen=RECENT)
        self._before = self._totals()
        # the last step: whether it counts, when it began, and its time, of which ``whole`` is not known yet
        self._last: tuple[bool, float, StepTime] | None = None

    def note(self, began: float, blocked: float, waited: float = 0.0, counts: bool = True) -> None:
        """Note a step at its end.

        Args:
            began: when its first gradient came, in seconds.
            blocked: seconds in which the program could not go on.
            waited: seconds of waiting that the ledger does not count.
            counts: whether it is an ordinary, compressed step.
        """
        if self._last is not None:
            did_count, before, time = self._last
            if did_count:
                self._recent.append(time._replace(whole=began - before))
        totals = self._totals()
        codec, waiting, on_wire, dense = (now - then for now, then in zip(totals, self._before, strict=True))
        self._before = totals
        was_reset = dense < 0
        time = StepTime(0.0, blocked, codec, waiting + waited, on_wire, dense)
        self._last = (counts and not was_reset, began, time)

    def mean(self) -> StepTime | None:
        """Return the mean of the middle half of recent steps, by their length; None if there are too few.

        A step with an evaluation behind it, or in which kernels were compiled, so counts as little as in a median, and
        the parts of the mean still belong to the same steps.
        """
        steps = sorted(self._recent)
        if len(steps) < FEWEST:
            return None
        quarter = len(steps) // 4
        middle = steps[quarter : len(steps) - quarter]
        return StepTime(*(sum(values) / len(middle) for values in zip(*middle, strict=True)))

    def _totals(self) -> tuple[float, ...]:
        ledger, rank = self._ledger, self._rank
        seconds = ledger.seconds(rank)
        dense = 2 * (ledger.world - 1) / ledger.world * ledger.dense_bytes(rank)
        return seconds["codec"], seconds["wait"], ledger.bytes_on_wire(rank), dense
