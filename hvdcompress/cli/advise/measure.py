"""What the ranks measure: real steps of every contender, in turns."""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdcompress.cli.advise.ranks import ALONE, DENSE, Contender, Ranks
from hvdcompress.cli.advise.workload import Workload
from hvdcompress.cli.numbers import Interval, mean_interval

WARM = 3  #: first steps, which never count: ranks compare plans, buffers are allocated, residuals fill up
TURN = 0.75  #: seconds of a turn of steps
SETTLING = 0.5  #: part of a turn that it may take until thresholds and caches have settled
LEAST, MOST = 2, 100  #: steps of a turn
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

    def gain(self, dense: Measured) -> float:
        """Return the part of a dense step that it saves; negative if it takes longer."""
        return 1 - self.seconds / dense.seconds

    def gains(self, dense: Measured) -> Interval:
        """Return the mean of the gains of all rounds, with its 90 % interval."""
        pairs = zip(self.rounds, dense.rounds, strict=True)
        return mean_interval([1 - statistics.median(own) / statistics.median(theirs) for own, theirs in pairs])


def measure_steps(ranks: Ranks, workload: Workload, contenders: Sequence[Contender], rounds: int) -> list[Measured]:
    """Measure steps in turns. Each round begins with another contender: none always follows the same one.

    The durations are those of the slowest rank, so all ranks return the same.
    """
    found = [Measured(one) for one in contenders]
    for index in range(rounds):
        if ranks.rank == 0:
            sys.stderr.write(f"measuring steps of {len(found)} contenders, round {index + 1} of {rounds} …\n")
        first = index * len(found) // rounds
        for one in [*found[first:], *found[:first]]:
            _measure_turn(ranks, workload, one)
    return found


def _measure_turn(ranks: Ranks, workload: Workload, measured: Measured) -> None:
    gc.collect()  # hooks and optimizers of the turn before hold each other
    with ranks.together():
        model, optimizer = workload.start(ranks.rank)
        batches = itertools.cycle([workload.batch() for _ in range(BATCHES)])
    training, plan = ranks.wrap(model, optimizer, measured.contender), measured.contender.plan
    ledger = training.compressor and training.compressor.ledger

    def step() -> float:
        batch = next(batches)
        ranks.share(None)  # all ranks begin together
        began = time.perf_counter()
        training.step(workload.loss, batch)
        return time.perf_counter() - began

    last = max(ranks.share(step()))
    if last < TURN or (plan and not plan.stateless):
        last = max(ranks.share([step() for _ in range(WARM - 1)][-1]))
        for _ in range(min(MOST, round(SETTLING * TURN / last))):
            step()
    if ledger:
        ledger.reset()
    times = [step() for _ in range(min(MOST, max(LEAST, round(TURN / last))))]
    measured.rounds.append([max(each) for each in zip(*ranks.share(times), strict=True)])
    trained = [parameter for parameter in training.module.parameters() if parameter.requires_grad]
    measured.dense_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    if ledger:
        mine = [ledger.bytes_sent(), ledger.bytes_on_wire(), ledger.seconds()["codec"]]
        measured.sent, measured.on_wire, measured.codec = np.max(ranks.share(mine), axis=0) / len(times)
    elif measured.label != ALONE:
        elements = sum(parameter.numel() for parameter in trained)
        measured.sent = measured.dense_bytes if measured.label == DENSE else 2.0 * elements
        measured.on_wire = 2 * (1 - 1 / ranks.world_size) * measured.sent
    training.close()
