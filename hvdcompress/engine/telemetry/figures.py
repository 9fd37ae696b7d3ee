"""What a rank's Compressor has done so far, as figures by method: what tables and metrics are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdcompress.engine.state import RankState
from hvdcompress.engine.telemetry.ledger import Entry, Ledger
from hvdcompress.method import Array
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket
from hvdcompress.plan.plan import describe_method

Host = Callable[[Array], "np.ndarray[Any, Any]"]  #: an array, as one of numpy's in the host's memory

OTHER = "agreement"  #: what travels for no tensor's sake: status, plans, lengths, addresses
BLOCK = 1 << 20  #: elements whose squares are added at once


@dataclass
class Figures:
    """The figures of the tensors that have one program, on one rank.

    Attributes:
        program: the methods over the course of training, in words, as :meth:`Compressor.describe` has them.
        now: the method of the next step, in words.
        tensors, elements: how many there are.
        totals: bytes, collectives and seconds in the codec.
        residual: the l2-norm of what error feedback keeps, of all these tensors together: what has been left out so
            far and is still to come. None where nothing is kept.
    """

    program: str
    now: str
    tensors: int = 0
    elements: int = 0
    totals: Entry | None = None
    residual: float | None = None

    @property
    def account(self) -> Entry:
        """The totals; zeros where nothing has gone through."""
        return self.totals or Entry()

    @property
    def ratio(self) -> float:
        """Bytes of the gradients / bytes sent; NaN where either is 0."""
        entry = self.account
        return entry.dense / entry.sent if entry.dense and entry.sent else math.nan


def figures(local: RankState, ledger: Ledger, buckets: Iterable[Bucket], host: Host = np.asarray) -> list[Figures]:
    """One rank's figures by program, those with most elements first; last what travels for no tensor's sake.

    Args:
        local: the rank.
        ledger: its accounts; since it was reset, if it ever was.
        buckets: what is exchanged.
        host: brings an array into numpy.
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
        group = found.get(program_of.get(name, ""), other)
        group.totals = entry if group.totals is None else group.totals + entry
    for program, square in squares.items():
        found[program].residual = math.sqrt(square)
    groups = sorted(found.values(), key=lambda group: -group.elements)
    return [*groups, *([other] if other.totals else [])]


def _sum_of_squares(array: np.ndarray[Any, Any]) -> float:
    """In float64, block by block: no second array as large as the residual."""
    flat = array.reshape(-1)
    blocks = (flat[start : start + BLOCK].astype(np.float64) for start in range(0, len(flat), BLOCK))
    return sum(float(block @ block) for block in blocks)
