"""Fallback to uncompressed steps: compare steps with and without compression once, at the beginning of training.

A plan with ``fallback: true`` exchanges some of its first steps uncompressed, as in ``Compressor.paused()``. With the
status of compressed steps, the ranks compare the durations of both kinds of steps on the slowest rank. If compression
saves less than 5 % of a step, the next ``SPREAD`` steps also send the residuals, an equal share in each, and all later
gradients are reduced uncompressed. Sent in one step, the residuals would be a gradient of several times the usual norm.

The residual of a tensor without a gradient waits for the next one, for at most ``PATIENCE`` steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hvdcompress.method import AllReduce, Array, Communication, Context, FeedbackName, Reduced, Workspace
from hvdcompress.methods.none import Dense
from hvdcompress.parts import feedback

#: The measurement: (whether the steps are uncompressed, number of steps) of each run of steps
SCHEDULE = ((False, 10), (True, 1), (False, 3), (True, 4), (False, 6), (True, 4))
SETTLING = 4  #: first steps that are not measured, because kernels are compiled in them
LONG = 0.3  #: seconds by which a single uncompressed exchange must be slower to end the measurement early
CLEAR = 1.3  #: ratio of durations that ends the measurement after the first two runs
WORTH = 0.95  #: compression is kept if a compressed step takes less than this part of an uncompressed one
SPREAD = 20  #: steps over which the residuals are sent
REPEATS = 3  #: further steps, which send what the range of float16 put back into the residuals
PATIENCE = 100  #: steps after which the residuals of tensors without a gradient are dropped
_FIRST = sum(count for _, count in SCHEDULE[:4]) + 1  # steps after which the first runs can be compared
_STEPS = [(uncompressed, index) for uncompressed, count in SCHEDULE for index in range(count)]
_ALL = len(_STEPS) + 1


class Verdict(StrEnum):
    """Result of the measurement."""

    OPEN = "open"
    COMPRESS = "compress"
    FLUSH = "flush"  #: the next steps send the residuals, and later steps are uncompressed
    DENSE = "dense"


@dataclass(frozen=True, kw_only=True)
class Flush(Dense):
    """Sums gradients without compression, together with a part of the residual.

    Attributes:
        feedback: "lowpass", with the ``beta`` of the method that left the residual; see ``parts/feedback.py``.
        share: the part of the residual that is sent.
    """

    feedback: FeedbackName = "lowpass"
    share: float = 1.0

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        """Sum the gradient and a share of the residual. The rest of the residual is kept."""
        sent = work.buffer("sent", ctx.spec.size, "float32", x)
        work.ops.write(sent, x, 1.0)
        work.ops.subtract(sent, state[feedback.RESIDUAL], 1.0 - self.share / self.beta)
        total = yield AllReduce(sent)
        return Reduced(total=total, own=sent)


@dataclass
class Fallback:
    """The measurement on one rank.

    Attributes:
        on: whether to measure at all.
        verdict: the result; equal on all ranks.
        seconds: duration of a compressed and of an uncompressed step on the slowest rank; zeros before a verdict.
        num_flushed: number of steps that have sent a share of the residuals.
    """

    on: bool = False
    verdict: Verdict = Verdict.OPEN
    seconds: tuple[float, float] = (0.0, 0.0)
    num_flushed: int = 0
    _steps: int = 0
    _last: tuple[bool, bool, float] | None = None  # the last step: uncompressed, whether it counts, when it began
    # {uncompressed: durations}, from the first gradient to the last result
    _exchanges: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    # {uncompressed: durations}, from the first gradient of a step to that of the next step
    _whole: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})

    @property
    def uncompressed(self) -> bool:
        """Whether the next step is exchanged uncompressed."""
        return self._position()[0] if self.compares else self.verdict is Verdict.DENSE

    @property
    def compares(self) -> bool:
        """Whether the measurement is still running."""
        return self.on and self.verdict is Verdict.OPEN

    @property
    def outcome(self) -> str:
        """The verdict as text."""
        return "kept" if self.verdict is Verdict.COMPRESS else "given up"

    def _position(self) -> tuple[bool, int]:
        """Return whether the next step is uncompressed, and its index in its run of steps."""
        after = self._steps - len(_STEPS)
        return _STEPS[self._steps] if after < 0 else (False, after)

    def note(self, began: float, ended: float) -> None:
        """Record the duration of a step on this rank.

        Args:
            began: time of the first gradient, in seconds.
            ended: time at which the last result was available.
        """
        if self._last is not None:
            uncompressed, counts, before = self._last
            if counts:
                self._whole[uncompressed].append(began - before)
        uncompressed, index = self._position()
        # The first step of a run has cold caches and allocates buffers
        counts = index >= (SETTLING if self._steps < SCHEDULE[0][1] else 1)
        # The very first uncompressed step is used nevertheless: it may end the measurement early (LONG)
        if counts or (uncompressed and not self._exchanges[True]):
            self._exchanges[uncompressed].append(ended - began)
        self._last = (uncompressed, counts, began)
        self._steps += 1

    def votes(self) -> list[float]:
        """Return this rank's median durations, to be all-reduced with max; empty if too early or already decided."""
        if not self.compares or not all(self._exchanges.values()):
            return []
        whole = [statistics.median_low(self._whole[kind] or [0.0]) for kind in (False, True)]
        return [*whole, *(statistics.median_low(self._exchanges[kind]) for kind in (False, True))]

    def decide(self, votes: Sequence[float]) -> None:
        """Decide, if the durations allow it already.

        Args:
            votes: elementwise maximum of the :meth:`votes` of all ranks; may be empty.
        """
        if not votes:
            return
        compressed, dense, *exchanges = votes
        if self._steps < _FIRST:
            # A single whole step may contain an evaluation, so compare the exchanges only
            compressed, dense = exchanges
            decided = dense > CLEAR * compressed + LONG
        else:
            decided = self._steps >= _ALL or max(dense, compressed) > CLEAR * min(dense, compressed)
        if decided:
            self.seconds = (compressed, dense)
            self.verdict = Verdict.COMPRESS if compressed < WORTH * dense else Verdict.FLUSH

    @property
    def share(self) -> float:
        """The part of the residuals that the next step sends, with verdict FLUSH."""
        return 1.0 / max(SPREAD - self.num_flushed, 1)

    @property
    def flushes_all(self) -> bool:
        """Whether the residual of a tensor that takes part in the next step is zero after it."""
        return self.verdict is Verdict.FLUSH and self.num_flushed + 1 >= SPREAD + REPEATS

    def state(self) -> dict[str, Any]:
        """Return the verdict as plain data for a saved state."""
        return {"verdict": self.verdict.value, "seconds": list(self.seconds)}

    @classmethod
    def restored(cls, on: bool, saved: Mapping[str, Any] | None) -> Fallback:
        """Return a fallback with a saved verdict. An unfinished measurement starts again."""
        if not saved:
            return cls(on)
        compressed, dense = saved["seconds"]
        return cls(on, Verdict(saved["verdict"]), (compressed, dense))

    def __str__(self) -> str:
        """Return the measured durations and the verdict, for logs."""
        compressed, dense = (1000 * each for each in self.seconds)
        return (
            f"compression is {self.outcome}: a step took {compressed:.1f} ms with it and {dense:.1f} ms without it "
            "(fallback: false in the plan skips this comparison)"
        )
