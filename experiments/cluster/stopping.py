"""Ctrl-C, SIGTERM and a closed terminal as one exception, raised once, so that ranks and hosts end in order."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Stopped(BaseException):
    """The user (or the system) asked us to stop; ``code`` is what a shell expects as exit status."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and a closed terminal raise :class:`Stopped`, once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:  # a second Ctrl-C must not break off the ending of the ranks
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if number != signal.SIGHUP or handler != signal.SIG_IGN:  # nohup
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
