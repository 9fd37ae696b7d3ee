"""Hand reduced gradients over with the optimizer's momentum cancelled (``parts/momentum.py`` has the equations).

What the optimizer's momentum buffer contains, v, is kept from step to step in the form in which the method's result
came: sparse for a sparse method, as two factors for a matrix of low rank, dense otherwise. It is kept in *pieces*: one
for the whole bucket, or one for each tensor of a bucket whose method runs on each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.state import Piece, Pieces
from hvdcompress.method import Array, Sparse
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Outer, Shares
from hvdcompress.parts.momentum import Filter
from hvdcompress.plan import Bucket


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
    totals = [reduced.total for reduced in exchange.reduced or ()]
    uniform = all(other == filters[0] for other in filters) and not filters[0].decay
    if uniform and _is_compact(totals, exchange.bucket):
        return _compact(exchange, totals, factor, filters[0], past)
    return (_dense(exchange, totals, factor, filters, past, spare),)


def _compact(exchange: Exchange, totals: Sequence[Any], factor: float, one: Filter, past: Pieces) -> Pieces:
    """Hand over sparse or low-rank totals, of which no dense vector is kept."""
    ops, bucket, outs = exchange.ops, exchange.bucket, exchange.outs
    gain, entry = one.gain * factor, one.entry * exchange.scale
    old: Sequence[Any] = _in_form_of(totals, past, bucket, ops)
    kept: list[Piece] = []
    for number, total in enumerate(totals):
        if isinstance(total, Outer):
            ops.write(outs[number], total, gain / entry)
            if old:
                ops.subtract(outs[number], old[number], one.factor / entry)
            kept.append(_copied(total, gain))
            continue
        shares = list(total.each) if isinstance(total, Shares) else [total]
        kept.append(_end_to_end(shares, gain, ops))
        if old:
            index, values = old[number]
            shares.append(Sparse(index, values * np.float32(-one.factor / gain).item()))
        if len(totals) < len(outs):
            ops.write_parts(outs, Shares(shares), gain / entry, exchange.cleared)
        else:
            ops.write(outs[number], Shares(shares), gain / entry, exchange.cleared[number])
    if past and not old:
        whole = _whole(past, bucket, ops, outs[0])
        for out, (start, stop) in zip(outs, bucket.spans, strict=True):
            ops.subtract(out, whole[start:stop], one.factor / entry)
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
    old = _whole(past, bucket, ops, like) if past else None
    usable = len(spare) == 1 and not isinstance(spare[0], Sparse | Outer) and len(spare[0]) == size
    new: Array = spare[0] if usable and spare[0] is not old else ops.zeros(size, "float32", like)
    spans = bucket.spans if len(totals) > 1 else [(0, size)]
    for total, (start, stop) in zip(totals, spans, strict=True):
        ops.write(new[start:stop], total, factor)
    for number, (one, (start, stop)) in enumerate(zip(filters, bucket.spans, strict=True)):
        v, out = new[start:stop], exchange.outs[number]
        v *= np.float32(one.gain).item()
        if old is not None and one.decay:
            ops.subtract(v, old[start:stop], -one.decay)
        ops.write(out, v, 1.0 / (one.entry * scale))
        if old is not None:
            ops.subtract(out, old[start:stop], one.factor / (one.entry * scale))
    return new


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


def _whole(pieces: Pieces, bucket: Bucket, ops: Ops, like: Array) -> Array:
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
    dense, other = (_whole(each, bucket, ops, like) for each in (pieces, others))
    dense = _clone(dense)
    for choose, (start, stop) in zip(chosen, bucket.spans, strict=True):
        if choose:
            ops.write(dense[start:stop], other[start:stop], 1.0)
    return (dense,)
