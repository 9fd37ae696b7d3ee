"""Reports on a Compressor: the plan in use, its figures by program, what limits the speed; as text and as metrics.

The metrics follow https://prometheus.io/docs/specs/om/open_metrics_spec/ (version 1.0.0). The library neither serves
nor pushes them: write the text to a file for the textfile collector of Prometheus, or return it from your own handler
as ``application/openmetrics-text; version=1.0.0; charset=utf-8``.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hvdcompress.engine.bucket_state import declared_by_members, declared_slots, itemsize
from hvdcompress.engine.state import RankState
from hvdcompress.engine.telemetry.ledger import Entry, Ledger, StepTime
from hvdcompress.method import Array
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket
from hvdcompress.plan.plan import describe_method

Host = Callable[[Array], "np.ndarray[Any, Any]"]  #: converts an array to a NumPy array in host memory

OTHER = "agreement"  #: label for traffic that belongs to no tensor: status, plans, lengths, addresses
PREFIX = "hvdcompress"  #: of the names of metrics
WIDTH = 80  #: columns of the table and of the explanation
MINOR = 0.1  #: part of a step; an exchange that blocks less does not limit the speed
COLUMNS = ("tensors", "gradients", "sent", "ratio", "residual", "codec")
_WIDTHS = (7, 9, 8, 9, 8, 9)
_FIRST = WIDTH - sum(_WIDTHS) - len(_WIDTHS)  # width of the column with the method
_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))

# -- figures -------------------------------------------------------------------------------------------------


@dataclass
class Figures:
    """Figures of all tensors with the same program, on one rank.

    Attributes:
        program: the methods over the course of training, as text, as in :meth:`Compressor.describe`.
        now: the method of the next step, as text.
        tensors: number of tensors.
        elements: number of elements.
        totals: bytes, collectives and codec time.
        residual: l2-norm of the residuals of all these tensors: what error feedback still has to send. None if the
            method keeps no residual.
    """

    program: str
    now: str
    tensors: int = 0
    elements: int = 0
    totals: Entry = field(default_factory=Entry)
    residual: float | None = None

    @property
    def ratio(self) -> float:
        """Compression ratio: bytes of the gradients / bytes sent; NaN if either is 0."""
        totals = self.totals
        return totals.dense / totals.sent if totals.dense and totals.sent else math.nan


def by_program(buckets: Iterable[Bucket]) -> dict[str, list[Bucket]]:
    """Return {program as text: its buckets}, the program with most elements first."""
    groups: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        groups.setdefault(str(bucket.program), []).append(bucket)
    return dict(sorted(groups.items(), key=lambda item: -size_of(item[1])[1]))


def size_of(buckets: Iterable[Bucket]) -> tuple[int, int]:
    """Return the numbers of tensors and of elements in these buckets."""
    members = [member for bucket in buckets for member in bucket.members]
    return len(members), sum(member.size for member in members)


def figures(local: RankState, ledger: Ledger, buckets: Iterable[Bucket], host: Host = np.asarray) -> list[Figures]:
    """Return the figures of one rank by program, the largest first, and traffic that belongs to no tensor last.

    Args:
        local: the state of the rank.
        ledger: the ledger of the rank, which counts since it was created or reset.
        buckets: all buckets.
        host: converts an array to a NumPy array.
    """
    found: dict[str, Figures] = {}
    program_of: dict[str, str] = {}
    for program, group in by_program(buckets).items():
        figure = found[program] = Figures(program, describe_method(local.next_step(group[0]).method), *size_of(group))
        program_of |= {name: program for each in group for name in (each.spec.name, *(m.name for m in each.members))}
        states = [local.states[each.spec.name] for each in group if each.spec.name in local.states]
        kept = (host(state.slots[feedback.RESIDUAL]) for state in states if feedback.RESIDUAL in state.slots)
        # Unlike a product of float64 arrays, this makes no float64 copy of a residual
        norms = [math.sqrt(np.einsum("i,i", each, each, dtype=np.float64)) for each in map(np.ravel, kept)]
        figure.residual = math.hypot(*norms) if norms else None
    other = Figures(OTHER, OTHER)
    for name, entry in ledger.tensors(local.rank).items():
        found.get(program_of.get(name, ""), other).totals += entry
    return [*found.values(), *([other] if other.totals != Entry() else [])]


def total(groups: Sequence[Figures]) -> Figures:
    """Return the figures of all groups together."""
    totals = sum((each.totals for each in groups), Entry())
    kept = [each.residual for each in groups if each.residual is not None]
    return Figures(
        "",
        "total",
        sum(each.tensors for each in groups),
        sum(each.elements for each in groups),
        totals,
        math.hypot(*kept) if kept else None,
    )


# -- the plan in use ---------------------------------------------------------------------------------------


def describe(buckets: Iterable[Bucket]) -> str:
    """Return one line per group of tensors: the methods, the number of tensors, and the memory of state per rank."""
    lines = []
    for text, group in by_program(buckets).items():
        tensors, elements = size_of(group)
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
    compressed = [bucket for bucket in buckets if bucket.program.main.id != "none"]
    counts = Counter(str(bucket.program) for bucket in compressed for _ in bucket.members)
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


# -- export --------------------------------------------------------------------------------------------------


class Writer(Protocol):
    """Interface that ``log_to`` needs: torch.utils.tensorboard.SummaryWriter, tensorboardX and others have it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write one number."""


def log_to(writer: Writer, step: int | None, groups: Sequence[Figures], ledger: Ledger, rank: int) -> None:
    """Write the figures of one rank to a TensorBoard writer, for all tensors together and for each program.

    Unknown values are omitted, such as the compression ratio before the first step.

    Args:
        writer: the writer.
        step: step of the training; None for the number of steps done.
        groups: the figures by program.
        ledger: the ledger of the rank.
        rank: the rank.
    """
    seconds = ledger.seconds(rank)
    residual = total(groups).residual
    found = {
        "ratio": ledger.compression_ratio(rank),
        "sent_bytes": float(ledger.bytes_sent(rank)),
        "wire_bytes": float(ledger.bytes_on_wire(rank)),
        "codec_seconds": seconds["codec"],
        "wait_seconds": seconds["wait"],
        "residual_norm": math.nan if residual is None else residual,
    }
    if inside := ledger.bytes_inside_node(rank):
        found["inside_node_bytes"] = float(inside)
    for each in groups:
        found[f"{each.program}/ratio"] = each.ratio
        found[f"{each.program}/residual_norm"] = math.nan if each.residual is None else each.residual
        found[f"{each.program}/codec_seconds"] = each.totals.seconds
    for tag, value in found.items():
        if not math.isnan(value):
            writer.add_scalar(f"{PREFIX}/{tag}", value, ledger.steps if step is None else step)


def openmetrics(groups: Sequence[Figures], ledger: Ledger, rank: int, labels: Mapping[str, str]) -> str:
    """Return the figures of one rank as OpenMetrics text.

    Args:
        groups: the figures by program.
        ledger: the ledger of the rank.
        rank: the rank; exported as the label ``rank``.
        labels: {name: value} of further labels of every sample.

    Raises:
        ValueError: a label name is malformed or reserved.
    """
    for name in labels:
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) or name in ("rank", "program", "counter"):
            raise ValueError(f"label {name!r}: use letters, digits and _; rank, program and counter are reserved")
    # Label order is fixed: "rank" last, then what distinguishes the samples of a family
    base = {**labels, "rank": str(rank)}
    by_program = [({**base, "program": each.program}, each) for each in groups]
    entries = [(own, each.totals) for own, each in by_program]
    seconds = ledger.seconds(rank)
    lines = [
        *_family("steps", "counter", "Steps that all ranks have kept.", [(base, ledger.steps)]),
        *_family("tensors", "gauge", "Tensors.", [(own, each.tensors) for own, each in by_program if each.tensors]),
        *_family("gradient_bytes", "counter", "Gradients, in their own dtype.", [(own, e.dense) for own, e in entries]),
        *_family("sent_bytes", "counter", "Handed to collectives.", [(own, e.sent) for own, e in entries]),
        *_family(
            "wire_bytes",
            "counter",
            "Transmitted by this rank where collectives run as rings.",
            [(own, e.on_wire) for own, e in entries],
        ),
        *_family(
            "inside_node_bytes",
            "counter",
            "Transmitted to ranks of the same node, in exchanges with two levels.",
            [(base, inside)] if (inside := ledger.bytes_inside_node(rank)) else [],
        ),
        *_family("collectives", "counter", "Collectives.", [(own, e.collectives) for own, e in entries]),
        *_family("codec_seconds", "counter", "Codec work.", [(own, e.seconds) for own, e in entries]),
        *_family("wait_seconds", "counter", "Blocked in the transport.", [(base, seconds["wait"])]),
        *_family(
            "residual_norm",
            "gauge",
            "l2-norm of what error feedback has still to send.",
            [(own, each.residual) for own, each in by_program if each.residual is not None],
        ),
        *_family(
            "method_events",
            "counter",
            "What methods count, such as selected elements.",
            [({**base, "counter": name}, amount) for name, amount in sorted(ledger.counters(rank).items())],
        ),
    ]
    return "\n".join([*lines, "# EOF", ""])


def _family(name: str, kind: str, text: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> list[str]:
    """Return the lines of a metric family. The samples of a counter end in ``_total``."""
    full = f"{PREFIX}_{name}"
    unit = name.rsplit("_", 1)[-1]
    lines = [f"# TYPE {full} {kind}", *([f"# UNIT {full} {unit}"] if unit in ("bytes", "seconds") else [])]
    lines.append(f"# HELP {full} {text}")
    sample = f"{full}_total" if kind == "counter" else full
    for labels, value in samples:
        words = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"{sample}{{{words}}} {value if isinstance(value, int) else float(value)!r}")
    return lines


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
