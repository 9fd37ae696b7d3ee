"""Tables of what came of faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.output.table import MISSING, Column, Table
from experiments.report.numbers import number
from experiments.torture.faults import FAULTS
from experiments.torture.judge import BUGS, OUTCOMES

__all__ = ["bugs", "records_of_bugs", "table"]

Record = Mapping[str, Any]


@dataclass(frozen=True)
class _Row:
    """The records of one fault at one driver."""

    fault: str
    driver: str
    records: Sequence[Record]

    def count(self, outcome: str) -> int:
        return sum(record["outcome"] == outcome for record in self.records)

    @property
    def slowest(self) -> float | None:
        """Seconds from the fault to the end of the slowest launch that ended with an error."""
        return max((record["seconds"] for record in self.records if record["outcome"] == "error"), default=None)


def table(records: Sequence[Record]) -> Table[_Row]:
    """Faults × drivers × outcomes."""
    pairs = sorted(
        {(record["fault"], record["driver"]) for record in records},
        key=lambda pair: (list(FAULTS).index(pair[0]), pair),
    )
    rows = [
        _Row(fault, driver, [one for one in records if (one["fault"], one["driver"]) == (fault, driver)])
        for fault, driver in pairs
    ]

    def counted(outcome: str) -> Column[_Row]:
        return Column(
            outcome,
            outcome,
            lambda row: str(row.count(outcome) or MISSING),
            value=lambda row: row.count(outcome),
            marked=lambda row: outcome in BUGS and row.count(outcome) > 0,
        )

    columns: list[Column[_Row]] = [
        Column("fault", "fault", lambda row: FAULTS[row.fault].about, align="left"),
        Column("driver", "driver", lambda row: row.driver, align="left"),
        Column("launches", "launches", lambda row: str(len(row.records)), value=lambda row: len(row.records)),
        *map(counted, OUTCOMES),
        Column(
            "slowest",
            "slowest error",
            lambda row: MISSING if row.slowest is None else f"{number(row.slowest)} s",
            value=lambda row: row.slowest,
            unit="s",
        ),
    ]
    found = len(records_of_bugs(records))
    title = f"{len(records)} faults, {found} bugs"
    return Table(columns, rows, title, mark=lambda row: "failed" if any(map(row.count, BUGS)) else "").filled()


def records_of_bugs(records: Sequence[Record]) -> list[Record]:
    """The records whose outcome is a bug."""
    return [record for record in records if record["outcome"] in BUGS]


def bugs(records: Sequence[Record]) -> str:
    """Every bug with the command that reproduces it."""
    return "\n".join(
        f"{record['outcome']} ({BUGS[record['outcome']]})\n  {record['command']}\n  {record['why'].strip()}"
        for record in records_of_bugs(records)
    )
