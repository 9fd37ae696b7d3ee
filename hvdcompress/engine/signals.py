"""Signal handlers of the program, which wait until an exchange is over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any


@contextmanager
def deferred() -> Iterator[None]:
    """Context manager: signals that come in it are handled at its end, in their order.

    A handler that raises, as that of Ctrl-C does, would leave collectives under way that write into memory which is
    given back, and other ranks that wait. Outside of the main thread, which alone runs handlers, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    with ExitStack() as restored:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                restored.callback(signal.signal, number, handler)
                signal.signal(number, lambda number, frame: came.append((number, frame)))
        yield
    for which, frame in came:
        handlers[which](which, frame)
