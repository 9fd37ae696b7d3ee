"""Analysis of the step time for ``Compressor.summary()``: what it consists of, and which part limits the speed."""

from __future__ import annotations

import textwrap

from hvdcompress.engine.telemetry.summary import WIDTH, with_prefix
from hvdcompress.engine.telemetry.timing import StepTime

MINOR = 0.1  #: part of a step; an exchange that blocks less does not limit the speed


def explanation(step: StepTime, uncompressed: str, link_gbits: float | None) -> str:
    """Return the parts of a step's time and a conclusion, in lines of at most 80 columns.

    Codec time and waiting may overlap with the backward pass, so they may add up to more than the blocked time.

    Args:
        step: means of recent steps.
        uncompressed: text about the duration of uncompressed steps.
        link_gbits: speed of the link in Gbit/s; None if unknown.
    """
    overlap = f", {_time(step.overlap)} of them overlap" if step.overlap else ""
    other = f", {_time(step.other)} other work" if step.other else ""
    whole, computing, blocked = (_time(seconds) for seconds in (step.whole, step.computing, step.blocked))
    lines = [
        f"a compressed step takes {whole}: {computing} computing, {blocked} blocked",
        f"  exchange: {_time(step.codec)} codec, {_time(step.waiting)} waiting{other}{overlap}",
        f"  link: {_link(step, link_gbits)}",
        f"  {uncompressed}",
    ]
    seconds = None if link_gbits is None else seconds_on(link_gbits, step.on_wire)
    return "\n".join([*lines, textwrap.fill(conclusion(step, seconds), WIDTH)])


def conclusion(step: StepTime, link: float | None) -> str:
    """Return a sentence that names the part that limits the speed.

    Args:
        step: means of recent steps.
        link: seconds that the link needs for the bytes of a step; None if its speed is unknown.
    """
    if step.blocked < MINOR * step.whole:
        return f"The exchange blocks {_of(step.blocked, step.whole)} of a step, so it is not what limits the speed."
    parts = {"codec": step.codec, "waiting": step.waiting, "other": step.other}
    largest = max(parts, key=lambda part: parts[part])
    takes = f"takes {_of(parts[largest], sum(parts.values()))} of an exchange"
    if largest == "codec":
        return f"The codec {takes}: a cheaper method helps more than a faster link."
    if largest == "other":
        return f"Work that is neither codec nor waiting {takes}: copies, calls, and kernels on a GPU."
    if link is None:
        return f"Waiting {takes}, for the link or for slower ranks: summary(link_gbits=…) tells them apart."
    if link >= 0.5 * step.waiting:
        return f"Waiting {takes}, and the link alone takes {_time(link)}: send less, by a lower density or rank."
    rest = "the rest is for slower ranks, latency or shared cores"
    return f"Waiting {takes}, of which the link alone takes {_time(link)}: {rest}."


def seconds_on(link_gbits: float, num_bytes: float) -> float:
    """Return the seconds that a link needs to transfer bytes."""
    return 8 * num_bytes / (1e9 * link_gbits)


def _link(step: StepTime, link_gbits: float | None) -> str:
    sent, dense = (f"{with_prefix(num_bytes)}B" for num_bytes in (step.on_wire, step.dense))
    if link_gbits is not None:
        seconds, longer = (_time(seconds_on(link_gbits, num_bytes)) for num_bytes in (step.on_wire, step.dense))
        return f"{sent} per step, {seconds} at {link_gbits:g} Gbit/s; uncompressed {dense}, {longer}"
    rate = f", {with_prefix(step.on_wire / step.waiting)}B per second of waiting" if step.waiting else ""
    return f"{sent} per step{rate}; uncompressed {dense}"


def _of(part: float, whole: float) -> str:
    return f"{_time(part)} of {_time(whole)}"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1.0 else f"{seconds:.1f} s"
