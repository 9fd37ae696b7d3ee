"""State on disk: one safetensors file a rank, plain arrays with the plan, the steps and the world beside them.

A folder holds ``rank-0-of-4.safetensors`` … ``rank-3-of-4.safetensors``. Loaded by another number of ranks, they are
re-sharded: residuals keep their sum over ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load as deserialize
from safetensors.numpy import save as serialize
from safetensors.numpy import save_file

from hvdcompress.engine.snapshot import reshard

METADATA = "hvdcompress"  #: the key of what is no array: plan, steps, world, …
_SEPARATOR = "\n"  # between a tensor's name and its slot: no parameter name has a line break


def path_of(folder: str | Path, rank: int, world: int) -> Path:
    """The file of one rank in ``folder``."""
    return Path(folder) / f"rank-{rank}-of-{world}.safetensors"


def to_bytes(saved: Mapping[str, Any]) -> bytes:
    """One rank's ``state_dict()`` as the bytes of a safetensors file."""
    head, arrays = _flattened(saved)
    return serialize(arrays, metadata={METADATA: head})


def from_bytes(data: bytes) -> dict[str, Any]:
    """The inverse of :func:`to_bytes`.

    Raises:
        ValueError: the bytes are no saved state.
    """
    try:
        # safetensors reads metadata from files only; the format is 8 bytes of length, then the header in JSON
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return _nested(json.loads(header["__metadata__"][METADATA]), deserialize(data))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"these bytes are no state saved by hvdcompress: {error}") from None


def _flattened(saved: Mapping[str, Any]) -> tuple[str, dict[str, np.ndarray[Any, Any]]]:
    arrays = {
        f"{name}{_SEPARATOR}{slot}": np.ascontiguousarray(array)
        for name, slots in saved["state"].items()
        for slot, array in slots.items()
    }
    return json.dumps({key: value for key, value in saved.items() if key != "state"}), arrays


def _nested(head: dict[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    head["state"] = {}
    for key, array in arrays.items():
        name, slot = key.split(_SEPARATOR)
        head["state"].setdefault(name, {})[slot] = array
    return head


def save(saved: Mapping[str, Any], folder: str | Path) -> Path:
    """Write one rank's ``state_dict()`` into ``folder``; a file is replaced only once the new one is whole."""
    path = path_of(folder, saved["rank"], saved["world"])
    path.parent.mkdir(parents=True, exist_ok=True)
    head, arrays = _flattened(saved)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    save_file(arrays, temporary, metadata={METADATA: head})
    os.replace(temporary, path)
    return path


def read(path: Path) -> dict[str, Any]:
    """One rank's saved state.

    Raises:
        ValueError: the file is no saved state.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            return _nested(json.loads(file.metadata()[METADATA]), arrays)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no state saved by hvdcompress: {error}") from None


def load(folder: str | Path, rank: int, world: int) -> dict[str, Any]:
    """The state of ``rank`` out of ``world`` from a folder, re-sharded if it was saved by another number of ranks.

    Raises:
        FileNotFoundError: the folder holds no saved state, or not that of all ranks.
        ValueError: it holds states of several worlds, none of them this one; or a file is damaged.
    """
    own = path_of(folder, rank, world)
    if own.exists():
        return read(own)
    found = sorted(Path(folder).glob("rank-*-of-*.safetensors"))
    worlds = {int(path.stem.rsplit("-", 1)[1]) for path in found}
    if not found:
        raise FileNotFoundError(f"no saved state in {folder}: {own.name} is not there")
    if len(worlds) > 1:
        raise ValueError(f"{folder} holds states of {sorted(worlds)} ranks, and none of {world}: remove the stale ones")
    (old,) = worlds
    missing = [path_of(folder, r, old).name for r in range(old) if not path_of(folder, r, old).exists()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: residuals of all {old} ranks are needed")
    return reshard([read(path_of(folder, r, old)) for r in range(old)], world)[rank]
