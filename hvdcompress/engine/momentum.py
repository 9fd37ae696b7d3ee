"""Delivery of reduced gradients with adapted optimizer momentum (``parts/momentum.py`` has the equations).

Between steps the adapter stores v, the part of the optimizer's momentum buffer that comes from gradients without
momentum. It has the form of the method's result: sparse for a sparse method, two factors for a low-rank matrix, dense
otherwise. It is stored in *pieces*: one for the whole bucket, or one per tensor if the method runs on each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvdcompress.engine.bucket_state import MomentumState
from hvdcompress.engine.pieces import (
    Piece,
    Pieces,
    clone,
    combined,
    concatenated,
    copied,
    in_same_form,
    is_compact,
    scaled,
    to_dense,
)
from hvdcompress.engine.setup import Setup
from hvdcompress.method import Array, Reduced, Sparse
from hvdcompress.ops.vectors import Outer, Shares
from hvdcompress.parts import momentum
from hvdcompress.parts.momentum import MAX_WAIT, Filter, Momentum, shares

RENEWED = 127 - MAX_WAIT  #: interval in steps at which old stamps are renewed, because stamps repeat after 256 steps
COUNTED = 4096  #: elements; of more, a sample of about this size estimates how many ranks send the same element


class Adapter:
    """Adapts the optimizer's momentum to the results of one exchange.

    Args:
        setup: the inputs of the exchange.
        reduced: the results of the method: one for the bucket, or one per tensor.
    """

    def __init__(self, setup: Setup, reduced: Sequence[Reduced]):
        self.setup = setup
        self.bucket = setup.bucket
        self.ops = setup.ops
        self._reduced = reduced
        self.known = setup.state.momentum  # contents before this step
        self._past = self.known.content  # v before this step, corrected for what the optimizer did since
        self._new: Pieces | None = None  # v after this step; None if unchanged
        self._updates = self.known.updates
        self._arrived = self.known.arrived
        self._stamped: Array | None = None  # ``_arrived`` after this step

    def _totals(self) -> list[Any]:
        return [reduced.total for reduced in self._reduced]

    def _choose_filters(self, found: Sequence[Momentum | None]) -> list[Filter]:
        setup = self.setup
        if setup.paused:
            return []
        if momentum.adapts(setup.method):
            return [momentum.cancelling_filter(setup.method, each) for each in found]
        # The method does not adapt momentum. If an earlier one did, its part of the buffer must be restored once.
        return [momentum.restoring_filter(each) for each in found] if self._past else []

    def _reconciled(self, found: Sequence[Momentum | None]) -> Pieces:
        """Return v as it is in the optimizer's buffers now.

        An optimizer may have a new buffer, may have skipped its step, or may have used a gradient that is not in the
        known content.

        Args:
            found: the momentum of each tensor; None if unknown.
        """
        content = self.known.content
        then = self.known.updates or (None,) * len(found)
        foreign = self.known.foreign or (False,) * len(found)
        # Optimizer updates since the last exchange that decayed v without adding to it. −1 means that the optimizer
        # skipped its step (as a gradient scaler does after an overflow), so that v is what it was before.
        decays: list[int] = []
        for before, now, is_foreign in zip(then, self._updates, foreign, strict=True):
            decays.append(0 if before is None or now is None else now - before - (not is_foreign))
        # Each change: for which tensors it applies, and the content that replaces theirs
        changes: list[tuple[list[bool], Pieces]] = [([each < 0 for each in decays], self.known.before)]
        changes.append(([one is not None and one.empty for one in found], ()))
        factors = [one.factor**each if one and each > 0 else 1.0 for one, each in zip(found, decays, strict=True)]
        for factor in set(factors) - {1.0}:
            changes.append(([each == factor for each in factors], scaled(content, factor)))
        for chosen, other in changes:
            if any(chosen):
                content = self._with_parts_of(content, other, chosen)
        return content

    # -- results --------------------------------------------------------------------------------------------

    def write(self, factor: float, outs: Sequence[Array]) -> bool:
        """Write the gradients for the optimizer into ``outs``.

        Args:
            factor: factor from a total to the reduced gradient, without the loss scale.
            outs: float32 arrays that receive the gradients, one per tensor.

        Returns:
            Whether anything was written. False if no momentum is adapted in this step.
        """
        found = [self.setup.local.optimizer(member.name) for member in self.bucket.members]
        if not any(found):  # the optimizer is unknown or was deleted
            self._past = ()
        if not any(each and each.factor for each in found):
            return False
        self._updates = tuple(each.updates if each else None for each in found)
        self._past = self._reconciled(found)
        filters = self._choose_filters(found)
        if not filters:
            return False
        by_wait = any(one.share is None for one in filters)
        if by_wait and self._arrived is None:
            # Tracking starts now, as if every element had been sent in the last step
            self._arrived = self.ops.zeros(self.bucket.spec.size, "int8", self.setup.like)
            self.ops.fill(self._arrived, _stamp(self.setup.state.step))
        totals = self._totals()
        spread = _spread(totals) if by_wait else 1.0
        first = filters[0]
        # Nesterov's momentum decays v itself, which would make a sparse v denser in every step
        if is_compact(totals, self.bucket) and not first.decay and all(other == first for other in filters):
            kept = self._write_compact(totals, first, spread, factor, outs)
        else:
            kept = (self._write_dense(totals, filters, spread, factor, outs),)
        self._new = kept if first.keeps else ()
        return True

    def _write_compact(
        self, totals: Sequence[Any], one: Filter, spread: float, factor: float, outs: Sequence[Array]
    ) -> Pieces:
        """Write sparse or low-rank totals without creating a dense vector, and return the new v.

        The gradient u = s + c·(gain/entry − 1)·s − (μ/entry)·v is again sparse, or of low rank.
        """
        ops = self.ops
        scale = self.setup.scale
        unchanged = factor / scale  # factor of a total that is delivered with its momentum
        gain = one.gain * factor
        lost = one.factor / (one.entry * scale)  # factor of the old v
        more = one.gain / one.entry - 1.0  # without momentum, a gradient has its whole effect in this step
        old: Sequence[Any] = in_same_form(totals, self._past, self.bucket, ops)
        kept: list[Piece] = []
        for number, total in enumerate(totals):
            if isinstance(total, Outer):
                # All elements of a matrix have the same share, because all of them are sent in every step
                assert one.share is not None
                change = unchanged * (1.0 + one.share * more)
                if old:
                    ops.write(outs[number], combined(total, change, old[number], -lost, ops), 1.0)
                else:
                    ops.write(outs[number], total, change)
                kept.append(copied(total, gain * one.share))
                continue
            index, values = concatenated(_parts(total), ops)
            share = self._stamp(self._table(one, spread), number, index) if one.share is None else one.share
            given = [Sparse(index, values * (share * _rounded(more) + 1.0))]
            kept.append(Sparse(index, values * share * _rounded(gain)))
            if old:
                index, values = old[number]
                given.append(Sparse(index, values * _rounded(-lost / unchanged)))
            if len(totals) < len(outs):
                ops.write_parts(outs, Shares(given), unchanged)
            else:
                ops.write(outs[number], Shares(given), unchanged)
        # The old v has another form, because the method has changed: subtract it separately
        if self._past and not old:
            vector = to_dense(self._past, self.bucket, ops, outs[0])
            for out, (start, stop) in zip(outs, self.bucket.spans, strict=True):
                ops.subtract(out, vector[start:stop], lost)
        return tuple(kept)

    def _write_dense(
        self, totals: Sequence[Any], filters: Sequence[Filter], spread: float, factor: float, outs: Sequence[Array]
    ) -> Array:
        """Write totals of any form through a dense vector."""
        ops = self.ops
        scale = self.setup.scale
        old = to_dense(self._past, self.bucket, ops, outs[0]) if self._past else None
        new = self._unused_buffer(old, outs[0])
        for number, total in enumerate(totals):
            ops.write(new[slice(*self._span_of(number))], total, factor)
        for out, one, (start, stop) in zip(outs, filters, self.bucket.spans, strict=True):
            v = new[start:stop]  # now s_t, later v_t
            share: Any = one.share
            if share is None:
                assert self._arrived is not None
                ages = self._arrived[start:stop]
                share = ops.take_by_age(self._table(one, spread), ages, _stamp(self.setup.state.step + 1))
            rest = None if one.share == 1.0 else v * (1.0 - share)
            # v_t = gain·c·s_t + decay·v_{t−1}
            v *= share * _rounded(one.gain)
            if old is not None and one.decay:
                ops.subtract(v, old[start:stop], -one.decay)
            # u_t = (1 − c)·s_t + (v_t − μ·v_{t−1}) / entry
            ops.write(out, v, 1.0 / (one.entry * scale))
            if old is not None:
                ops.subtract(out, old[start:stop], one.factor / (one.entry * scale))
            if rest is not None:
                ops.subtract(out, rest, -1.0 / scale)
        return new

    def _unused_buffer(self, old: Array | None, like: Array) -> Array:
        """Return a dense buffer [size] that is not in use and is not ``old``.

        The content before the last exchange is needed only as long as the optimizer may have skipped that step.
        """
        size = self.bucket.spec.size
        if self._past is self.known.content and len(self.known.before) == 1:
            (before,) = self.known.before
            if not isinstance(before, Sparse | Outer) and before is not old and len(before) == size:
                return before
        return self.ops.zeros(size, "float32", like)

    def _span_of(self, number: int) -> tuple[int, int]:
        """Return (start, stop) of a total in the bucket. There is one total, or one per tensor."""
        return self.bucket.spans[number] if len(self._reduced) > 1 else (0, self.bucket.spec.size)

    def _table(self, one: Filter, spread: float) -> Array:
        """Return the share c that is delivered without momentum, by age of an element, float32."""
        return self.ops.asarray(shares(one.factor, spread), self.setup.like)

    def _stamp(self, table: Array, number: int, index: Array) -> Array:
        """Mark elements of a total as sent in this step, and return the table entries of their ages."""
        assert self._arrived is not None
        if self._stamped is None:
            self._stamped = self.setup.memory.second_buffer("arrived", self._arrived, "int8", self.ops)
        where = slice(*self._span_of(number))
        now = _stamp(self.setup.state.step + 1)
        return self.ops.stamp(table, self._arrived[where], now, index, self._stamped[where])

    # -- the next state -------------------------------------------------------------------------------------

    def new_state(self, unused: tuple[bool, ...]) -> MomentumState:
        """Return the buffer contents after this step.

        Args:
            unused: for each tensor, whether no rank uses its result. Empty if all are used.
        """
        arrived = self._new_arrivals(unused)
        if self._new is None:
            return MomentumState(self._past, self.known.before, arrived, self._updates, unused)
        content = self._with_parts_of(self._new, self._past, unused) if unused else self._new
        return MomentumState(content, self._past, arrived, self._updates, unused)

    def paused_state(self) -> MomentumState:
        """Return the buffer contents after a paused step, whose gradients the optimizer gets unchanged."""
        return replace(self.known, content=self._past, updates=self._updates)

    def _new_arrivals(self, unused: tuple[bool, ...]) -> Array | None:
        """Return the step in which each element was last sent, including this step."""
        totals = self._totals()
        if self._arrived is None or not all(isinstance(total, Sparse | Shares) for total in totals):
            return None
        step = self.setup.state.step
        if self._stamped is None:  # no share depended on the ages, so the elements are not marked yet
            nothing = self.ops.asarray(np.ones(1, np.float32), self.setup.like)
            for number, total in enumerate(totals):
                self._stamp(nothing, number, self.ops.concat([part.index for part in _parts(total)]))
        arrived: Any = self._stamped
        for is_unused, (start, stop) in zip(unused, self.bucket.spans, strict=False):
            if is_unused:
                arrived[start:stop] = self._arrived[start:stop] + 1  # without a gradient, no element waits longer
        # A stamp is the step modulo 256. Renew old ones before they would look like recent ones.
        if step % RENEWED == 0:
            waits = _stamp(step + 1) - arrived
            arrived[waits > MAX_WAIT] = _stamp(step + 1 - MAX_WAIT)
        return arrived

    def _with_parts_of(self, pieces: Pieces, others: Pieces, chosen: Sequence[bool]) -> Pieces:
        """Return ``pieces``, with the chosen tensors replaced by those of ``others``."""
        if all(chosen):
            return others
        if not pieces and not others:
            return ()
        like = self.setup.like
        dense = clone(to_dense(pieces, self.bucket, self.ops, like))
        other = to_dense(others, self.bucket, self.ops, like)
        for choose, (start, stop) in zip(chosen, self.bucket.spans, strict=True):
            if choose:
                self.ops.write(dense[start:stop], other[start:stop], 1.0)
        return (dense,)


# -- totals ------------------------------------------------------------------------------------------------------


def _parts(total: Any) -> list[Sparse]:
    """Return the shares of the ranks in a sparse total."""
    return list(total.each) if isinstance(total, Shares) else [total]


def _stamp(step: int) -> int:
    """Return a step modulo 2^8, in the range of int8."""
    return (step + 2**7) % 2**8 - 2**7


def _spread(totals: Sequence[Any]) -> float:
    """Return (number of ranks) / (mean number of ranks that send the same element), rounded to eighths.

    If there are many elements, only those whose index is divisible by a power of two are counted.
    """
    ranks = max(len(_parts(total)) for total in totals)
    sent = different = 0
    for total in totals if ranks > 1 else ():
        indices = [part.index for part in _parts(total)]
        power = max(0, (sum(map(len, indices)) // COUNTED).bit_length())
        if power:
            indices = [index[index & (2**power - 1) == 0] for index in indices]
        index = np.concatenate([_on_host(index) for index in indices])
        sent += len(index)
        different += len(np.unique(index))
    return max(1.0, round(8 * ranks * different / sent) / 8) if sent else 1.0


def _on_host(index: Array) -> np.ndarray[Any, Any]:
    return index if isinstance(index, np.ndarray) else index.cpu().numpy()


def _rounded(factor: float) -> float:
    return np.float32(factor).item()
