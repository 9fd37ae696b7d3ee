"""Give compression up where it does not pay: compare steps with and without it, once, in the beginning.

A plan with ``fallback: true`` exchanges some of its first steps uncompressed, as in ``Compressor.paused()``. The ranks
compare what both kinds of steps take on the slowest of them. If compression saves less than a twentieth, one more step
brings all residuals, and from then on gradients are reduced uncompressed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

#: The kinds of the first steps: whether they are uncompressed, and how many there are
SCHEDULE = ((False, 10), (True, 3), (False, 6), (True, 6))
SETTLING = 4  #: of the first steps, in which kernels are compiled, so many do not count
LONG = 0.3  #: seconds that a single uncompressed step must take more, to be enough
CLEAR = 1.3  #: how many times as long one kind must take to be refused after the first turn
WORTH = 0.95  #: compressed steps must take less than this part of uncompressed ones


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
        seconds: of steps with and without compression that count, on the slowest rank, once something is decided.
    """

    on: bool = False
    verdict: Verdict = Verdict.OPEN
    seconds: tuple[float, float] = (0.0, 0.0)
    _steps: int = 0
    _times: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})

    @property
    def uncompressed(self) -> bool:
        """Whether the next step is exchanged uncompressed."""
        return self._turn()[0] if self.compares else self.verdict is Verdict.DENSE

    @property
    def compares(self) -> bool:
        """Whether nothing is decided yet."""
        return self.on and self.verdict is Verdict.OPEN

    def _turn(self) -> tuple[bool, int]:
        """Return the kind of the next step, and how many steps of its turn came before it."""
        before = self._steps
        for kind, count in SCHEDULE:
            if before < count:
                return kind, before
            before -= count
        return False, before

    def note(self, seconds: float) -> None:
        """Note what a step took on this rank; one after each step."""
        if not self.compares:
            return
        kind, before = self._turn()
        # The first step of a turn meets cold caches, and buffers that are not there yet
        if before >= (SETTLING if self._steps < SCHEDULE[0][1] else 1) or (kind and not self._times[True]):
            self._times[kind].append(seconds)
        self._steps += 1

    def votes(self) -> list[float]:
        """Return what to compare with the other ranks in the next step; nothing if it is too early or decided."""
        if not self.compares or not all(self._times.values()):
            return []
        return [statistics.median(self._times[kind]) for kind in (False, True)]

    def hear(self, voted: Sequence[float]) -> None:
        """Take the greatest of the ranks' :meth:`votes`, and decide if that is possible."""
        if not voted or not self.compares:
            return
        compressed, dense = voted
        first = sum(count for _, count in SCHEDULE[:2])
        if self._steps == SCHEDULE[0][1] + 1:
            decided = dense > CLEAR * compressed + LONG
        elif self._steps == first:
            decided = max(dense, compressed) > CLEAR * min(dense, compressed)
        else:
            decided = self._steps >= sum(count for _, count in SCHEDULE)
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
        self._steps, self._times = 0, {False: [], True: []}
        if saved:
            self.verdict = Verdict(saved["verdict"])
            compressed, dense = saved["seconds"]
            self.seconds = (compressed, dense)

    def __str__(self) -> str:
        """What was measured and decided, for logs."""
        compressed, dense = (1000 * each for each in self.seconds)
        kept = "kept" if self.verdict is Verdict.COMPRESS else "given up"
        return (
            f"compression is {kept}: from the first gradient to the last result, a step took {compressed:.1f} ms with "
            f"it, and {dense:.1f} ms without (fallback: false in the plan does not compare)"
        )
