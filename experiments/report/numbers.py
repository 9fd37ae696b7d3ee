"""Numbers as people read them: bytes, times and rates with their units."""

from __future__ import annotations

import math

from hvdcompress.cli import numbers

seconds_of = numbers.duration  #: ``850 µs``, ``12.3 ms``, ``4.56 s``


def number(value: float, digits: int = 3) -> str:
    """A plain number with so many significant digits: ``1234``, ``12.3``, ``0.0123``; a dash for NaN."""
    return "–" if math.isnan(value) else numbers.number(value, digits)


def num_bytes(value: float) -> str:
    """``999 B``, ``5.12 kB``, ``1.23 GB``; a kB has 1000 bytes, as networks count."""
    return numbers.size(value, "TB")


def rate_of(value: float) -> str:
    """A compression ratio: ``1.00x``, ``49.7x``, ``105x``."""
    return "–" if math.isnan(value) else f"{number(value)}x"


def percent(share: float) -> str:
    """A density: ``1 %``, ``0.5 %``."""
    return f"{100 * share:.3g} %"
