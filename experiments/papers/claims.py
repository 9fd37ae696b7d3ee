"""What a claim is: a sentence of a paper, the units of work that test it, and a verdict by rule.

Below are the steps that verdicts share: groups of a data frame, medians over seeds, gaps to dense training.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import pandas as pd

from experiments.report.numbers import number
from experiments.report.tables import MISSING
from experiments.units import Unit
from hvdcompress.registry import suggest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LISTED = 6  #: conditions met that an outcome names, where it could name fewer that are not met

Record = dict[str, Any]


class Kind(StrEnum):
    """How a claim came out."""

    HOLDS = "holds"
    CONDITIONS = "holds under these conditions"
    FAILS = "does not hold here"


@dataclass(frozen=True)
class Outcome:
    """How a claim came out, under which conditions or why, and how many of the conditions meet the rule."""

    kind: Kind
    because: str = ""
    met: int | None = None
    of: int | None = None


def judge(cells: Mapping[Any, Sequence[bool]], otherwise: str) -> Outcome:
    """Judge a claim: every seed must meet the rule, and the conditions in which all do are named.

    If many conditions are met and fewer are not, the outcome names those that are not.

    Args:
        cells: whether the rule was met, one value per seed, by condition. A condition is a text; or two, such as
            ``("than dense", "at 1 Gbit/s")``, of which the first is named once with all its second ones.
        otherwise: why the claim does not hold, if no condition meets the rule in every seed.

    Raises:
        ValueError: there is nothing to judge.

    >>> judge({"n = 10": [True, True], "n = 20": [True, True]}, "-").kind.value
    'holds'
    >>> judge({"n = 10": [True, True], "n = 20": [True, False]}, "-").because
    'n = 10'
    >>> judge({f"n = {n}": [n != 5] for n in range(9)}, "-").because
    'all but n = 5'
    >>> judge({("a", "1"): [True], ("a", "2"): [True], ("b", "1"): [True], ("b", "2"): [False]}, "-").because
    'a everywhere; b 1'
    """
    if not cells or not all(len(seeds) for seeds in cells.values()):
        raise ValueError("a verdict needs conditions, and a value for each of their seeds")
    met = [condition for condition, seeds in cells.items() if all(seeds)]
    failed = [condition for condition in cells if condition not in met]
    if not failed:
        return Outcome(Kind.HOLDS, "", len(met), len(cells))
    if not met:
        return Outcome(Kind.FAILS, otherwise, 0, len(cells))
    if isinstance(met[0], tuple):
        told = _by_first(met, list(cells))
    elif len(met) > max(LISTED, len(failed)):
        told = f"all but {'; '.join(failed)}"
    else:
        told = "; ".join(met)
    return Outcome(Kind.CONDITIONS, told, len(met), len(cells))


def _by_first(met: Sequence[tuple[str, str]], cells: Sequence[tuple[str, str]]) -> str:
    told = []
    for first in dict.fromkeys(first for first, _ in met):
        seconds = [second for each, second in met if each == first]
        everywhere = len(seconds) == sum(each == first for each, _ in cells)
        told.append(f"{first} {'everywhere' if everywhere else ', '.join(seconds)}")
    return "; ".join(told)


@dataclass(frozen=True)
class Verdict:
    """What a claim's test found."""

    outcome: Outcome
    number: str  #: a sentence with the number that decides it and its spread over seeds
    figure: Figure | None = None  #: if it says more than the number
    caption: str = ""  #: what the figure shows
    notes: str = ""  #: sentences with further measured numbers; all other remarks are in the page's template


Units = Callable[[], list[Unit]]


@dataclass(frozen=True)
class Claim:
    """One claim; :meth:`Paper.claim` makes it and documents its fields."""

    id: str
    text: str
    test: Callable[..., Verdict]
    units: Sequence[Units]
    trains: bool = False

    def needed(self, seeds: Sequence[int]) -> dict[str, list[list[Unit]]]:
        """Return the units of each verdict: one, or two with the optimizer's momentum kept and adapted."""
        groups = [[unit.given(seed=seed) for unit in units() for seed in seeds] for units in self.units]
        if not self.trains:
            return {"": groups}
        return {how: [[_with_momentum(unit, how) for unit in group] for group in groups] for how in ("keep", "adapt")}

    def record(self, verdict: Verdict, **more: Any) -> Record:
        """Return all that a page says about the claim, as plain data."""
        found = {name: getattr(verdict, name) for name in ("number", "caption", "notes")}
        return {"claim": self.id, **more, "text": self.text, **vars(verdict.outcome), **found}


def _with_momentum(unit: Unit, momentum: str) -> Unit:
    """Return the training with the optimizer's momentum kept or adapted. Dense training has only one."""
    return unit if unit.settings["method"]["method"] == "none" else unit.given(momentum=momentum)


@dataclass(frozen=True)
class Paper:
    """A paper: the method's id, the tasks whose data it needs, and its claims."""

    id: str
    tasks: Sequence[str]
    claims: list[Claim] = field(default_factory=list)

    def claim(self, id: str, text: str, *units: Units, trains: bool = False) -> Callable[..., Any]:
        """Return a decorator that adds a claim, tested by the decorated function.

        Args:
            id: the paper's letter and a number, such as "G1".
            text: the paper's sentence in our words.
            units: what is measured with each seed. The function gets one data frame for each of these, of all its
                units' records.
            trains: the units are trainings, which are measured with the optimizer's momentum kept, as in the papers,
                and adapted, as is our default.
        """

        def add(test: Callable[..., Verdict]) -> Callable[..., Verdict]:
            self.claims.append(Claim(id, text, test, units, trains))
            return test

        return add

    def named(self, ids: Sequence[str]) -> list[Claim]:
        """Return the claims of these ids, or all, in the paper's order.

        Raises:
            ValueError: there is no such claim; the message names those that there are.
        """
        known = [claim.id for claim in self.claims]
        for id in ids:
            if id not in known:
                raise ValueError(f"--claims: {self.id} has no {id!r}{suggest(id, known)}; it has {', '.join(known)}")
        return [claim for claim in self.claims if not ids or claim.id in ids]


def over_seeds(frame: pd.DataFrame, by: Sequence[str], values: Sequence[str]) -> pd.DataFrame:
    """Return the median over steps, then the median, least and largest over seeds; NaN if a seed's is (it diverged).

    Args:
        frame: has a column ``seed``.
        by: the columns that make a row.
        values: the columns to summarise. Each gives three: ``x``, ``x least``, ``x largest``.
    """
    seeds = frame.groupby([*by, "seed"], sort=False, dropna=False)[list(values)].median(skipna=False)
    rows = seeds.groupby(list(by), sort=False, dropna=False)
    ends = {"": rows.median(skipna=False), " least": rows.min(skipna=False), " largest": rows.max(skipna=False)}
    found = pd.concat([each.add_suffix(end) for end, each in ends.items()], axis=1)
    return found[[f"{value}{end}" for value in values for end in ends]].reset_index()


def per_seed(frame: pd.DataFrame, value: str) -> list[float]:
    """Return the median over steps for each seed; NaN if one step's is."""
    return list(frame.groupby("seed", sort=False)[value].median(skipna=False))


def spread(values: Sequence[float], show: Callable[[float], str] = number) -> str:
    """Return the median of the seeds' values with the least and the largest: ``0.12 (0.11 to 0.13)``."""
    values = list(values)
    if not values:
        return MISSING
    if lost := sum(map(math.isnan, values)):
        return f"diverged in {lost} of {len(values)}"
    return f"{show(statistics.median(values))} ({show(min(values))} to {show(max(values))})"


def groups(frame: pd.DataFrame, *by: str) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    """Iterate over the groups of a frame in the order of their first rows, with the key as a tuple."""
    yield from frame.groupby(list(by), sort=False, dropna=False)


def against_dense(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return trainings with two more columns: ``dense``, the dense training's value, and the ``gap`` to it.

    The gap is NaN if the training diverged, and if the dense one did.

    Args:
        rows: trainings, of which those with the ``method`` "none" are dense.
        by: the column that, with the seed, tells which dense training belongs to a training.
    """
    dense = rows[rows["method"] == "none"].groupby([by, "seed"])["value"].max().rename("dense")
    rows = rows.join(dense, on=[by, "seed"])
    return rows.assign(gap=rows["value"] - rows["dense"])


def exploded(frame: pd.DataFrame, column: str, key: str, value: str) -> pd.DataFrame:
    """Return one row per item of the dicts in a column, with the item's key and value in two new columns."""
    items = {key: frame[column].map(list), value: frame[column].map(lambda each: list(each.values()))}
    return frame.drop(columns=column).assign(**items).explode([key, value], ignore_index=True)
