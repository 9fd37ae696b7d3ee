"""Texts for people about a Compressor: the plan in use, the work so far as a table, and what limits the speed."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from hvdcompress.engine.bucket_state import declared_by_members, declared_slots, itemsize
from hvdcompress.engine.telemetry.figures import Figures, total
from hvdcompress.engine.telemetry.ledger import Ledger, StepTime
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket

WIDTH = 80  #: columns of the table and of the explanation
MINOR = 0.1  #: part of a step; an exchange that blocks less does not limit the speed
COLUMNS = ("tensors", "gradients", "sent", "ratio", "residual", "codec")
_WIDTHS = (7, 9, 8, 9, 8, 9)
_FIRST = WIDTH - sum(_WIDTHS) - len(_WIDTHS)  # width of the column with the method
_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))

# -- the plan in use ---------------------------------------------------------------------------------------


def describe(buckets: Iterable[Bucket]) -> str:
    """Return one line per group of tensors: the methods, the number of tensors, and the memory of state per rank."""
    groups: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        groups.setdefault(str(bucket.program), []).append(bucket)
    lines = []
    for text, group in sorted(groups.items(), key=lambda item: -sum(bucket.spec.size for bucket in item[1])):
        elements = sum(bucket.spec.size for bucket in group)
        tensors = sum(len(bucket.members) for bucket in group)
        megabytes = sum(memory(bucket) for bucket in group) / 1e6
        lines.append(
            f"{text}: {tensors} tensor{'s' * (tensors != 1)}, {elements:,} elements, {megabytes:.2f} MB of state"
        )
    return "\n".join(lines)


def first_step(buckets: Sequence[Bucket], dense: int, sent: int) -> str:
    """Return a line about the first step: which tensors are compressed, and the bytes before and after.

    Args:
        buckets: all buckets.
        dense: bytes of the gradients of a step.
        sent: bytes that a rank has sent in the step.

    Returns:
        The line; empty if no tensor is compressed.
    """
    counts: Counter[str] = Counter()
    for bucket in buckets:
        if bucket.program.main.id != "none":
            counts[str(bucket.program)] += len(bucket.members)
    tensors = sum(len(bucket.members) for bucket in buckets)
    what = ", ".join(f"{program} on {count}" for program, count in counts.most_common())
    return (
        f"{what} of {tensors} tensors, {with_prefix(dense)}B → {with_prefix(sent)}B in the first step" if what else ""
    )


def memory(bucket: Bucket) -> int:
    """Return the bytes of a bucket's state on one rank, including second buffers."""
    declared = [*declared_slots(bucket).items(), *(pair for own in declared_by_members(bucket) for pair in own.items())]
    sizes = [(name, math.prod(slot.shape) * itemsize(slot.dtype)) for name, slot in declared]
    return sum(2 * size if name in feedback.BUFFERED else size for name, size in sizes)


# -- the work so far ---------------------------------------------------------------------------------------


def summary(groups: Sequence[Figures], ledger: Ledger, rank: int) -> str:
    """Return the table: one line per program, one for traffic that belongs to no tensor, and a total.

    With two levels, the bytes sent to ranks of the same node follow.

    The columns are the method of the next step (with an arrow to the last method of its program), the number of
    tensors, the bytes of the gradients in their own dtype, the bytes sent, the compression ratio, the l2-norm of the
    residuals ("-" if the method keeps none), and the codec time without Numba's compilation.

    Args:
        groups: the figures by program.
        ledger: the ledger of the rank.
        rank: the rank.
    """
    seconds = ledger.seconds(rank)
    lines = [_line("method", COLUMNS)]
    lines += [_line(_label(group), _cells(group)) for group in groups]
    lines.append(_line("total", _cells(total(groups))))
    lines.append(
        f"rank {rank} of {ledger.world_size}, {ledger.steps} steps: {seconds['codec']:.2f} s in the codec, "
        f"{seconds['wait']:.2f} s waiting"
    )
    if inside := ledger.bytes_inside_node(rank):
        lines.append(f"two levels: these tensors between nodes, and {with_prefix(inside)}B to ranks of this node")
    return "\n".join(lines)


def _label(group: Figures) -> str:
    last = group.program.rsplit(": ", 1)[-1]
    return group.now if last == group.now or not group.tensors else f"{group.now} > {last}"


def _cells(group: Figures) -> list[str]:
    entry = group.totals
    return [
        str(group.tensors) if group.tensors else "-",
        f"{with_prefix(entry.dense)}B" if entry.dense else "-",
        f"{with_prefix(entry.sent)}B",
        "-" if math.isnan(group.ratio) else f"{group.ratio:.4g}",
        "-" if group.residual is None else f"{group.residual:.3g}",
        f"{entry.seconds:.2f} s" if entry.seconds < 1000 else f"{entry.seconds:.0f} s",
    ]


def _line(first: str, cells: Sequence[str]) -> str:
    first = first if len(first) <= _FIRST else f"{first[: _FIRST - 1]}…"
    return " ".join([first.ljust(_FIRST), *(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))])


# -- the time of a step ------------------------------------------------------------------------------------


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


def with_prefix(amount: float) -> str:
    """Format a number with three digits and a unit prefix: 25600000 becomes "25.6 M"."""
    for scale, letter in _SCALES:
        if amount >= scale:
            number = amount / scale
            return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {letter}"
    return f"{amount:.0f} "
