"""Storage of a bucket's vector in the form of the method's result, so that a sparse vector stays sparse.

The vector is stored in pieces: one for the whole bucket, or one per tensor if the method runs on each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdcompress.method import Array, Sparse
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Outer, Shares
from hvdcompress.plan import Bucket

Piece = Sparse | Outer | Array  #: sparse for a sparse method, factors for a low-rank matrix, otherwise dense
Pieces = tuple[Piece, ...]  #: one piece for the whole bucket, or one per tensor


def slots_of(piece: Piece) -> dict[str, Array]:
    """Return {name in a saved state: array} of a piece of ``MomentumState.content``."""
    if isinstance(piece, Sparse):
        return {"momentum.index": piece.index, "momentum.values": piece.values}
    if isinstance(piece, Outer):
        return {"momentum.left": piece.left, "momentum.right": piece.right}
    return {"momentum": piece}


def scaled(pieces: Pieces, factor: float) -> Pieces:
    """Return ``factor`` times the pieces, in new memory."""
    number: Any = np.float32(factor).item()
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Outer):
            found.append(piece._replace(left=piece.left * number))
        else:
            found.append(piece._replace(values=piece.values * number) if isinstance(piece, Sparse) else piece * number)
    return tuple(found)


def copied(total: Outer, factor: float) -> Outer:
    """Return ``factor`` times a low-rank matrix, in new memory."""
    return Outer(copied_left(total, factor), clone(total.right), total.terms)


def copied_left(total: Outer, factor: float) -> Array:
    """Return the left factor multiplied by ``factor`` and by the matrix's scale."""
    left: Any = total.left
    return left * np.float32(total.scale * factor).item()


def combined(first: Outer, factor: float, second: Outer, other: float, ops: Ops) -> Outer:
    """Return factor · first + other · second as one low-rank matrix, which can be written in one pass.

    Its rank is the sum of both ranks. If the basis of ``second`` is a linear combination of that of ``first``, the rank
    of ``first`` is enough; this happens with ACP-SGD, whose steps start from a factor of the step before.
    """
    # ``basis`` is the orthonormal factor, ``mine`` and ``rows`` are the coordinates with respect to it
    is_right = first.basis == "right"
    basis, mine = (first.right, first.left) if is_right else (first.left, first.right)
    theirs, rows = (second.right, second.left) if is_right else (second.left, second.right)
    weights = ops.coordinates(theirs, basis, first.terms) if first.basis else None
    # The bases differ, so the sum needs both of them
    if weights is None:
        left = ops.concat([copied_left(first, factor), copied_left(second, other)])
        return Outer(left, ops.concat([first.right, second.right]), first.terms + second.terms)
    added = ops.combine(weights * (second.scale * other), rows, second.terms, centre=False)
    total = (mine * (first.scale * factor) + added).astype(np.float32)
    return Outer(total, basis, first.terms) if is_right else Outer(basis, total, first.terms)


def concatenated(shares: Sequence[Sparse], ops: Ops) -> Sparse:
    """Return the sum of sparse vectors as one sparse vector in new memory. Indices may occur several times."""
    if len(shares) == 1:
        return Sparse(clone(shares[0].index), clone(shares[0].values))
    return Sparse(ops.concat([share.index for share in shares]), ops.concat([share.values for share in shares]))


def clone(array: Array) -> Array:
    """Return a copy of an array."""
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


def is_compact(totals: Sequence[Any], bucket: Bucket) -> bool:
    """Return whether all totals are sparse, or all are low-rank matrices of one tensor each."""
    if isinstance(totals[0], Outer):
        return all(isinstance(total, Outer) for total in totals) and len(totals) == len(bucket.members)
    return all(isinstance(total, Sparse | Shares) for total in totals)


def in_same_form(totals: Sequence[Any], past: Pieces, bucket: Bucket, ops: Ops) -> Pieces:
    """Return past pieces in the form of compact totals, or nothing if they have a different form."""
    form = Outer if isinstance(totals[0], Outer) else Sparse
    if not all(isinstance(piece, form) for piece in past):
        return ()
    if len(past) in (0, len(totals)):
        return past
    return (_joined(past, bucket, ops),) if len(totals) == 1 else by_tensor(past, bucket)


def by_tensor(pieces: Pieces, bucket: Bucket) -> Pieces:
    """Return one piece per tensor. Dense pieces are views."""
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


def to_dense(pieces: Pieces, bucket: Bucket, ops: Ops, like: Array) -> Array:
    """Return pieces of any form as one dense float32 vector of the bucket."""
    if len(pieces) == 1 and not isinstance(pieces[0], Sparse | Outer):
        return pieces[0]
    dense = ops.zeros(bucket.spec.size, "float32", like)
    spans = bucket.spans if len(pieces) > 1 else [(0, bucket.spec.size)] * len(pieces)
    for piece, (start, stop) in zip(pieces, spans, strict=True):
        ops.write(dense[start:stop], piece, 1.0)
    return dense
