"""Saved states made into others: for another number of ranks, or of fewer tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdcompress.method import Array


def reshard(saved: Sequence[Mapping[str, Any]], world: int) -> list[dict[str, Any]]:
    """Saved states of all ranks -> states for ``world`` ranks: what is summed keeps its sum over ranks.

    Every new rank gets an equal part of a residual's sum, so that no gradient is lost or counted twice.

    Raises:
        ValueError: a rank's state is missing.
    """
    ranks = sorted(one["rank"] for one in saved)
    if ranks != list(range(saved[0]["world"])):
        raise ValueError(f"states of all {saved[0]['world']} ranks are needed, these are of ranks {ranks}")

    def merged_slot(name: str, slot: str) -> Array:
        arrays = [one["state"][name][slot] for one in saved]
        return sum(arrays) / world if saved[0]["merge"][name][slot] == "sum" else arrays[0]

    merged = {name: {slot: merged_slot(name, slot) for slot in slots} for name, slots in saved[0]["state"].items()}
    return [{**saved[0], "world": world, "rank": rank, "state": merged} for rank in range(world)]


def only(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A saved state without all tensors but these."""
    keys = ("steps", "restarts", "merge", "state")
    tables = {key: {name: saved[key][name] for name in names if name in saved[key]} for key in keys}
    return {**saved, **tables}
