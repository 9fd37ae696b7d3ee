"""What a claim is: a sentence of a paper, the units of work that test it, and a verdict by rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from experiments.output.table import Table

LISTED = 6  #: conditions met that a verdict names, where it could name fewer that are not met


class Kind(StrEnum):
    """How a claim came out."""

    HOLDS = "holds"
    CONDITIONS = "holds under these conditions"
    FAILS = "does not hold here"


@dataclass(frozen=True)
class Verdict:
    """How a claim came out, and why or where."""

    kind: Kind
    because: str = ""

    def __str__(self) -> str:
        joint = ": " if self.kind is Kind.CONDITIONS else ", because "
        return f"{self.kind}{joint}{self.because}" if self.because and self.kind is not Kind.HOLDS else str(self.kind)


def judge(cells: Mapping[str, Sequence[bool]], otherwise: str) -> Verdict:
    """A verdict: the rule must be met in every seed, and the conditions in which it is are named.

    If many are met and fewer are not, the verdict names those that are not.

    Args:
        cells: whether the rule was met, for each condition one value a seed.
        otherwise: why the claim does not hold, where no condition meets the rule in every seed.

    Raises:
        ValueError: there is nothing to judge.

    >>> str(judge({"n = 10": [True, True], "n = 20": [True, True]}, "-"))
    'holds'
    >>> str(judge({"n = 10": [True, True], "n = 20": [True, False]}, "-"))
    'holds under these conditions: n = 10 (1 of 2)'
    >>> str(judge({f"n = {n}": [n != 5] for n in range(9)}, "-"))
    'holds under these conditions: all but n = 5 (8 of 9)'
    >>> str(judge({"n = 10": [True, False]}, "the rule is met in 1 of 2 seeds"))
    'does not hold here, because the rule is met in 1 of 2 seeds'
    """
    if not cells or not all(cells.values()):
        raise ValueError("a verdict needs conditions, and a value for each of their seeds")
    met = [condition for condition, seeds in cells.items() if all(seeds)]
    if len(met) == len(cells):
        return Verdict(Kind.HOLDS)
    if not met:
        return Verdict(Kind.FAILS, otherwise)
    told, failed = "; ".join(met), [condition for condition in cells if condition not in met]
    if len(met) > max(LISTED, len(failed)):
        told = f"all but {'; '.join(failed)}"
    return Verdict(Kind.CONDITIONS, f"{told} ({len(met)} of {len(cells)})")


def judge_by(cells: Mapping[tuple[str, str], Sequence[bool]], otherwise: str) -> Verdict:
    """A verdict as :func:`judge` makes it, whose conditions are told by their first word, each with its second ones.

    Args:
        cells: whether the rule was met, one value a seed, by two words of a condition: "than dense", "at 1 Gbit/s".
        otherwise: why the claim does not hold, where no condition meets the rule in every seed.

    >>> str(judge_by({("a", "1"): [True], ("a", "2"): [True], ("b", "1"): [True], ("b", "2"): [False]}, "-"))
    'holds under these conditions: a everywhere; b 1 (3 of 4)'
    """
    verdict = judge({f"{first} {second}": seeds for (first, second), seeds in cells.items()}, otherwise)
    if verdict.kind is not Kind.CONDITIONS:
        return verdict
    told = []
    for first in dict.fromkeys(first for first, _ in cells):
        places = {second: all(seeds) for (each, second), seeds in cells.items() if each == first}
        met = [second for second, every in places.items() if every]
        if met:
            told.append(f"{first} {'everywhere' if len(met) == len(places) else ', '.join(met)}")
    count = sum(map(all, cells.values()))
    return Verdict(Kind.CONDITIONS, f"{'; '.join(told)} ({count} of {len(cells)})")


@dataclass(frozen=True)
class Unit:
    """One call of a measuring function: what is kept on disk when it is done, and lost when it is interrupted.

    Args:
        name: of a few plain words; it begins the name of the file that keeps the result.
        measure: a function at the top of a module, so that another process can import it.
        settings: its keywords, plain data.
        seconds: about how long it takes on one core; only the ratios between units count, for the time left.
        alone: nothing else may run at the same time, as it measures time.
    """

    name: str
    measure: Callable[..., dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: float = 10.0
    alone: bool = False


@dataclass(frozen=True)
class Result:
    """What a unit found."""

    unit: Unit
    found: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.found[key]


@dataclass(frozen=True)
class Picture:
    """A figure for a page, as an ``<svg>`` element of ``plots.svg``, and what it shows."""

    name: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Report:
    """What a claim's section says.

    Attributes:
        verdict: how the claim came out.
        number: the number that decides it, with its spread over seeds.
        tables: all figures.
        pictures: figures to look at.
        notes: what a reader should know.
        adapted: the same of trainings in which the optimizer's momentum is adapted; None if there are none.
    """

    verdict: Verdict
    number: str
    tables: Sequence[Table[Any]] = ()
    pictures: Sequence[Picture] = ()
    notes: Sequence[str] = ()
    adapted: Report | None = None


@dataclass(frozen=True)
class Scale:
    """How much is measured, and where the user's data is.

    Args:
        quick: short trainings (minutes), as the pages in docs/papers have them, or long ones (hours).
        few: only so many settings that a paper takes ten minutes at most.
        path: the user's data.
        seeds: of each measurement.
    """

    quick: bool = True
    few: bool = False
    path: str | None = None
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True)
class Claim:
    """One claim.

    Args:
        id: "G1": the paper's letter and a number.
        says: the paper's sentence in our words.
        where: the section or figure of the paper.
        tested: how it is tested here.
        rule: when it holds.
        units: the units of work at a scale.
        report: from their results, in the same order, to what the page says.
        published: the paper's own figures; nothing is said where it is empty.
        trains: the units are trainings. They are measured twice: with the optimizer's momentum kept, as in the papers,
            and with it adapted, as is this library's default.
    """

    id: str
    says: str
    where: str
    tested: str
    rule: str
    units: Callable[[Scale], Sequence[Unit]]
    report: Callable[[Sequence[Result]], Report]
    published: str = ""
    trains: bool = False

    def needed(self, scale: Scale) -> list[list[Unit]]:
        """Return the units of each report: of one, or of two with the optimizer's momentum kept and adapted."""
        units = list(self.units(scale))
        return [units, [_adapted(unit) for unit in units]] if self.trains else [units]

    def reported(self, results: Sequence[Sequence[Result]]) -> Report:
        """Return the report from the results of :meth:`needed`'s units."""
        report, *adapted = map(self.report, results)
        return replace(report, adapted=adapted[0]) if adapted else report


def _adapted(unit: Unit) -> Unit:
    """Return a training with the optimizer's momentum adapted; dense training keeps it, so it is not repeated."""
    if unit.settings["method"]["method"] == "none":
        return unit
    return replace(unit, name=f"{unit.name} adapted", settings={**unit.settings, "momentum": "adapt"})


@dataclass(frozen=True)
class Paper:
    """A paper: the method's id, its title and source, the tasks whose data it needs, and its claims."""

    id: str
    title: str
    source: str
    tasks: Sequence[str]
    claims: Sequence[Claim]
