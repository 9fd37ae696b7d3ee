"""The clock of one rank: how the main thread's time in an exchange is spent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hvdcompress.engine.telemetry.observer import Observer

__all__ = ["Clock"]


class Clock(Observer):
    """Seconds of this rank's main thread in one exchange, as "encode", "decode" and "blocked"."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a new exchange."""
        self.spent = {"encode": 0.0, "decode": 0.0, "blocked": 0.0}

    def encoded(self, rank: int, name: str, seconds: float) -> None:
        self.spent["encode"] += seconds

    def decoded(self, rank: int, name: str, seconds: float) -> None:
        self.spent["decode"] += seconds

    def waited(self, rank: int, seconds: float) -> None:
        self.spent["blocked"] += seconds

    def timed(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that is not ours, such as a compression of Horovod's, to charge its time to ``what``."""

        def run(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.spent[what] += time.perf_counter() - began

        return run
