"""Numbers as people read them: bytes, times and rates with their units."""

from __future__ import annotations

import math


def number(value: float, digits: int = 3) -> str:
    """A plain number with so many significant digits: ``1234``, ``12.3``, ``0.0123``."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else str(value)
    value = float(f"{value:.{digits}g}")  # first, so that 0.9999 is not given a place more than 1.00
    places = digits - 1 - math.floor(math.log10(abs(value))) if value else digits - 1
    return f"{value:.{min(max(places, 0), 8)}f}"


def num_bytes(value: float) -> str:
    """``999 B``, ``5.12 kB``, ``1.23 GB``; a kB has 1000 bytes, as networks count."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{number(value)} {unit}"


def seconds_of(value: float) -> str:
    """``850 µs``, ``12.3 ms``, ``4.56 s``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(value) * factor >= 0.9995 or unit == "µs":
            return f"{number(value * factor)} {unit}"
    raise AssertionError("unreachable")


def rate_of(value: float) -> str:
    """A compression ratio: ``1.00x``, ``49.7x``, ``105x``."""
    return "–" if math.isnan(value) else f"{number(value)}x"


def clock(seconds: float) -> str:
    """``0:07``, ``12:34``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def percent(share: float) -> str:
    """A density: ``1 %``, ``0.5 %``."""
    return f"{100 * share:.3g} %"
