"""A rank's state as plain data, and back: by tensor, so that it survives another bucketing.

A saved state is a dict: ``format``, ``plan``, ``world``, ``rank``, ``made_by`` (``origin.py``), ``fallback`` (what was
decided), ``metrics`` {metric: [least, greatest]}, and four tables by tensor: ``steps`` {name: n}, ``restarts`` {name:
[triggers, of which acted upon, step of the last]},
``merge`` {name: {slot: "sum" | "keep"}} and ``state`` {name: {slot: flat array}}. ``BucketState.momentum`` is
among the slots, in the form in which it is kept (``pieces.slots_of``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

import hvdcompress.ops
from hvdcompress.engine.bucket_state import BucketState, MomentumState, declared_by_members, declared_slots
from hvdcompress.engine.pieces import Piece, Pieces, by_tensor, slots_of
from hvdcompress.engine.pieces import whole as dense
from hvdcompress.method import Array, Slot, Sparse, TensorSpec
from hvdcompress.ops.vectors import Outer, dtype_name
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket

FORMAT = 1
ARRIVED = "momentum.arrived"  #: the slot of ``MomentumState.arrived``
TABLES = ("steps", "restarts", "merge", "state")  #: of a saved state, by tensor
Saved = Mapping[str, Any]
Ages = Mapping[str, tuple[int, ...]]  #: by tensor: its step, and its restarts if there are any
Copy = Callable[[list[Any]], Array]  #: saved arrays of a slot's parts -> one fresh array


def check_head(head: Any) -> None:
    """Refuse what is no saved state, arrays apart.

    Raises:
        ValueError: it is of another format, or a key is missing or not what it should be; it names the key.
    """
    if not isinstance(head, Mapping) or head.get("format") != FORMAT:
        found = head.get("format") if isinstance(head, Mapping) else head
        raise ValueError(f"the saved state is of format {found!r}, this is format {FORMAT}")
    for key, holds in _HOLDS.items():
        if not holds(head.get(key)):
            raise ValueError(f"the saved state's {key!r} is {head.get(key, 'missing')!r:.80}")


def check(saved: Saved) -> None:
    """Refuse what is no saved state; see :func:`check_head`.

    Raises:
        ValueError: as there; or arrays are not those that ``merge`` speaks of.
    """
    check_head(saved)
    slots = {name: slots.keys() for name, slots in saved.get("state", {}).items()}
    if slots != {name: slots.keys() for name, slots in saved["merge"].items()}:
        raise ValueError("the saved state's 'merge' and 'state' are of different arrays")


def check_origin(saved: Saved, world: int, rank: int) -> None:
    """Refuse a value that is not a saved state, and a state of another format, world or rank.

    Raises:
        ValueError: it says which.
    """
    check(saved)
    for key, mine in (("world", world), ("rank", rank)):
        if saved[key] != mine:
            hint = "; Compressor.load re-shards a folder with the states of all ranks" if key == "world" else ""
            raise ValueError(f"the saved state is of {key} {saved[key]!r}, this is {key} {mine!r}{hint}")


def ages(steps: Mapping[str, int], restarts: Mapping[str, Sequence[int]]) -> Ages:
    """Return where tensors are in their programs, without those at the start; only tensors of one age can be joined.

    Args:
        steps: steps done, by tensor.
        restarts: as in the table of a saved state.
    """
    there = {name for name, step in steps.items() if step} | restarts.keys()
    return {name: (steps.get(name, 0), *restarts.get(name, ())) for name in there}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_pair(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and all(isinstance(one, int | float) for one in value)


def _is_restart(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 3 and all(map(_is_count, value))


def _are_merges(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value.values()) <= {"sum", "keep"}


def _table(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(map(of, value.values()))


#: what a saved state must have besides its format and arrays
_HOLDS: dict[str, Callable[[Any], bool]] = {
    "plan": lambda value: isinstance(value, Mapping),
    "world": lambda value: _is_count(value) and value > 0,
    "rank": _is_count,
    "metrics": _table(_is_pair),
    "steps": _table(_is_count),
    "restarts": _table(_is_restart),
    "merge": _table(_are_merges),
}


def tables(states: Iterable[BucketState]) -> dict[str, dict[str, Any]]:
    """The four tables by tensor; arrays are fresh copies."""
    steps: dict[str, int] = {}
    restarts: dict[str, list[int]] = {}
    merge: dict[str, dict[str, str]] = {}
    arrays: dict[str, dict[str, Array]] = {}

    def keep(name: str, slot: str, array: Array, how: str) -> None:
        arrays.setdefault(name, {})[slot] = array.clone() if hasattr(array, "clone") else np.array(array)
        merge.setdefault(name, {})[slot] = how

    for state in states:
        bucket = state.bucket
        declared = declared_slots(state.bucket)
        for member in bucket.members:
            steps[member.name] = state.step
            if state.triggers:
                restarts[member.name] = [state.triggers, *state.restart]
        for slot, array in state.slots.items():
            for name, part in _parts(bucket, slot, array):
                keep(name, slot, part, declared[slot].merge if slot in declared else "sum")
        for member, piece in zip(bucket.members, by_tensor(state.momentum.content, bucket), strict=False):
            for slot, array in slots_of(piece).items():
                keep(member.name, slot, array, "keep")
        arrived = state.momentum.arrived
        if arrived is not None:
            for member, (start, stop) in zip(bucket.members, bucket.spans, strict=True):
                keep(member.name, ARRIVED, arrived[start:stop], "keep")
        for member, own, known in zip(bucket.members, state.members, declared_by_members(bucket), strict=False):
            for slot, array in own.items():
                keep(member.name, slot, array, known[slot].merge)
    return {"steps": steps, "restarts": restarts, "merge": merge, "state": arrays}


def _parts(bucket: Bucket, slot: str, array: Array) -> Iterable[tuple[str, Array]]:
    """A slot's array by tensor: a slot of the gradient's own shape is cut, another belongs to the whole bucket."""
    if slot not in feedback.BUFFERED:
        return [(bucket.spec.name, array)]
    places = zip(bucket.members, bucket.spans, strict=True)
    return [(member.name, array[start:stop]) for member, (start, stop) in places]


def restored(saved: Saved, bucket: Bucket, copy: Copy, whole: bool = True) -> BucketState | None:
    """The bucket's state from a saved one; None if it has none of its tensors.

    What the bucket's methods do not use of a residual is kept in the state, for when one does.

    Args:
        saved: it.
        bucket: whose tensors are at one step.
        copy: makes a fresh array of a slot's saved parts.
        whole: All of its tensors and slots must be there. Otherwise zeros take the place of what is not, as of tensors
            that have not come, or that were too small to be compressed.

    Raises:
        ValueError: tensors are at different steps; or a slot is missing, of another size or dtype, or has an Inf or a
            NaN.
    """
    members = [member.name for member in bucket.members]
    if not any(name in saved["steps"] for name in members):
        return None
    steps = {saved["steps"].get(name, None if whole else 0) for name in members}
    if len(steps) > 1:
        raise ValueError(f"the saved state has the tensors of bucket {bucket.spec.name!r} at different steps")

    def slots(declared: Mapping[str, Slot], whose: str) -> dict[str, Array]:
        found = {}
        for slot, about in declared.items():
            names = members if slot in feedback.BUFFERED else [whose]
            parts = [saved["state"].get(name, {}).get(slot) for name in names]
            if whole and any(part is None for part in parts):
                raise ValueError(f"the saved state lacks {slot!r} of {', '.join(names)}")
            sizes = [member.size for member in bucket.members] if slot in feedback.BUFFERED else [prod(about.shape)]
            parts = [
                np.zeros(size, about.dtype) if part is None else part for part, size in zip(parts, sizes, strict=True)
            ]
            for name, part, size in zip(names, parts, sizes, strict=True):
                _check_part(f"{slot!r} of {name!r}", part, size, about.dtype)
            found[slot] = copy(parts)
        return found

    own = tuple(slots(each, name) for each, name in zip(declared_by_members(bucket), members, strict=False))
    triggers, *restart = saved["restarts"].get(members[0], (0, 0, 0))
    declared = declared_slots(bucket)
    kept = {slot for name in members for slot in saved["state"].get(name, {}) if slot in feedback.BUFFERED}
    whole = whole and not kept - declared.keys()  # what is kept besides may be some tensors' only
    return BucketState(
        bucket,
        slots(declared | {slot: Slot((bucket.spec.size,)) for slot in kept}, bucket.spec.name),
        own,
        MomentumState(_momentum(saved, bucket, copy, whole), arrived=_arrived(saved, bucket, copy)),
        step=steps.pop(),
        triggers=triggers,
        restart=(restart[0], restart[1]),
    )


def _arrived(saved: Saved, bucket: Bucket, copy: Copy) -> Array | None:
    """``MomentumState.arrived`` from a saved state; None if that has none of some of the bucket's tensors."""
    parts = [saved["state"].get(member.name, {}).get(ARRIVED) for member in bucket.members]
    if any(part is None for part in parts):
        return None
    for member, part in zip(bucket.members, parts, strict=True):
        _check_part(f"{ARRIVED!r} of {member.name!r}", part, member.size, "int8")
    return copy(parts)


def _momentum(saved: Saved, bucket: Bucket, copy: Copy, whole: bool) -> Pieces:
    """``MomentumState.content`` from a saved state.

    Raises:
        ValueError: an array is malformed; or, with ``whole``, it is kept for some of the bucket's tensors only, or in
            several forms.
    """
    names = set(slots_of(Sparse(0, 0))) | set(slots_of(Outer(0, 0, 1))) | set(slots_of(0))
    found = [saved["state"].get(member.name, {}) for member in bucket.members]
    kept = [{slot: slots[slot] for slot in sorted(names & slots.keys())} for slots in found]
    if not any(kept):
        return ()
    if any(slots.keys() != kept[0].keys() for slots in kept):
        if whole:
            raise ValueError(f"the saved state has the momentum of bucket {bucket.spec.name!r} in several forms")
        nothing = Sparse(np.zeros(0, np.int32), np.zeros(0, np.float32))
        forms = [_piece(m, slots, copy) if slots else nothing for m, slots in zip(bucket.members, kept, strict=True)]
        return (dense(tuple(forms), bucket, hvdcompress.ops.fast, forms[0]),)
    pieces = [_piece(member, slots, copy) for member, slots in zip(bucket.members, kept, strict=True)]
    return tuple(pieces) if isinstance(pieces[0], Sparse | Outer) else (copy(pieces),)


def _piece(member: TensorSpec, slots: Mapping[str, Any], copy: Copy) -> Piece:
    """One tensor's part of ``MomentumState.content``."""
    whose = f"momentum of {member.name!r}"
    if "momentum" in slots:
        _check_part(whose, slots["momentum"], member.size, "float32")
        return slots["momentum"]
    if len(slots) != 2:
        raise ValueError(f"the saved {whose} lacks a part: it has {', '.join(slots)}")
    first, second = slots.values()
    if "momentum.left" in slots:
        terms = math.isqrt(len(first) * len(second) // max(member.size, 1))
        if not terms or terms * terms * member.size != len(first) * len(second):
            raise ValueError(f"the saved {whose} has factors of {len(first)} and {len(second)} elements")
        _check_part(whose, first, len(first), "float32")
        _check_part(whose, second, len(second), "float32")
        return Outer(copy([first]), copy([second]), terms)
    _check_part(whose, second, len(first), "float32")
    if dtype_name(first) not in ("int32", "int64"):
        raise ValueError(f"the saved {whose} has indices of {dtype_name(first)}")
    if len(first) and not (int(first.min()) >= 0 and int(first.max()) < member.size):
        raise ValueError(f"the saved {whose} has indices outside of its {member.size} elements")
    return Sparse(copy([first]), copy([second]))


def _check_part(what: str, part: Any, size: int, dtype: str) -> None:
    """Refuse a saved array that is not what a slot declares: it would be in every gradient from then on."""
    if len(part) != size:
        raise ValueError(f"{what} has {len(part)} elements, not {size}")
    if (found := dtype_name(part)) != dtype:
        raise ValueError(f"{what} is {found}, not {dtype}")
    if not bool((part.isfinite() if hasattr(part, "isfinite") else np.isfinite(part)).all()):
        raise ValueError(f"{what} has an Inf or a NaN")


def without(saved: Saved, buckets: Iterable[Bucket]) -> dict[str, Any] | None:
    """What a saved state has besides these buckets; None if that is nothing."""
    gone = {name for bucket in buckets for name in (bucket.spec.name, *(member.name for member in bucket.members))}
    left = {table: {name: entry for name, entry in saved[table].items() if name not in gone} for table in TABLES}
    return {**saved, **left} if left["steps"] else None


def renamed(saved: Saved, names: Sequence[str]) -> Saved:
    """Return a saved state under these tensors' names, where they differ by what is before a slash.

    Keras puts the model's name in front of a variable's path, or leaves it out.
    """
    mine = saved["steps"].keys()
    new: dict[str, str] = {}
    for old in mine - set(names):
        found = [name for name in set(names) - mine if name.endswith(f"/{old}") or old.endswith(f"/{name}")]
        if len(found) == 1:
            new[old] = found[0]
    if len(set(new.values())) < len(new):  # one tensor for two
        return saved
    return {**saved, **{table: {new.get(name, name): one for name, one in saved[table].items()} for table in TABLES}}


def reshard(saved: Sequence[Saved], world: int) -> list[dict[str, Any]]:
    """The saved states of all ranks, made into states for ``world`` ranks.

    Each new rank gets an equal part of what is summed, so that no gradient is lost or counted twice.

    Raises:
        ValueError: a rank's state is missing, or they are of different steps or tensors.
    """
    first = saved[0]
    ranks = sorted(one["rank"] for one in saved)
    if ranks != list(range(first["world"])):
        raise ValueError(f"states of all {first['world']} ranks are needed, these are of ranks {ranks}")
    for one in saved:
        for what in ("steps", "merge"):
            if one[what] != first[what]:
                raise ValueError(f"the states of ranks {first['rank']} and {one['rank']} differ in {what!r}")

    def merged(name: str, slot: str) -> Array:
        arrays = [one["state"][name][slot] for one in saved]
        return sum(arrays) / world if first["merge"][name][slot] == "sum" else arrays[0]

    state = {name: {slot: merged(name, slot) for slot in slots} for name, slots in first["state"].items()}
    return [{**first, "world": world, "rank": rank, "state": state} for rank in range(world)]
