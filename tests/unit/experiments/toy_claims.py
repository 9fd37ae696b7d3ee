"""A paper with toy claims, in a module that worker processes can import."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.papers.claims import Paper, Scale, Verdict, judge
from experiments.units import Unit


def square(number: int, seed: int, log: str, seconds: float = 0.0) -> dict[str, Any]:
    """Note the call, and return the square."""
    with Path(log).open("a") as stream:
        stream.write(f"{number}\n")
    time.sleep(seconds)
    return {"square": number * number}


def train(method: dict[str, Any], seed: int, momentum: str = "keep") -> list[dict[str, Any]]:
    return [{"step": step, "loss": step + (momentum == "adapt")} for step in range(2)]


def paper(log: str, numbers: Sequence[int] = (1, 2, 3), seconds: float = 0.0) -> Paper:
    """Squares are positive (true), and below 9 (true of some); both claims share their units. Losses fall (false)."""
    made = Paper("toy", [])

    def squares(scale: Scale) -> list[Unit]:
        settings = {"log": log, "seconds": seconds}
        return [Unit(square, {"number": n, **settings}, {"number": n}) for n in numbers]

    def trainings(scale: Scale) -> list[Unit]:
        return [Unit(train, {"method": {"method": id}}, {"method": id}) for id in ("none", "topk")]

    def below(limit: float) -> Any:
        def test(frame: pd.DataFrame) -> Verdict:
            cells = {f"n = {row.number}": [row.square < limit] for row in frame.itertuples()}
            return Verdict(judge(cells, "no square is"), f"At most {frame.square.max()}.", {"Squares": frame})

        return test

    made.claim("T1", "Squares are positive.", squares)(below(1e9))
    made.claim("T2", "Squares are below 9.", squares)(below(9))

    @made.claim("T3", "Losses fall.", trainings, trains=True)
    def fall(frame: pd.DataFrame) -> Verdict:
        least = frame.groupby("method")["loss"].min().to_dict()
        return Verdict(judge({"all": [False]}, "losses rise"), f"Least: {least}.")

    return made
