"""Conversion of a rank's state to plain data and back, by tensor, so that it survives a different bucketing.

A saved state is a dict with ``format``, ``plan``, ``world``, ``rank``, ``made_by`` (:func:`made_by`), ``fallback`` (the
decision), ``metrics`` {metric: [least, greatest]}, with two levels ``nodes``
({num_nodes, local_size, owners: {name of a tensor or bucket: local rank that has its slots}}), ``resharded`` if
:func:`reshard` made it, ``kind`` if it is not of a Compressor alone (``local_steps/state.py``), and four tables by
tensor: ``steps`` {name: n}, ``restarts`` {name: [triggers, triggers that took effect, step of the last]}, ``merge``
{name: {slot: "sum" | "keep"}} and ``state`` {name: {slot: flat array}}. The slots include ``BucketState.arrived``.
"""

from __future__ import annotations

import json
import platform
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Len
from pydantic import BaseModel, NonNegativeInt, PositiveInt, ValidationError

from hvdcompress import __version__
from hvdcompress.engine.bucket_state import BucketState, declared_by_members, declared_slots
from hvdcompress.engine.nodes import Nodes
from hvdcompress.method import Array, Slot
from hvdcompress.ops.vectors import dtype_name
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket, Plan
from hvdcompress.plan.reading import PLAN_KEYS, RULE_KEYS

FORMAT = 1
MADE_BY = "made_by"  #: the key of a saved state
#: packages whose version is noted where they are in use
PACKAGES = ("numpy", "numba", "torch", "tensorflow", "horovod", "mpi4py")
#: plan keys that change neither what is sent nor what comes of it
IDLE = {"watchdog", "warn_after", "end_after", "verify_every"}
ARRIVED = "momentum.arrived"  #: slot name of ``BucketState.arrived``
TABLES = ("steps", "restarts", "merge", "state")  #: the tables by tensor in a saved state
Saved = Mapping[str, Any]
NOTHING: Saved = {table: {} for table in TABLES}  #: a saved state without tensors
Ages = Mapping[str, tuple[int, ...]]  #: {tensor name: its step, followed by its restarts if there are any}
Copy = Callable[[list[Any]], Array]  #: concatenates the saved arrays of a slot's parts into a new array


class _Nodes(BaseModel):
    num_nodes: PositiveInt
    local_size: PositiveInt
    owners: dict[str, NonNegativeInt]


class _MadeBy(BaseModel):
    versions: dict[str, str]


class _Head(BaseModel):
    """The keys of a saved state without its arrays."""

    plan: dict[Any, Any]
    world: PositiveInt
    rank: NonNegativeInt
    made_by: _MadeBy
    metrics: dict[str, Annotated[list[float], Len(2, 2)]]
    steps: dict[str, NonNegativeInt]
    restarts: dict[str, Annotated[list[NonNegativeInt], Len(3, 3)]]
    merge: dict[str, dict[str, Literal["sum", "keep"]]]
    nodes: _Nodes | None = None


def check_head(head: Any) -> None:
    """Raise an error unless a value is a saved state; arrays are not checked.

    Raises:
        ValueError: the format is unknown, or a key is missing or has a wrong value. The message names the key.
    """
    if not isinstance(head, Mapping) or head.get("format") != FORMAT:
        found = head.get("format") if isinstance(head, Mapping) else head
        raise ValueError(
            f"the saved state has format {found!r}; this version reads format {FORMAT}. Load it with the version of "
            "hvdcompress that saved it, or start without it"
        )
    try:
        nodes = _Head.model_validate(head, strict=True).nodes
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][1:]))
        raise ValueError(f"the saved state's {first['loc'][0]!r} is invalid: {place} {first['msg']}") from None
    if nodes and (
        nodes.num_nodes * nodes.local_size != head["world"] or max(nodes.owners.values(), default=0) >= nodes.local_size
    ):
        raise ValueError(f"the saved state's 'nodes' are {nodes}, but 'world' is {head['world']}")


def check(saved: Saved) -> None:
    """Raise an error unless a value is a saved state; see :func:`check_head`.

    Raises:
        ValueError: as for :func:`check_head`, or "merge" and "state" have different arrays.
    """
    check_head(saved)
    slots = {name: slots.keys() for name, slots in saved.get("state", {}).items()}
    if slots != {name: slots.keys() for name, slots in saved["merge"].items()}:
        raise ValueError("the saved state's 'merge' and 'state' have different arrays")


def check_origin(saved: Saved, world_size: int, rank: int, nodes: Nodes | None = None) -> None:
    """Raise an error unless a saved state is of this rank, number of ranks and number of nodes.

    Raises:
        ValueError: number of ranks, rank or nodes do not match. The message says which.
    """
    for key, before, here in (
        ("world", saved["world"], world_size),
        ("rank", saved["rank"], rank),
        ("nodes", nodes_of(saved) or "one level", nodes or "one level"),
    ):
        if before != here:
            raise ValueError(
                f"the saved state has {key} {before}, but {key} is {here} here; Compressor.load() re-shards a folder "
                "with the states of all ranks"
            )


def nodes_of(saved: Saved) -> Nodes | None:
    """Return the nodes of a saved state; None for one level."""
    found = saved.get("nodes")
    return Nodes(found["num_nodes"], found["local_size"]) if found else None


def ages(steps: Mapping[str, int], restarts: Mapping[str, Sequence[int]]) -> Ages:
    """Return the progress of each tensor, without tensors at step 0. Only tensors of equal age may share a bucket.

    Args:
        steps: {tensor name: steps done}.
        restarts: {tensor name: restarts}, as in the table of a saved state.
    """
    there = {name for name, step in steps.items() if step} | restarts.keys()
    return {name: (steps.get(name, 0), *restarts.get(name, ())) for name in there}


def tables(states: Iterable[BucketState]) -> dict[str, dict[str, Any]]:
    """Return the four tables by tensor of these states. Arrays are copied."""
    steps: dict[str, int] = {}
    restarts: dict[str, list[int]] = {}
    merge: dict[str, dict[str, str]] = {}
    arrays: dict[str, dict[str, Array]] = {}

    def keep(name: str, slot: str, array: Array, how: str) -> None:
        arrays.setdefault(name, {})[slot] = array.clone() if hasattr(array, "clone") else np.array(array)
        merge.setdefault(name, {})[slot] = how

    for state in states:
        bucket = state.bucket
        # Tables are by tensor and not by bucket, because a later run may group tensors differently
        declared = {**declared_slots(bucket), ARRIVED: Slot((bucket.spec.size,), "int8", merge="keep")}
        for member in bucket.members:
            steps[member.name] = state.step
            if state.triggers:
                restarts[member.name] = [state.triggers, *state.restart]
        slots = state.slots if state.arrived is None else {**state.slots, ARRIVED: state.arrived}
        for slot, array in slots.items():
            how = declared[slot].merge if slot in declared else "sum"
            if slot in (*feedback.BUFFERED, ARRIVED):  # it has the shape of the gradient
                for member, (start, stop) in zip(bucket.members, bucket.spans, strict=True):
                    keep(member.name, slot, array[start:stop], how)
            else:
                keep(bucket.spec.name, slot, array, how)
        for name, known, own in state.tables()[1:]:
            for slot, array in own.items():
                keep(name, slot, array, known[slot].merge)
    return {"steps": steps, "restarts": restarts, "merge": merge, "state": arrays}


def progress(saved: Saved, bucket: Bucket, copy: Copy) -> BucketState | None:
    """Build the state of a bucket that another rank of the node exchanges: its progress, without slots.

    Return None if the saved state has none of its tensors.
    """
    members = [member.name for member in bucket.members if member.name in saved["steps"]]
    if not members:
        return None
    triggers, *restart = saved["restarts"].get(members[0], (0, 0, 0))
    step = saved["steps"][members[0]]
    arrived = None
    if all(ARRIVED in saved["state"].get(member.name, {}) for member in bucket.members):
        arrived = copy([_part(saved, member.name, ARRIVED, member.size, "int8") for member in bucket.members])
    return BucketState(bucket, {}, (), arrived, step, triggers, (restart[0], restart[1]))


def restored(saved: Saved, bucket: Bucket, copy: Copy, whole: bool = True) -> BucketState | None:
    """Build the state of a bucket from a saved state. Return None if the saved state has none of its tensors.

    Saved residuals are kept even if the present methods of the bucket do not use them, because a later method may.

    Args:
        saved: the saved state.
        bucket: the bucket; its tensors must be at the same step.
        copy: concatenates the saved parts of a slot into a new array.
        whole: whether all tensors and slots must be present. Otherwise missing ones become zeros: tensors may not have
            appeared before saving, or may have been too small to be compressed.

    Raises:
        ValueError: tensors are at different steps; or a slot is missing, has a wrong size or dtype, or has an Inf or a
            NaN.
    """
    state = progress(saved, bucket, copy)
    if state is None:
        return None
    members = [member.name for member in bucket.members]
    steps = {saved["steps"].get(name, None if whole else 0) for name in members}
    if len(steps) > 1:
        raise ValueError(f"the saved state has the tensors of bucket {bucket.spec.name!r} at different steps")

    def slots(declared: Mapping[str, Slot], whose: str) -> dict[str, Array]:
        found = {}
        for slot, about in declared.items():
            sizes = {whose: prod(about.shape)}
            if slot in feedback.BUFFERED:
                sizes = {member.name: member.size for member in bucket.members}
            found[slot] = copy([_part(saved, name, slot, size, about.dtype, whole) for name, size in sizes.items()])
        return found

    own = tuple(slots(each, name) for each, name in zip(declared_by_members(bucket), members, strict=False))
    declared = declared_slots(bucket)
    kept = {slot for name in members for slot in saved["state"].get(name, {}) if slot in feedback.BUFFERED}
    # Residuals that no present method declares may exist for some tensors only
    whole = whole and not kept - declared.keys()
    declared |= {slot: Slot((bucket.spec.size,)) for slot in kept}
    return replace(state, slots=slots(declared, bucket.spec.name), members=own)


def _part(saved: Saved, name: str, slot: str, size: int, dtype: str, must_exist: bool = True) -> Any:
    """Return a saved array; zeros if there is none and none must exist.

    Raises:
        ValueError: the array is missing, has a wrong size or dtype, or has an Inf or a NaN, which would spoil every
            later gradient.
    """
    part = saved["state"].get(name, {}).get(slot)
    if part is None and not must_exist:
        return np.zeros(size, dtype)
    if part is None:
        raise ValueError(f"the saved state lacks {slot!r} of {name}")
    if len(part) != size:
        raise ValueError(f"the saved {slot!r} of {name!r} has {len(part)} elements, expected {size}")
    if (found := dtype_name(part)) != dtype:
        raise ValueError(f"the saved {slot!r} of {name!r} has dtype {found}, expected {dtype}")
    if not bool((part.isfinite() if hasattr(part, "isfinite") else np.isfinite(part)).all()):
        raise ValueError(f"the saved {slot!r} of {name!r} contains an Inf or a NaN")
    return part


def without_buckets(saved: Saved, buckets: Iterable[Bucket]) -> Saved:
    """Return a saved state without the tensors of these buckets."""
    gone = {name for bucket in buckets for name in (bucket.spec.name, *(member.name for member in bucket.members))}
    left = {table: {name: entry for name, entry in saved[table].items() if name not in gone} for table in TABLES}
    return {**saved, **left} if left["steps"] else NOTHING


def renamed(saved: Saved, names: Sequence[str]) -> Saved:
    """Rename the tensors of a saved state to these names, if they differ only by a prefix that ends in a slash.

    Keras adds the name of the model to the path of a variable in some versions, and omits it in others.
    """
    mine = saved["steps"].keys()
    alike = {
        old: [name for name in set(names) - mine if name.endswith(f"/{old}") or old.endswith(f"/{name}")]
        for old in mine - set(names)
    }
    new = {old: found[0] for old, found in alike.items() if len(found) == 1}
    if len(set(new.values())) < len(new):  # two saved tensors would get the same name
        return saved
    return {**saved, **{table: {new.get(name, name): one for name, one in saved[table].items()} for table in TABLES}}


def reshard(saved: Sequence[Saved], world_size: int, nodes: Nodes | None = None) -> list[dict[str, Any]]:
    """Convert the saved states of all ranks into states for other ranks or nodes.

    Summed slots are divided equally among the ranks that will have them, so that no gradient is lost or counted twice.
    With two levels, the state of each rank has the slots of all tensors; loading it ignores those that other ranks of
    the node own.

    Args:
        saved: the saved states, in any order.
        world_size: the new number of ranks.
        nodes: the new nodes; None for one level.

    Raises:
        ValueError: the state of a rank is missing, or steps or tensors differ between ranks.
    """
    first = saved[0]
    # A missing rank would silently lose its residuals
    ranks = sorted(one["rank"] for one in saved)
    if ranks != list(range(first["world"])):
        raise ValueError(f"states of all {first['world']} ranks are needed; these are of ranks {ranks}")
    before = nodes_of(first) or Nodes(first["world"], 1)
    owners = (first.get("nodes") or {"owners": {}})["owners"]
    with_rank: dict[int, Saved] = {}  # for each local rank, the state of one such rank
    for one in saved:
        same = with_rank.setdefault(before.local_rank(one["rank"]), one)
        for what, other in (("steps", first), ("merge", same)):
            if one[what] != other[what]:
                raise ValueError(f"the saved states of ranks {other['rank']} and {one['rank']} differ in {what!r}")
    holders = nodes.num_nodes if nodes else world_size
    merge: dict[str, dict[str, str]] = {}
    state: dict[str, dict[str, Array]] = {}
    for local_rank, example in with_rank.items():
        having = [one for one in saved if before.local_rank(one["rank"]) == local_rank]
        for name, slots in example["merge"].items():
            if owners.get(name, 0) != local_rank:
                continue
            merge[name] = slots
            state[name] = {
                slot: sum(one["state"][name][slot] for one in having) / holders
                if how == "sum"
                else example["state"][name][slot]
                for slot, how in slots.items()
            }
    common = {**first, "world": world_size, "merge": merge, "state": state, "resharded": True}
    common["nodes"] = {**nodes._asdict(), "owners": {}} if nodes else None
    return [{**common, "rank": rank} for rank in range(world_size)]


# -- what made a saved state, and what differs where it is loaded: for people ------------------------------------


def made_by(driver: str) -> dict[str, Any]:
    """Return what makes a state, as plain data: ``driver``, and ``versions`` by package.

    Args:
        driver: the driver's name.
    """
    versions = {"hvdcompress": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        if (version := getattr(sys.modules.get(package), "__version__", None)) is not None:
            versions[package] = str(version)
    return {"driver": driver, "versions": versions}


def differences(saved: Mapping[str, Any], plan: Plan) -> str:
    """Return what matters and was different where a state was saved; nothing if all is the same.

    Args:
        saved: the state.
        plan: the plan of the Compressor that loads it.
    """
    before = json.loads(json.dumps(saved["plan"]))  # so that both have texts as keys
    now = json.loads(plan.source)
    keys = (before.keys() | now.keys()) - IDLE
    if before.get("method") != now.get("method"):
        keys &= {*RULE_KEYS, *PLAN_KEYS}  # each method has hyper-parameters of its own
    found = [("hvdcompress", saved[MADE_BY]["versions"]["hvdcompress"], __version__)]
    found += [(key, before.get(key), now.get(key)) for key in sorted(keys)]
    return "; ".join(f"{what} was {_shown(was)}, is {_shown(here)}" for what, was, here in found if was != here)


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return value[:60] if isinstance(value, str) else reprlib.repr(value)
