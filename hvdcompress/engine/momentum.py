"""Hand reduced gradients over, the optimizer's momentum adapted (``parts/momentum.py`` has the equations).

What the optimizer's momentum buffer contains of gradients without momentum, v, is kept from step to step in the form in
which the method's result came: sparse for a sparse method, as two factors for a matrix of low rank, dense otherwise. It
is kept in *pieces*: one for the whole bucket, or one for each tensor of a bucket whose method runs on each tensor.
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
    in_form_of,
    is_compact,
    scaled,
    to_dense,
)
from hvdcompress.engine.setup import Setup
from hvdcompress.method import Array, Reduced, Sparse
from hvdcompress.ops.vectors import Outer, Shares
from hvdcompress.parts import momentum
from hvdcompress.parts.momentum import MOST, Filter, Momentum, shares

RENEWED = 127 - MOST  #: steps between those in which old stamps are renewed, as stamps repeat after 256 steps
COUNTED = 4096  #: elements; of more, a sample tells how many of them ranks send together


class Adapter:
    """Adapts the optimizer's momentum for the results of one exchange.

    Args:
        setup: of the exchange, whose method is done.
        reduced: what the method returned: one for the bucket, or one for each tensor.
    """

    def __init__(self, setup: Setup, reduced: Sequence[Reduced]):
        self.setup = setup
        self.bucket = setup.bucket
        self.ops = setup.ops
        self._reduced = reduced
        self.known = setup.state.momentum  # before this step
        self._past = self.known.content  # what the buffer contains now
        self._new: Pieces | None = None  # what it contains after this step; None if that is the same
        self._updates = self.known.updates
        self._arrived = self.known.arrived
        self._stamped: Array | None = None  # the same after this step

    def _totals(self) -> list[Any]:
        return [reduced.total for reduced in self._reduced]

    def _choose_filters(self, found: Sequence[Momentum | None]) -> list[Filter]:
        setup = self.setup
        if setup.paused:
            return []
        if momentum.adapts(setup.method):
            return [momentum.adapting(setup.method, each) for each in found]
        return [momentum.releasing(each) for each in found] if self._past else []

    def _reconciled(self, found: Sequence[Momentum | None]) -> Pieces:
        """Return what the buffers of the optimizers contain.

        Some buffers are new; some optimizers have skipped their step; some have taken a step with a gradient that is
        not in the known content.
        """
        content = self.known.content
        then = self.known.updates or (None,) * len(found)
        foreign = self.known.foreign or (False,) * len(found)
        # updates since the last exchange in which nothing of ours was added to the buffer; −1: not even that was
        more: list[int] = []
        for before, now, is_foreign in zip(then, self._updates, foreign, strict=True):
            more.append(0 if before is None or now is None else now - before - (not is_foreign))
        empty = [one is not None and one.empty for one in found]
        changes: list[tuple[list[bool], Pieces]] = [([each < 0 for each in more], self.known.before), (empty, ())]
        factors = [one.factor**each if one and each > 0 else 1.0 for one, each in zip(found, more, strict=True)]
        for factor in set(factors) - {1.0}:
            changes.append(([each == factor for each in factors], scaled(content, factor)))
        for chosen, other in changes:
            if any(chosen):
                content = self._with_parts_of(content, other, chosen)
        return content

    # -- results --------------------------------------------------------------------------------------------

    def write(self, factor: float, outs: Sequence[Array]) -> bool:
        """Write what the optimizer is to be given into ``outs``; return False where nothing is adapted in this step.

        Args:
            factor: what the total is multiplied by to get the reduced gradient, the loss scale apart.
            outs: float32, by tensor.
        """
        found = [self.setup.local.optimizer(member.name) for member in self.bucket.members]
        if not any(found):  # no optimizer is known, or it is gone
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
            self._arrived = self.ops.zeros(self.bucket.spec.size, "int8", self.setup.like)
            self.ops.fill(self._arrived, _stamp(self.setup.state.step))
        totals = self._totals()
        spread = _spread(totals) if by_wait else 1.0
        first = filters[0]
        if is_compact(totals, self.bucket) and not first.decay and all(other == first for other in filters):
            kept = self._write_compact(totals, first, spread, factor, outs)
        else:
            kept = (self._write_dense(totals, filters, spread, factor, outs),)
        self._new = kept if first.keeps else ()
        return True

    def _write_compact(
        self, totals: Sequence[Any], one: Filter, spread: float, factor: float, outs: Sequence[Array]
    ) -> Pieces:
        """Write sparse or low-rank totals, of which no dense vector is kept."""
        ops = self.ops
        scale = self.setup.scale
        as_it_is = factor / scale
        gain = one.gain * factor
        lost = one.factor / (one.entry * scale)
        more = one.gain / one.entry - 1.0  # what is handed over without momentum has all of its effect at once
        old: Sequence[Any] = in_form_of(totals, self._past, self.bucket, ops)
        kept: list[Piece] = []
        for number, total in enumerate(totals):
            if isinstance(total, Outer):
                assert one.share is not None
                change = as_it_is * (1.0 + one.share * more)
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
                given.append(Sparse(index, values * _rounded(-lost / as_it_is)))
            if len(totals) < len(outs):
                ops.write_parts(outs, Shares(given), as_it_is)
            else:
                ops.write(outs[number], Shares(given), as_it_is)
        if self._past and not old:
            vector = to_dense(self._past, self.bucket, ops, outs[0])
            for out, (start, stop) in zip(outs, self.bucket.spans, strict=True):
                ops.subtract(out, vector[start:stop], lost)
        return tuple(kept)

    def _write_dense(
        self, totals: Sequence[Any], filters: Sequence[Filter], spread: float, factor: float, outs: Sequence[Array]
    ) -> Array:
        """Write totals of any form."""
        ops = self.ops
        scale = self.setup.scale
        old = to_dense(self._past, self.bucket, ops, outs[0]) if self._past else None
        new = self._unused_buffer(old, outs[0])
        for number, total in enumerate(totals):
            ops.write(new[slice(*self._span_of(number))], total, factor)
        for out, one, (start, stop) in zip(outs, filters, self.bucket.spans, strict=True):
            v = new[start:stop]
            share: Any = one.share
            if share is None:
                assert self._arrived is not None
                ages = self._arrived[start:stop]
                share = ops.take_by_age(self._table(one, spread), ages, _stamp(self.setup.state.step + 1))
            rest = None if one.share == 1.0 else v * (1.0 - share)
            v *= share * _rounded(one.gain)
            if old is not None and one.decay:
                ops.subtract(v, old[start:stop], -one.decay)
            ops.write(out, v, 1.0 / (one.entry * scale))
            if old is not None:
                ops.subtract(out, old[start:stop], one.factor / (one.entry * scale))
            if rest is not None:
                ops.subtract(out, rest, -1.0 / scale)
        return new

    def _unused_buffer(self, old: Array | None, like: Array) -> Array:
        """Return a dense vector whose contents nobody needs, and which is not ``old``.

        The content before the last exchange is needed only as long as the optimizer may have skipped that step.
        """
        size = self.bucket.spec.size
        if self._past is self.known.content and len(self.known.before) == 1:
            (before,) = self.known.before
            if not isinstance(before, Sparse | Outer) and before is not old and len(before) == size:
                return before
        return self.ops.zeros(size, "float32", like)

    def _span_of(self, number: int) -> tuple[int, int]:
        """Return where a total's elements are in the bucket: the totals are one, or one for each tensor."""
        return self.bucket.spans[number] if len(self._reduced) > 1 else (0, self.bucket.spec.size)

    def _table(self, one: Filter, spread: float) -> Array:
        """Return the share that is handed over without momentum, by an element's age."""
        return self.ops.asarray(shares(one.factor, spread), self.setup.like)

    def _stamp(self, table: Array, number: int, index: Array) -> Array:
        """Note that elements of a total have arrived; return the entries of a table for their ages."""
        assert self._arrived is not None
        if self._stamped is None:
            self._stamped = self.setup.memory.second_buffer("arrived", self._arrived, "int8", self.ops)
        where = slice(*self._span_of(number))
        now = _stamp(self.setup.state.step + 1)
        return self.ops.stamp(table, self._arrived[where], now, index, self._stamped[where])

    # -- the next state -------------------------------------------------------------------------------------

    def new_state(self, unused: tuple[bool, ...]) -> MomentumState:
        """Return what is known after this step; ``unused`` tells which tensors' results no rank uses."""
        arrived = self._new_arrivals(unused)
        if self._new is None:
            return MomentumState(self._past, self.known.before, arrived, self._updates, unused)
        content = self._with_parts_of(self._new, self._past, unused) if unused else self._new
        return MomentumState(content, self._past, arrived, self._updates, unused)

    def paused_state(self) -> MomentumState:
        """Return what is known after a step in a pause, whose gradients the optimizer gets as they are."""
        return replace(self.known, content=self._past, updates=self._updates)

    def _new_arrivals(self, unused: tuple[bool, ...]) -> Array | None:
        """Return the step in which each element last arrived, this step included."""
        totals = self._totals()
        if self._arrived is None or not all(isinstance(total, Sparse | Shares) for total in totals):
            return None
        step = self.setup.state.step
        if self._stamped is None:  # no share depended on it in this step
            nothing = self.ops.asarray(np.ones(1, np.float32), self.setup.like)
            for number, total in enumerate(totals):
                self._stamp(nothing, number, self.ops.concat([part.index for part in _parts(total)]))
        arrived: Any = self._stamped
        for is_unused, (start, stop) in zip(unused, self.bucket.spans, strict=False):
            if is_unused:
                arrived[start:stop] = self._arrived[start:stop] + 1  # nothing waits where there is no gradient
        if step % RENEWED == 0:
            waits = _stamp(step + 1) - arrived
            arrived[waits > MOST] = _stamp(step + 1 - MOST)
        return arrived

    def _with_parts_of(self, pieces: Pieces, others: Pieces, chosen: Sequence[bool]) -> Pieces:
        """Return ``pieces`` with the parts of ``others`` for the chosen tensors of the bucket."""
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
    """Return the ranks' shares of a sparse total."""
    return list(total.each) if isinstance(total, Shares) else [total]


def _stamp(step: int) -> int:
    """Return a step modulo 2^8, as an int8."""
    return (step + 2**7) % 2**8 - 2**7


def _spread(totals: Sequence[Any]) -> float:
    """Return the number of ranks over the mean number of them that send an element together, in eighths.

    Of many elements, those with an index divisible by a power of two are counted.
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
