"""Make the fault of a case happen, on the rank that has it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hvdcompress import registry
from hvdcompress.method import AllGather
from tests.chaos.faults import INJECTED, SHAPES, Case

STEP_SECONDS = 0.02  #: approximate duration of a step: a signal comes up to so long after its beginning


class Injected(RuntimeError):
    """The exception of a fault."""


class Injector:
    """The fault of one case on one rank; on all ranks but the victim nothing happens.

    Args:
        case: the case.
        rank: this rank.
        folder: the launch's folder. ``fault.json`` there says when the fault came, and to which process.
    """

    def __init__(self, case: Case, rank: int, folder: Path):
        self.case = case
        self.folder = folder
        self.fault = case.fault if rank == case.victim else ""
        self._armed = False
        self._exchanges = 0  # in this step so far
        self._exchanges_before = 1  # in the step before
        self._signal: tuple[int, threading.Thread] | None = None  # the step of a signal, and the thread that sends it
        if self.fault in ("compress", "decode", "garbage"):
            cls = registry.classes()[case.method]
            setattr(cls, "exchange", self._failing(cls.exchange))  # noqa: B010  (mypy: a method is assigned)

    def happens(self) -> None:
        """Write down that the fault comes now."""
        unfinished = self.folder / "fault.tmp"
        unfinished.write_text(json.dumps({"time": time.monotonic(), "pid": os.getpid()}), encoding="utf-8")
        unfinished.replace(self.folder / "fault.json")

    def before_training(self) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
        """Return this rank's shapes, in its order, and its settings; a late rank sleeps here."""
        if self.fault in ("late", "order", "plan"):
            self.happens()
        if self.fault == "late":
            time.sleep(self.case.delay)
        settings = self.case.settings
        if self.fault == "plan":
            settings |= {"seed": 1} if self.case.method == "powersgd" else {"density": 0.06}
        return (dict(reversed(SHAPES.items())) if self.fault == "order" else SHAPES), settings

    def gradients(self, step: int, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the gradients of a step, possibly with a NaN."""
        if self.fault == "nan" and step == self.case.step:
            self.happens()
            array = list(given.values())[int(self.case.moment * len(given))]
            array.flat[int(self.case.moment * array.size)] = np.nan
        return given

    @contextlib.contextmanager
    def in_step(self, step: int) -> Iterator[None]:
        """Context manager for a step: if it is the step of the fault, the fault happens inside."""
        if self._signal and step > self._signal[0] + 1:  # a starved thread must not send it after the last step
            self._signal[1].join()
        self._exchanges, self._exchanges_before = 0, max(self._exchanges, 1)
        self._armed = step == self.case.step
        if self._armed and self.fault in ("killed", "paused"):
            self._send_later(signal.SIGKILL if self.fault == "killed" else signal.SIGSTOP, step)
        yield
        self._armed = False

    @contextlib.contextmanager
    def in_save(self, step: int) -> Iterator[None]:
        """Context manager for a save: the first one from the fault's step on has the fault."""
        now = step >= self.case.step and not (self.folder / "fault.json").exists()
        if now and self.fault == "killed_saving":
            self._send_later(signal.SIGKILL, step)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if now and self.fault == "disk":  # files that cannot grow behave like a disk that is full
            self.happens()
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(20_000 * self.case.moment), limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def optimizer(self) -> None:
        """Raise what an optimizer raises whose step fails."""
        if self.fault == "optimizer" and self._armed:
            self._raise()

    def _send_later(self, number: signal.Signals, step: int) -> None:
        """Send this process a signal within the step, whatever the process does then."""

        def send() -> None:
            self.happens()
            os.kill(os.getpid(), number)

        self._signal = step, threading.Timer(self.case.moment * STEP_SECONDS, send)
        self._signal[1].start()

    def _raise(self) -> None:
        self._armed = False
        self.happens()
        raise Injected(f"{INJECTED} in {self.fault}")

    def _failing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method's ``exchange`` that fails in one of the step's exchanges: before its collective, in the
        payload, or after it."""

        def exchange(method: Any, x: Any, state: Any, ctx: Any, work: Any) -> Any:
            mine = self._armed and self._exchanges >= int(self.case.moment * self._exchanges_before)
            self._exchanges += 1
            if mine and self.fault == "compress":
                self._raise()
            communication = original(method, x, state, ctx, work)
            result = None
            while True:
                try:
                    collective = communication.send(result)
                except StopIteration as stop:
                    return stop.value
                if mine and self._armed and self.fault == "garbage" and isinstance(collective, AllGather):
                    self._armed = False
                    self.happens()
                    collective = dataclasses.replace(collective, x=self._damaged(collective.x, work.ops))
                result = yield collective
                if mine and self._armed and self.fault == "decode":
                    self._raise()

        return exchange

    def _damaged(self, payload: Any, ops: Any) -> Any:
        """Return a copy of a payload with one byte of its header flipped; its length stays what it was."""
        damaged = np.array(payload)
        damaged[int(24 * self.case.moment)] ^= 0xFF
        return ops.asarray(damaged, like=payload)
