"""Numbers with units as people read and write them, and the interval of a mean."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from typing import NamedTuple

HEADERS = 66 / 1448  #: bytes of TCP, IP and Ethernet headers (with TCP's time stamps) for each byte of payload


def number(value: float, digits: int = 3) -> str:
    """Return a number with so many significant digits, without an exponent: ``1234``, ``12.3``, ``0.0123``."""
    if not math.isfinite(value):
        return str(value)
    value = float(f"{value:.{digits}g}")  # first, so that 0.9999 is not given a place more than 1.00
    places = digits - 1 - math.floor(math.log10(abs(value))) if value else digits - 1
    return f"{value:.{min(max(places, 0), 8)}f}"


def duration(seconds: float) -> str:
    """Return seconds as text: ``850 µs``, ``12.3 ms``, ``4.56 s``."""
    least = abs(seconds)
    unit, factor = ("s", 1.0) if least >= 0.9995 else ("ms", 1e3) if least >= 0.9995e-3 else ("µs", 1e6)
    return f"{number(seconds * factor)} {unit}"


def size(num_bytes: float, largest: str = "GB") -> str:
    """Return bytes as text: ``999 B``, ``5.12 kB``, ``1.23 GB``; 1 kB is 1000 bytes, as networks count."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while abs(num_bytes) >= 999.5 and units[0] != largest:
        num_bytes /= 1000
        units.pop(0)
    return f"{num_bytes:.0f} B" if units[0] == "B" else f"{number(num_bytes)} {units[0]}"


def bits_of(rate: str) -> int:
    """Return the bits per second of a link, as tc writes rates: ``100mbit``, ``2.5gbit``; 10kbit at least.

    Raises:
        ValueError: the text is not a rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate.strip())
    bits = round(float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]) if match else 0
    if bits < 10_000:
        raise ValueError(f"{rate!r} is not a rate: write 100mbit, 1gbit or 2.5gbit; 10kbit at least")
    return bits


class Interval(NamedTuple):
    """A mean and its 90 % interval, which is NaN with fewer than two values."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of values, such as paired differences, with its t interval."""
    import scipy.stats  # takes half a second

    mean = statistics.fmean(values) if values else math.nan
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan)
    margin = float(scipy.stats.t.ppf(0.95, len(values) - 1) * scipy.stats.sem(values))
    return Interval(mean, mean - margin, mean + margin)
