"""Logging: one-time messages and warnings, and with ``HVDCOMPRESS_LOG=debug`` a line per collective of a method."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence

from hvdcompress.engine.telemetry.observer import Completed, Observer

VARIABLE = "HVDCOMPRESS_LOG"
LOGGER = logging.getLogger("hvdcompress")
MESSAGE = "hvdcompress: %(message)s"  #: form of messages and warnings


class RoundLog(Observer):
    """Logs a line per completed collective: rank, tensor, method, round, kind, bytes and milliseconds."""

    def completed(self, rank: int, name: str, what: Completed) -> None:
        """Log the line."""
        LOGGER.debug(
            "rank %d: tensor %r, method %s, round %d, %s, %d bytes, %.3f ms",
            rank, name, what.method, what.round, what.collective, what.num_bytes, 1e3 * what.seconds,
        )  # fmt: skip


def first_names(names: Sequence[str]) -> str:
    """Return the first three names in quotation marks, for a message."""
    return ", ".join([*map(repr, names[:3]), *["…"] * (len(names) > 3)])


@functools.cache
def info_once(text: str) -> None:
    """Log a message once per process, to stderr if the program has not configured logging."""
    _handle(MESSAGE, logging.INFO)
    LOGGER.info("%s", text)


def _handle(form: str, level: int) -> None:
    """Log messages of a level and above to stderr, unless the program has configured logging."""
    if LOGGER.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(form, "%H:%M:%S"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level)


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning once per process, to stderr if the program has not configured logging."""
    _handle(MESSAGE, logging.INFO)
    LOGGER.warning("%s", text)


def observers() -> list[Observer]:
    """Return the observers that the environment asks for: none, or one :class:`RoundLog`.

    It logs to the logger "hvdcompress", and to stderr if the program has not given this logger a handler.

    Raises:
        ValueError: ``HVDCOMPRESS_LOG`` is neither empty nor "debug".
    """
    level = os.environ.get(VARIABLE, "")
    if not level:
        return []
    if level.lower() != "debug":
        raise ValueError(f"{VARIABLE} = {level!r} must be 'debug' or unset")
    _handle("hvdcompress %(asctime)s.%(msecs)03d %(message)s", logging.DEBUG)
    LOGGER.setLevel(logging.DEBUG)
    return [RoundLog()]
