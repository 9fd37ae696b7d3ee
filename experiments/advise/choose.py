"""Choose what each tensor gets, and say what it is worth.

Candidates are methods with their settings. Each gives two plans: the method everywhere, and the method on those tensors
alone where it shortens the step, found greedily, the largest first (Espresso, arXiv 2205.14465, §4.3). Tensors whose
communication is hidden behind the backward pass do not shorten it, and stay dense.
"""

from __future__ import annotations

import copy
import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.advise.exchanges import Codecs, buckets_of, status, unit_of
from experiments.advise.losses import Trial
from experiments.advise.timeline import Link, Step, Times, Unit, simulate
from experiments.configfile import MethodEntry
from hvdcompress.engine.telemetry.describe import memory as memory_of
from hvdcompress.plan import BY_NAME, Bucket, Grouping, Plan, load

__all__ = ["DENSE", "Candidate", "Case", "bisected", "candidates"]

DENSE = "dense"
NOTHING = 1e-3  # of a step: what a tensor must gain at least to be compressed
RATES = (1e6, 1e12)  # bits per second: break-even is looked for between these
SCAN = 49  # rates at which that begins
HALVINGS = 30  # of an interval in which a number is looked for


@dataclass(frozen=True)
class Candidate:
    """A plan and what is predicted of it.

    ``compressed`` of ``tensors`` tensors do not travel dense; ``memory``: state on a rank; ``break_even``: the
    link's ``speed`` below which the step is shorter than the dense one, 0 if it never is, infinite if it always is;
    ``partly``: it is the greedy plan of its method; ``measured``: the seconds of a real step, if some were made;
    ``trial``: its training against a dense one, if there was one.
    """

    label: str
    method: str
    plan: Plan
    step: Step
    compressed: int
    tensors: int
    memory: int = 0
    break_even: float = 0.0
    partly: bool = False
    measured: float | None = None
    trial: Trial | None = None

    @property
    def lost(self) -> bool:
        """Whether its loss was worse than dense training's after the same seconds."""
        return self.trial is not None and self.trial.lost

    @property
    def seconds(self) -> float:
        """A step's: measured, or else predicted."""
        return self.step.seconds if self.measured is None else self.measured

    def off(self, error: float) -> float:
        """How far that may be off, in seconds, where what an exchange adds is predicted with this relative error."""
        return error * self.step.exposed if self.measured is None else 0.0


class Case:
    """One training over one link: predicts steps of plans.

    Args:
        tensors: shapes by name.
        times: when gradients are ready.
        link: what collectives cost.
        world_size: the number of ranks.
        codecs: gives a method's codec.
        shared: ranks that share a processor.
        grouping: which tensors travel together under a plan. The dense step is the framework's own.
        handling: processor seconds that a plan which is not dense adds to each gradient, besides codecs and calls.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[int, ...]],
        times: Times,
        link: Link,
        world_size: int,
        codecs: Codecs,
        shared: float = 1.0,
        grouping: Grouping = BY_NAME,
        handling: float = 0.0,
    ):
        self.tensors, self.times, self.world_size, self.codecs, self.shared = tensors, times, world_size, codecs, shared
        self.grouping, self.handling = grouping, handling
        self.given, self.link = link, replace(link, call=link.call * shared)
        self.dense = load({"method": "none"})
        self._units: dict[Any, Unit] = {}

    def over(self, link: Link) -> Case:
        """The same training over another link."""
        case = copy.copy(self)  # units, which do not depend on the link, are shared
        case.given, case.link = link, replace(link, call=link.call * self.shared)
        return case

    def with_handling(self, seconds: float) -> Case:
        """The same training, with so many seconds of handling for each gradient."""
        case = copy.copy(self)
        case.handling = seconds
        return case

    def buckets(self, plan: Plan) -> list[Bucket]:
        """What travels together under a plan."""
        alone = replace(self.grouping, dense=False)
        return buckets_of(plan, self.tensors, alone if plan is self.dense else self.grouping)

    def units(self, buckets: Sequence[Bucket]) -> list[Unit]:
        """The units of buckets."""
        found = []
        for bucket in buckets:
            key = (bucket.program, bucket.members, bucket.automatic)
            if key not in self._units:
                unit = unit_of(bucket, self.world_size, self.codecs, self.shared)
                self._units[key] = unit if self.grouping is BY_NAME else replace(unit, extra=())  # Horovod's alone
            found.append(self._units[key])
        return found

    def predict(self, plan: Plan, rate: float | None = None) -> Step:
        """A step under a plan, over the case's link or one of another rate (bits per second of its payload)."""
        return self._step(plan, self.buckets(plan), rate)

    def _step(self, plan: Plan, buckets: Sequence[Bucket], rate: float | None = None) -> Step:
        link = replace(self.link, rate=rate) if rate else self.link
        last, units = status(plan, self.world_size), []
        for unit in self.units(buckets):
            half = self.handling * self.shared * len(unit.members) / 2 if last else 0.0
            units.append(replace(unit, encode=unit.encode + half, decode=unit.decode + half) if half else unit)
        return simulate(self.times, units, link, self.world_size, last)

    def candidate(self, label: str, plan: Plan, partly: bool = False) -> Candidate:
        """A plan, and what is predicted of it."""
        buckets = self.buckets(plan)
        compressed = sum(len(bucket.members) for bucket in buckets if bucket.program.main.id != "none")
        memory = sum(memory_of(bucket) for bucket in buckets)
        step, even = self._step(plan, buckets), self.break_even(plan) if compressed else 0.0
        return Candidate(label, plan.program.main.id, plan, step, compressed, len(self.tensors), memory, even, partly)

    def break_even(self, plan: Plan) -> float:
        """The link's speed below which a plan's step is shorter than the dense one; see :class:`Candidate`."""

        def gains(rate: float) -> bool:
            return self.predict(plan, rate).seconds < self.predict(self.dense, rate).seconds

        low, high = None, None
        for rate in np.geomspace(*RATES, SCAN).tolist()[::-1]:
            if gains(rate):
                low = rate
                break
            high = rate
        if low is None:
            return 0.0
        if high is None:
            return float("inf")
        return bisected(gains, low, high) / self.link.share

    def greedy(self, settings: Mapping[str, Any]) -> Plan | None:
        """The method on those tensors alone where it shortens the step.

        Args:
            settings: the method's, as ``load`` reads them.

        Returns:
            The plan; None if that is the dense one, or the method everywhere.
        """
        plan = load(settings)
        buckets = [bucket for bucket in self.buckets(plan) if bucket.program.main.id != "none"]
        dense = {bucket.members[0].name: bucket for bucket in self.buckets(self.dense)}
        chosen: list[Bucket] = []
        best = self._step(self.dense, list(dense.values())).seconds
        for bucket in sorted(buckets, key=lambda one: -one.spec.size):
            trial = [*chosen, bucket]
            taken = {member.name for each in trial for member in each.members}
            others = [one for name, one in dense.items() if name not in taken]
            seconds = self._step(plan, [*trial, *others]).seconds
            if seconds < best - NOTHING * best:
                chosen, best = trial, seconds
        if not chosen or len(chosen) == len(buckets):
            return None
        taken = {member.name for each in chosen for member in each.members}
        left = [member for each in buckets for member in each.members if member.name not in taken]
        most, least = max(one.size for one in left), min(m.size for each in chosen for m in each.members)
        names = [{"name": glob.escape(one.name)} for one in left]
        matches: list[dict[str, Any]] = [{"max_size": most}] if most < least else list(names)
        rules = [{"match": match, "method": "none"} for match in matches]
        return load({**settings, "rules": [*rules, *settings.get("rules", [])]})


def bisected(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Up to which positive number something holds, if it does at ``low`` and not at ``high``."""
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low * high) ** 0.5


def candidates(case: Case, entries: Sequence[MethodEntry], say: Callable[[str], None] = print) -> list[Candidate]:
    """The dense step, each method everywhere, and where it differs each on the tensors where it gains.

    Args:
        case: the training and the link.
        entries: the methods with their settings.
        say: called with what is done next.
    """
    found = [case.candidate(DENSE, case.dense)]
    for entry in entries:
        say(f"predicting {entry.label}")
        found.append(case.candidate(entry.label, entry.plan))
        if partly := case.greedy(entry.settings):
            found.append(case.candidate(f"{entry.label}, in part", partly, partly=True))
    return found
