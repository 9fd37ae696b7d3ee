"""A paper with toy claims, in a module that worker processes can import."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.output.table import Column, Table
from experiments.reproduce.claims import Claim, Paper, Report, Result, Scale, Unit, judge


def square(number: int, log: str, seconds: float = 0.0, fails: bool = False) -> dict[str, Any]:
    """What is measured; it notes that it was called."""
    with Path(log).open("a") as stream:
        stream.write(f"{number}\n")
    time.sleep(seconds)
    if fails:
        raise RuntimeError("the toy is broken")
    return {"square": number * number}


def units(log: str, numbers: Sequence[int], **settings: Any) -> list[Unit]:
    return [Unit(f"square {n}", square, {"number": n, "log": log, **settings}, seconds=n) for n in numbers]


def paper(log: str, numbers: Sequence[int] = (1, 2, 3), **settings: Any) -> Paper:
    """Squares are positive (true), and below 9 (true of some); the claims share their units."""

    def report(limit: float) -> Any:
        def made(results: Sequence[Result]) -> Report:
            cells = {f"n = {r.unit.settings['number']}": [0 < r["square"] < limit] for r in results}
            columns = [Column("square", "square", lambda r: str(r["square"]))]
            largest = max(r["square"] for r in results)
            return Report(judge(cells, "no square is"), f"at most {largest}", [Table(columns, results, "Squares.")])

        return made

    def claim(id: str, says: str, limit: float, published: str = "") -> Claim:
        made = (lambda _: units(log, numbers, **settings)), report(limit)
        return Claim(id, says, "§1", "Squared.", "true", *made, published)

    claims = [claim("T1", "Squares are positive.", 1e9, "1, 4, 9"), claim("T2", "Squares are below 9.", 9)]
    return Paper("toy", "Toys", "Nobody 2000.", [], claims)


SCALE = Scale()
