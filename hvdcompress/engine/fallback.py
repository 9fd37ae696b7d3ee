"""Give compression up where it does not pay: compare steps with and without it, once, in the beginning.

A plan with ``fallback: true`` exchanges some of its first steps uncompressed, as in ``Compressor.paused()``. With the
status of compressed steps, the ranks compare what both kinds of steps take on the slowest of them. If compression saves
less than a twentieth, one more step brings all residuals, and from then on gradients are reduced uncompressed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

#: The kinds of the first steps: whether they are uncompressed, and how many there are
SCHEDULE = ((False, 10), (True, 1), (False, 3), (True, 4), (False, 6), (True, 4))
SETTLING = 4  #: of the first steps, in which kernels are compiled, so many do not count
LONG = 0.3  #: seconds that a single uncompressed exchange must take more, to be enough
CLEAR = 1.3  #: how many times as long one kind must take to be refused after its first turn
WORTH = 0.95  #: compressed steps must take less than this part of uncompressed ones
_FIRST = sum(count for _, count in SCHEDULE[:4]) + 1  # steps until the first turns can be compared
_ALL = sum(count for _, count in SCHEDULE) + 1


class Verdict(StrEnum):
    """What was decided."""

    OPEN = "open"
    COMPRESS = "compress"
    FLUSH = "flush"  #: the next step brings the residuals, and then nothing is compressed
    DENSE = "dense"


@dataclass
class Fallback:
    """One rank's part in the comparison.

    Attributes:
        on: whether steps are compared at all.
        verdict: what was decided; equal on all ranks.
        seconds: of steps with and without compression, on the slowest rank, once something is decided.
    """

    on: bool = False
    verdict: Verdict = Verdict.OPEN
    seconds: tuple[float, float] = (0.0, 0.0)
    _steps: int = 0
    _last: tuple[bool, bool, float] | None = None  # of the last step: its kind, whether it counts, when it began
    # by kind: from the first gradient to the last result, and from one step's first gradient to the next one's
    _exchanges: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    _whole: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})

    @property
    def uncompressed(self) -> bool:
        """Whether the next step is exchanged uncompressed."""
        return self._turn()[0] if self.compares else self.verdict is Verdict.DENSE

    @property
    def compares(self) -> bool:
        """Whether nothing is decided yet."""
        return self.on and self.verdict is Verdict.OPEN

    @property
    def outcome(self) -> str:
        """What was decided, in words."""
        return "kept" if self.verdict is Verdict.COMPRESS else "given up"

    def _turn(self) -> tuple[bool, int]:
        """Return the kind of the next step, and how many steps of its turn came before it."""
        before = self._steps
        for kind, count in SCHEDULE:
            if before < count:
                return kind, before
            before -= count
        return False, before

    def note(self, began: float, ended: float) -> None:
        """Note when a step's first gradient came on this rank, and when its last result was there, in seconds."""
        if not self.compares:
            return
        if self._last is not None:
            kind, counts, before = self._last
            if counts:
                self._whole[kind].append(began - before)
        kind, number = self._turn()
        # The first step of a turn meets cold caches, and buffers that are not there yet
        counts = number >= (SETTLING if self._steps < SCHEDULE[0][1] else 1)
        if counts or (kind and not self._exchanges[kind]):
            self._exchanges[kind].append(ended - began)
        self._last = (kind, counts, began)
        self._steps += 1

    def votes(self) -> list[float]:
        """Return what to compare with the other ranks in the next step; nothing if it is too early or decided."""
        if not self.compares or not all(self._exchanges.values()):
            return []
        whole = [statistics.median_low(self._whole[kind] or [0.0]) for kind in (False, True)]
        return [*whole, *(statistics.median_low(self._exchanges[kind]) for kind in (False, True))]

    def decide(self, voted: Sequence[float]) -> None:
        """Take the greatest of the ranks' :meth:`votes`, and decide if that is possible."""
        if not voted or not self.compares:
            return
        compressed, dense, *exchanges = voted
        if self._steps < _FIRST:
            # A whole step may have an evaluation in it, so a single one says nothing
            compressed, dense = exchanges
            decided = dense > CLEAR * compressed + LONG
        elif self._steps < _ALL:
            decided = max(dense, compressed) > CLEAR * min(dense, compressed)
        else:
            decided = True
        if decided:
            self.seconds = (compressed, dense)
            self.verdict = Verdict.COMPRESS if compressed < WORTH * dense else Verdict.FLUSH

    def end_step(self) -> bool:
        """Note that a step has ended; return whether it brought the residuals, and compression is given up now."""
        if self.verdict is Verdict.FLUSH:
            self.verdict = Verdict.DENSE
            return True
        return False

    def state(self) -> dict[str, Any]:
        """Return what was decided, as plain data to save."""
        return {"verdict": self.verdict.value, "seconds": list(self.seconds)}

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Take over what was decided, if it was; what is not decided is compared from the beginning."""
        self.verdict, self.seconds = Verdict.OPEN, (0.0, 0.0)
        self._steps, self._last = 0, None
        self._exchanges, self._whole = {False: [], True: []}, {False: [], True: []}
        if saved:
            self.verdict = Verdict(saved["verdict"])
            compressed, dense = saved["seconds"]
            self.seconds = (compressed, dense)

    def __str__(self) -> str:
        """What was measured and decided, for logs."""
        compressed, dense = (1000 * each for each in self.seconds)
        return (
            f"compression is {self.outcome}: a step took {compressed:.1f} ms with it, and {dense:.1f} ms without "
            "(fallback: false in the plan does not compare)"
        )
