"""Hand reduced gradients over, the optimizer's momentum adapted (``parts/momentum.py`` has the equations).

What the optimizer's momentum buffer contains of gradients without momentum, v, is kept from step to step in the form in
which the method's result came: sparse for a sparse method, as two factors for a matrix of low rank, dense otherwise. It
is kept in *pieces*: one for the whole bucket, or one for each tensor of a bucket whose method runs on each tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.state import Before, Piece, Pieces
from hvdcompress.method import Array, Sparse
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Outer, Shares
from hvdcompress.parts.momentum import MOST, Filter, shares
from hvdcompress.plan import Bucket

RENEWED = 127 - MOST  #: steps between those in which old stamps are renewed, as stamps repeat after 256 steps
COUNTED = 4096  #: elements; of more, a sample tells how many of them ranks send together


def hand_over(exchange: Exchange, factor: float, filters: Sequence[Filter], past: Pieces, spare: Pieces) -> Pieces:
    """Write what the optimizer is to be given into the exchange's ``outs``.

    Args:
        exchange: one whose method is done.
        factor: what the total is multiplied by to get the reduced gradient, the loss scale apart.
        filters: the coefficients of each member of the bucket.
        past: what the optimizer's buffer contains; empty for nothing.
        spare: pieces that are not needed any more; a dense one is written over.

    Returns:
        What the buffer contains once the optimizer has taken this step.
    """
    totals = _totals(exchange)
    if exchange.state.arrived is None and any(one.share is None for one in filters):
        exchange.state.arrived = exchange.ops.zeros(exchange.bucket.spec.size, "int8", exchange.outs[0])
        exchange.ops.fill(exchange.state.arrived, _stamp(exchange.state.step))
    uniform = all(other == filters[0] for other in filters) and not filters[0].decay
    if uniform and _is_compact(totals, exchange.bucket):
        return _compact(exchange, totals, factor, filters[0], past)
    return (_dense(exchange, totals, factor, filters, past, spare),)


def _compact(exchange: Exchange, totals: Sequence[Any], factor: float, one: Filter, past: Pieces) -> Pieces:
    """Hand over sparse or low-rank totals, of which no dense vector is kept."""
    ops, bucket, outs = exchange.ops, exchange.bucket, exchange.outs
    as_it_is, gain, lost = factor / exchange.scale, one.gain * factor, one.factor / (one.entry * exchange.scale)
    more = one.gain / one.entry - 1.0  # what is handed over without momentum has all of its effect at once
    old: Sequence[Any] = _in_form_of(totals, past, bucket, ops)
    spread = _spread(totals) if one.share is None else 1.0
    kept: list[Piece] = []
    for number, total in enumerate(totals):
        if isinstance(total, Outer):
            assert one.share is not None
            ops.write(outs[number], total, as_it_is * (1.0 + one.share * more))
            if old:
                ops.subtract(outs[number], old[number], lost)
            kept.append(_copied(total, gain * one.share))
            continue
        given, cancelled = [], []
        for index, values in _parts(total):
            share = one.share
            if share is None:
                share = _shares(exchange, one, spread, _span_of(number, totals, bucket), index)
            given.append(Sparse(index, values * (share * _rounded(more) + 1.0)))
            cancelled.append(Sparse(index, values * share))
        kept.append(_end_to_end(cancelled, gain, ops))
        if old:
            index, values = old[number]
            given.append(Sparse(index, values * _rounded(-lost / as_it_is)))
        if len(totals) < len(outs):
            ops.write_parts(outs, Shares(given), as_it_is, exchange.cleared)
        else:
            ops.write(outs[number], Shares(given), as_it_is, exchange.cleared[number])
    if past and not old:
        vector = whole(past, bucket, ops, outs[0])
        for out, (start, stop) in zip(outs, bucket.spans, strict=True):
            ops.subtract(out, vector[start:stop], lost)
    return tuple(kept)


def _dense(
    exchange: Exchange,
    totals: Sequence[Any],
    factor: float,
    filters: Sequence[Filter],
    past: Pieces,
    spare: Pieces,
) -> Array:
    """Hand over totals of any form."""
    ops, bucket, scale = exchange.ops, exchange.bucket, exchange.scale
    like, size = exchange.outs[0], bucket.spec.size
    old = whole(past, bucket, ops, like) if past else None
    usable = len(spare) == 1 and not isinstance(spare[0], Sparse | Outer) and len(spare[0]) == size
    new: Array = spare[0] if usable and spare[0] is not old else ops.zeros(size, "float32", like)
    for number, total in enumerate(totals):
        ops.write(new[slice(*_span_of(number, totals, bucket))], total, factor)
    spread = _spread(totals) if any(one.share is None for one in filters) else 1.0
    for number, (one, (start, stop)) in enumerate(zip(filters, bucket.spans, strict=True)):
        v, out = new[start:stop], exchange.outs[number]
        share: Any = one.share
        if share is None:
            share = _shares(exchange, one, spread, (start, stop))
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


# -- when elements arrived ---------------------------------------------------------------------------------------


def note_arrivals(exchange: Exchange, undo: Before, unused: Collection[str] = ()) -> None:
    """Keep in ``State.arrived`` which elements this exchange brought; ``unused`` tensors had no gradient on any rank.

    What was there before is added to ``undo``.
    """
    state, bucket, totals = exchange.state, exchange.bucket, _totals(exchange)
    ops = exchange.ops
    if state.arrived is None or not all(isinstance(total, Sparse | Shares) for total in totals):
        state.arrived = None
        return
    spans = [span for member, span in zip(bucket.members, bucket.spans, strict=True) if member.name in unused]
    before = [_clone(state.arrived[slice(*span)]) for span in spans]
    now = _stamp(state.step + 1)
    for number, total in enumerate(totals):
        where = slice(*_span_of(number, totals, bucket))
        arrived = state.arrived[where]
        for part in _parts(total):
            index = _clone(part.index)  # its memory is used again
            undo.stamps.append((where, index, arrived[index]))
            ops.set_at(arrived, part.index, now)
    for span, content in zip(spans, before, strict=True):
        undo.stamps.append((slice(*span), slice(None), content))
        state.arrived[slice(*span)] = content + 1  # nothing waits where there is no gradient
    if state.step % RENEWED == 0:
        undo.stamps.append((slice(None), slice(None), _clone(state.arrived)))
        waits = now - state.arrived
        state.arrived[waits > MOST] = _stamp(state.step + 1 - MOST)


def _totals(exchange: Exchange) -> list[Any]:
    return [reduced.total for reduced in exchange.reduced or ()]


def _parts(total: Any) -> list[Sparse]:
    """Return the ranks' shares of a sparse total."""
    return list(total.each) if isinstance(total, Shares) else [total]


def _span_of(number: int, totals: Sequence[Any], bucket: Bucket) -> tuple[int, int]:
    """Return where a total's elements are in the bucket: the totals are one, or one for each tensor."""
    return bucket.spans[number] if len(totals) > 1 else (0, bucket.spec.size)


def _stamp(step: int) -> int:
    """Return a step modulo 2^8, as an int8."""
    return (step + 2**7) % 2**8 - 2**7


def _shares(exchange: Exchange, one: Filter, spread: float, span: tuple[int, int], index: Array | None = None) -> Array:
    """Return the shares that are handed over without momentum, of a span's elements or of those of ``index`` in it."""
    ops, state = exchange.ops, exchange.state
    assert state.arrived is not None
    table = ops.asarray(shares(one.factor, spread), exchange.outs[0])
    return ops.take_by_age(table, state.arrived[slice(*span)], _stamp(state.step + 1), index)


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
        sent, different = sent + len(index), different + len(np.unique(index))
    return max(1.0, round(8 * ranks * different / sent) / 8) if sent else 1.0


def _on_host(index: Array) -> np.ndarray[Any, Any]:
    return index if isinstance(index, np.ndarray) else index.cpu().numpy()


def _rounded(factor: float) -> float:
    return np.float32(factor).item()


# -- memory ------------------------------------------------------------------------------------------------------


def scaled(pieces: Pieces, factor: float) -> Pieces:
    """Return ``factor`` times what is kept, in memory of its own."""
    number: Any = np.float32(factor).item()
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Outer):
            found.append(piece._replace(left=piece.left * number))
        else:
            found.append(piece._replace(values=piece.values * number) if isinstance(piece, Sparse) else piece * number)
    return tuple(found)


def _copied(total: Outer, factor: float) -> Outer:
    """Return ``factor`` times a matrix of low rank, in memory of its own."""
    left: Any = total.left
    return Outer(left * np.float32(total.scale * factor).item(), _clone(total.right), total.terms)


def _end_to_end(shares: Sequence[Sparse], factor: float, ops: Ops) -> Sparse:
    """Return ``factor`` times a sum of sparse vectors as one, in memory of its own: indices may occur several times."""
    values = ops.concat([share.values for share in shares]) * np.float32(factor).item()
    index = ops.concat([share.index for share in shares])
    return Sparse(_clone(index) if len(shares) == 1 else index, values)


def _clone(array: Array) -> Array:
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


# -- forms of what is kept ---------------------------------------------------------------------------------------


def _is_compact(totals: Sequence[Any], bucket: Bucket) -> bool:
    """Return whether all totals are sparse, or all are matrices of one tensor each."""
    if isinstance(totals[0], Outer):
        return all(isinstance(total, Outer) for total in totals) and len(totals) == len(bucket.members)
    return all(isinstance(total, Sparse | Shares) for total in totals)


def _in_form_of(totals: Sequence[Any], past: Pieces, bucket: Bucket, ops: Ops) -> Pieces:
    """Return the past in the form of compact totals; nothing if it has another form."""
    form = Outer if isinstance(totals[0], Outer) else Sparse
    if not all(isinstance(piece, form) for piece in past):
        return ()
    if len(past) in (0, len(totals)):
        return past
    return (_joined(past, bucket, ops),) if len(totals) == 1 else by_tensor(past, bucket)


def by_tensor(pieces: Pieces, bucket: Bucket) -> Pieces:
    """Return one piece for each tensor, of pieces of any form; views of dense ones."""
    if len(pieces) in (0, len(bucket.members)):
        return pieces
    (piece,) = pieces
    return _split(piece, bucket) if isinstance(piece, Sparse) else tuple(piece[a:b] for a, b in bucket.spans)


def _split(piece: Sparse, bucket: Bucket) -> Pieces:
    found = []
    for start, stop in bucket.spans:
        inside = (piece.index >= start) & (piece.index < stop)
        found.append(Sparse(piece.index[inside] - start, piece.values[inside]))
    return tuple(found)


def _joined(pieces: Sequence[Any], bucket: Bucket, ops: Ops) -> Sparse:
    starts = [start for start, _ in bucket.spans]
    index = ops.concat([piece.index + start for piece, start in zip(pieces, starts, strict=True)])
    return Sparse(index, ops.concat([piece.values for piece in pieces]))


def whole(pieces: Pieces, bucket: Bucket, ops: Ops, like: Array) -> Array:
    """Return pieces of any form as one dense vector."""
    if len(pieces) == 1 and not isinstance(pieces[0], Sparse | Outer):
        return pieces[0]
    dense = ops.zeros(bucket.spec.size, "float32", like)
    spans = bucket.spans if len(pieces) > 1 else [(0, bucket.spec.size)] * len(pieces)
    for piece, (start, stop) in zip(pieces, spans, strict=True):
        ops.write(dense[start:stop], piece, 1.0)
    return dense


def with_parts_of(
    pieces: Pieces, others: Pieces, chosen: Sequence[bool], bucket: Bucket, ops: Ops, like: Array
) -> Pieces:
    """Return ``pieces`` with the parts of ``others`` for the chosen tensors of the bucket."""
    if all(chosen):
        return others
    if not pieces and not others:
        return ()
    dense, other = (whole(each, bucket, ops, like) for each in (pieces, others))
    dense = _clone(dense)
    for choose, (start, stop) in zip(chosen, bucket.spans, strict=True):
        if choose:
            ops.write(dense[start:stop], other[start:stop], 1.0)
    return (dense,)
