"""The register of promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.harness import SECONDS_A_CASE

Check = Callable[[Any], None]


@dataclass(frozen=True)
class Promise:
    """``check`` raises where a driver does not keep it. ``ranks``: how many it takes; ``seconds``: it hangs after."""

    name: str
    text: str
    subject: str
    check: Check
    ranks: int
    seconds: float


PROMISES: dict[str, Promise] = {}


def promise(ranks: int = 1, seconds: float = SECONDS_A_CASE) -> Callable[[Check], Check]:
    """Register a function of a driver; its docstring is the promise, its module's SUBJECT the chapter."""

    def register(check: Check) -> Check:
        text = " ".join((check.__doc__ or "").split())
        PROMISES[check.__name__] = Promise(check.__name__, text, check.__globals__["SUBJECT"], check, ranks, seconds)
        return check

    return register
