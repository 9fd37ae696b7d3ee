"""Deferral of signal handlers until an exchange is over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any


@contextmanager
def deferred() -> Iterator[None]:
    """Context manager that delays signals: their handlers run on exit, in the order of the signals.

    A handler that raises an exception, such as Python's handler for Ctrl-C, would leave collectives in flight that
    write to freed memory, and other ranks would wait for this one. Signal handlers run only in the main thread; in
    other threads the context manager is a no-op.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    every: dict[int, Any] = {number: signal.getsignal(number) for number in signal.valid_signals()}
    # SIG_DFL and SIG_IGN are not callable, and the system handles them without Python
    handlers = {number: handler for number, handler in every.items() if callable(handler)}
    with ExitStack() as restored:
        for number, handler in handlers.items():
            restored.callback(signal.signal, number, handler)
            signal.signal(number, lambda number, frame: received.append((number, frame)))
        yield
    for which, frame in received:
        handlers[which](which, frame)
