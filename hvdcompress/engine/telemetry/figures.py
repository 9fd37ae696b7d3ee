"""Figures of a Compressor's work so far, by program of methods. Tables and metrics are made from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdcompress.engine.state import RankState
from hvdcompress.engine.telemetry.ledger import Entry, Ledger
from hvdcompress.method import Array
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket
from hvdcompress.plan.plan import describe_method

Host = Callable[[Array], "np.ndarray[Any, Any]"]  #: converts an array to a NumPy array in host memory

OTHER = "agreement"  #: label for traffic that belongs to no tensor: status, plans, lengths, addresses
BLOCK = 1 << 20  #: elements that are converted to float64 at a time


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
    squares: dict[str, float] = {}
    for bucket in buckets:
        program = str(bucket.program)
        group = found.setdefault(program, Figures(program, describe_method(local.next_step(bucket).method)))
        group.tensors += len(bucket.members)
        group.elements += bucket.spec.size
        program_of |= dict.fromkeys([bucket.spec.name, *(member.name for member in bucket.members)], program)
        state = local.states.get(bucket.spec.name)
        residual = state.slots.get(feedback.RESIDUAL) if state else None
        if residual is not None:
            squares[program] = squares.get(program, 0.0) + _sum_of_squares(host(residual))
    other = Figures(OTHER, OTHER)
    for name, entry in ledger.tensors(local.rank).items():
        found.get(program_of.get(name, ""), other).totals += entry
    for program, square in squares.items():
        found[program].residual = math.sqrt(square)
    groups = sorted(found.values(), key=lambda group: -group.elements)
    return [*groups, *([other] if other.totals != Entry() else [])]


def total(groups: Sequence[Figures]) -> Figures:
    """Return the figures of all groups together."""
    totals = sum((each.totals for each in groups), Entry())
    whole = Figures("", "total", sum(each.tensors for each in groups), sum(each.elements for each in groups), totals)
    kept = [each.residual for each in groups if each.residual is not None]
    whole.residual = math.hypot(*kept) if kept else None
    return whole


def _sum_of_squares(array: np.ndarray[Any, Any]) -> float:
    """Return the sum of squares in float64, block by block, which avoids a float64 copy of the whole residual."""
    flat = array.reshape(-1)
    blocks = (flat[start : start + BLOCK].astype(np.float64) for start in range(0, len(flat), BLOCK))
    return sum(float(block @ block) for block in blocks)
