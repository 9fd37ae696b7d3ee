"""``HVDCOMPRESS_LOG=debug``: a line for each collective that a method has asked for, once it is answered."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence

from hvdcompress.engine.telemetry.observer import Completed, Observer

VARIABLE = "HVDCOMPRESS_LOG"
LOGGER = logging.getLogger("hvdcompress")


class RoundLog(Observer):
    """Writes a line per round: tensor, method, round, collective, bytes, milliseconds, rank."""

    def completed(self, rank: int, name: str, what: Completed) -> None:
        """Write the line."""
        LOGGER.debug(
            "rank %d: tensor %r, method %s, round %d, %s, %d bytes, %.3f ms",
            rank, name, what.method, what.round, what.collective, what.num_bytes, 1e3 * what.seconds,
        )  # fmt: skip


def some(names: Sequence[str]) -> str:
    """Return the first of these names, in quotation marks, for a message."""
    return ", ".join([*map(repr, names[:3]), *["…"] * (len(names) > 3)])


@functools.cache
def say_once(text: str) -> None:
    """Log a fact, once in this process; on stderr where the program has not set up logging."""
    _handle("hvdcompress: %(message)s", logging.INFO)
    LOGGER.info("%s", text)


def _handle(form: str, level: int) -> None:
    """Write lines of a level, and higher ones, to stderr, unless the program has said where lines go."""
    if LOGGER.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(form, "%H:%M:%S"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level)


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, once in this process."""
    LOGGER.warning("%s", text)


def observers() -> list[Observer]:
    """Who writes a log, as the environment says: nobody, or one :class:`RoundLog`.

    Lines go to the logger "hvdcompress"; to stderr, if the program has not given it another handler.

    Raises:
        ValueError: ``HVDCOMPRESS_LOG`` is neither empty nor "debug".
    """
    level = os.environ.get(VARIABLE, "")
    if not level:
        return []
    if level.lower() != "debug":
        raise ValueError(f"{VARIABLE} = {level!r} must be 'debug', or not be set")
    _handle("hvdcompress %(asctime)s.%(msecs)03d %(message)s", logging.DEBUG)
    LOGGER.setLevel(logging.DEBUG)
    return [RoundLog()]
