"""What the ranks measure: real steps of every contender in turns, and trainings of equal duration."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdcompress.cli.advise.losses import Curve, Gap, Trial, gap_of
from hvdcompress.cli.advise.ranks import ALONE, DENSE, Contender, Ranks, Training, UserError
from hvdcompress.cli.advise.workload import Workload
from hvdcompress.local_steps import LocalSteps

WARM = 3  #: first steps, which never count: ranks compare plans, buffers are allocated, residuals fill up
TURN = 0.75  #: seconds of a turn of steps
SETTLING = 0.5  #: part of a turn that it may take until thresholds and caches have settled
LEAST, MOST = 2, 100  #: steps of a turn
EXCHANGES = 3  #: exchanges of parameters that are measured, after one that does not count
BATCHES = 4  #: batches that the steps of a turn use again and again; making them is not measured


@dataclass
class Measured:
    """A contender and its steps; bytes and codec time are per step, of the rank that has the most."""

    contender: Contender
    rounds: list[list[float]] = field(default_factory=list)  #: seconds of the steps of each turn, on the slowest rank
    dense_bytes: float = 0.0  #: of the gradients
    sent: float = 0.0  #: bytes that a rank passes to its collectives
    on_wire: float = 0.0  #: bytes that a rank transmits, if the collectives run as rings
    codec: float = 0.0  #: seconds of encoding and decoding
    trial: Trial | None = None  #: its loss and dense training's; None if it was not trained

    @property
    def label(self) -> str:
        """The contender's name."""
        return self.contender.label

    @property
    def quartiles(self) -> list[float]:
        """First quartile, median and third quartile of the durations."""
        return np.quantile(list(itertools.chain(*self.rounds)), [0.25, 0.5, 0.75]).tolist()

    @property
    def seconds(self) -> float:
        """Median duration of a step."""
        return self.quartiles[1]

    @property
    def lost(self) -> bool:
        """Whether its loss was worse than dense training's after the same seconds."""
        return self.trial is not None and self.trial.lost

    def gain(self, dense: Measured) -> float:
        """Return the part of a dense step that it saves; negative if it takes longer."""
        return 1 - self.seconds / dense.seconds

    def gains(self, dense: Measured) -> Gap:
        """Return the mean of the gains of all rounds, with its 90 % interval."""
        pairs = zip(self.rounds, dense.rounds, strict=True)
        return gap_of([1 - statistics.median(own) / statistics.median(theirs) for own, theirs in pairs])


@dataclass
class Measurements:
    """Measures contenders on all ranks; rank 0 prints what runs."""

    ranks: Ranks
    workload: Workload

    def _say(self, words: str) -> None:
        if self.ranks.rank == 0:
            sys.stderr.write(f"{words} …\n")

    def _start(self, contender: Contender, seed: int = 0) -> Training:
        gc.collect()  # hooks and optimizers of the training before hold each other
        with self.ranks.together():
            model, optimizer = self.workload.start(self.ranks, seed)
        return self.ranks.wrap(model, optimizer, contender)

    def steps(self, contenders: Sequence[Contender], rounds: int) -> list[Measured]:
        """Measure steps in turns. Each round begins with another contender: none always follows the same one."""
        found = [Measured(one) for one in contenders]
        for index in range(rounds):
            self._say(f"measuring steps of {len(found)} contenders, round {index + 1} of {rounds}")
            first = index * len(found) // rounds
            for one in [*found[first:], *found[:first]]:
                self._turn(one)
        return found

    def _turn(self, measured: Measured) -> None:
        training, plan = self._start(measured.contender), measured.contender.plan
        ledger = training.compressor and training.compressor.ledger
        with self.ranks.together():
            batches = itertools.cycle([self.workload.batch() for _ in range(BATCHES)])

        def step() -> float:
            batch = next(batches)
            self.ranks.sums(0.0)  # all ranks begin together
            began = time.perf_counter()
            training.step(self.workload.loss, batch)
            return time.perf_counter() - began

        last = max(self.ranks.share(step()))
        if last < TURN or (plan and not plan.stateless):
            last = max(self.ranks.share([step() for _ in range(WARM - 1)][-1]))
            for _ in range(min(MOST, round(SETTLING * TURN / last))):
                step()
        if ledger:
            ledger.reset()
        times = [step() for _ in range(min(MOST, max(LEAST, round(TURN / last))))]
        measured.rounds.append([max(each) for each in zip(*self.ranks.share(times), strict=True)])
        trained = [parameter for parameter in training.module.parameters() if parameter.requires_grad]
        measured.dense_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        if ledger:
            mine = [ledger.bytes_sent(), ledger.bytes_on_wire(), ledger.seconds()["codec"]]
            measured.sent, measured.on_wire, measured.codec = np.max(self.ranks.share(mine), axis=0) / len(times)
        elif measured.label != ALONE:
            is_dense = measured.label == DENSE
            measured.sent = measured.dense_bytes if is_dense else 2.0 * sum(parameter.numel() for parameter in trained)
            measured.on_wire = 2 * (1 - 1 / self.ranks.world_size) * measured.sent
        training.close()

    def exchange(self, method: str) -> float:
        """Return the median duration of an exchange of all parameters by a method, as local steps do it, in seconds."""
        with self.ranks.together():
            model, optimizer = self.workload.start(self.ranks)
        times = []
        with LocalSteps(model, optimizer, every=1, method=method) as local:
            for _ in range(1 + EXCHANGES):
                self.ranks.sums(0.0)  # all ranks begin together
                began = time.perf_counter()
                local.step()
                times.append(time.perf_counter() - began)
        return max(self.ranks.share(statistics.median(times[1:])))

    def trial(self, contender: Contender, seconds: float, seeds: int, dense: dict[int, Curve]) -> Trial:
        """Train with every seed; of two seeds in a row, each begins with another training.

        ``dense`` has the dense trainings so far by seed, and missing ones are added.
        """
        curves: dict[int, Curve] = {}
        for seed in range(seeds):
            self._say(f"training {contender.label} and dense, seed {seed + 1} of {seeds}, {seconds:g} s each")
            for one in (contender, Contender(DENSE)) if seed % 2 else (Contender(DENSE), contender):
                target = curves if one is contender else dense
                if seed not in target:
                    target[seed] = self.train(one, seconds, seed)
        return Trial(contender.label, seconds, [dense[seed] for seed in range(seeds)], [*curves.values()])

    def train(self, contender: Contender, seconds: float, seed: int) -> Curve:
        """Train until the seconds are over, or a loss is NaN or Inf; batches and the first steps do not count.

        All ranks stop after the same step: before each step they add up the seconds of rank 0, and how many ranks have
        diverged or have no batch.
        """
        training = self._start(contender, seed)
        times: list[float] = []
        losses: list[float] = []
        elapsed = 0.0
        while True:
            batch, failure = None, ""
            try:
                batch = self.workload.batch()
            except UserError as error:
                failure = str(error)
            has_diverged = bool(losses) and not math.isfinite(losses[-1])
            spent, diverged, failed = self.ranks.sums(0.0 if self.ranks.rank else elapsed, has_diverged, bool(failure))
            if failed:
                self.ranks.agree(failure)
            if diverged or (spent >= seconds and losses):
                break
            began = time.perf_counter()
            losses.append(training.step(self.workload.loss, batch).item())
            elapsed += time.perf_counter() - began if len(losses) > WARM else 0.0
            times.append(elapsed)
        training.close()
        every = self.ranks.share((times, losses))
        return Curve(every[0][0], [statistics.fmean(each) for each in zip(*(one[1] for one in every), strict=True)])
