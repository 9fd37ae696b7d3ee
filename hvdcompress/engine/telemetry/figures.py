"""Figures of a Compressor's work so far, by program of methods, also as OpenMetrics text and as TensorBoard scalars.

The text follows https://prometheus.io/docs/specs/om/open_metrics_spec/ (version 1.0.0). The library neither serves nor
pushes it: write it to a file for the textfile collector of Prometheus, or return it from your own handler as
``application/openmetrics-text; version=1.0.0; charset=utf-8``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hvdcompress.engine.state import RankState
from hvdcompress.engine.telemetry.ledger import Entry, Ledger
from hvdcompress.method import Array
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket
from hvdcompress.plan.plan import describe_method

Host = Callable[[Array], "np.ndarray[Any, Any]"]  #: converts an array to a NumPy array in host memory

OTHER = "agreement"  #: label for traffic that belongs to no tensor: status, plans, lengths, addresses
PREFIX = "hvdcompress"  #: of the names of metrics


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
    for bucket in buckets:
        program = str(bucket.program)
        group = found.setdefault(program, Figures(program, describe_method(local.next_step(bucket).method)))
        group.tensors += len(bucket.members)
        group.elements += bucket.spec.size
        program_of |= dict.fromkeys([bucket.spec.name, *(member.name for member in bucket.members)], program)
        state = local.states.get(bucket.spec.name)
        residual = state.slots.get(feedback.RESIDUAL) if state else None
        if residual is not None:
            flat = host(residual).reshape(-1)
            # Unlike a product of float64 arrays, this makes no float64 copy of the residual
            norm = math.sqrt(np.einsum("i,i", flat, flat, dtype=np.float64))
            group.residual = math.hypot(group.residual or 0.0, norm)
    other = Figures(OTHER, OTHER)
    for name, entry in ledger.tensors(local.rank).items():
        found.get(program_of.get(name, ""), other).totals += entry
    groups = sorted(found.values(), key=lambda group: -group.elements)
    return [*groups, *([other] if other.totals != Entry() else [])]


def total(groups: Sequence[Figures]) -> Figures:
    """Return the figures of all groups together."""
    totals = sum((each.totals for each in groups), Entry())
    whole = Figures("", "total", sum(each.tensors for each in groups), sum(each.elements for each in groups), totals)
    kept = [each.residual for each in groups if each.residual is not None]
    whole.residual = math.hypot(*kept) if kept else None
    return whole


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
