"""Saved states as bytes and on disk: one safetensors file per rank, with everything that is no array as metadata.

The files of all ranks after the same step form a *set*: ``step-120-rank-0-of-4.safetensors`` …
``step-120-rank-3-of-4.safetensors``. :func:`load` reads the newest complete set of a folder. The set before it is kept
until the next one is written. A set of a different number of ranks is re-sharded, which preserves the sum of the
residuals over ranks.

:func:`by_rank` and :func:`of_rank` are for other storage, such as torch.distributed.checkpoint.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load as deserialize
from safetensors.numpy import save as serialize
from safetensors.numpy import save_file

from hvdcompress.engine.nodes import Nodes
from hvdcompress.engine.saving import snapshot

METADATA = "hvdcompress"  #: metadata key of everything that is no array: plan, steps, number of ranks, …
KEPT = 2  #: files that a rank keeps, so that one set is complete while the next one is being written
GRADIENTS = "gradients"  #: the kind of state that a Compressor saves
KEY = re.compile(r"rank-\d+-of-\d+")  #: keys of :func:`by_rank`
_TIME = "hvdcompress.time"  # metadata key of the time of saving in ns; copying a file changes its own time
_SEPARATOR = "\n"  # between the names of a tensor and of a slot; slot names have no line break
_NAME = re.compile(r"step-(\d+)-rank-(\d+)-of-(\d+)\.safetensors")
_UNREADABLE = (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError)


class NoState(FileNotFoundError):
    """A folder has no saved state of the kind that is to be loaded."""


def path_of(folder: str | Path, rank: int, world_size: int, step: int) -> Path:
    """Return the path of one rank's file after ``step`` steps."""
    return Path(folder) / f"step-{step}-rank-{rank}-of-{world_size}.safetensors"


def to_bytes(saved: Mapping[str, Any]) -> bytes:
    """Return one rank's ``state_dict()`` as the bytes of a safetensors file."""
    head, arrays = _flattened(saved)
    return serialize(arrays, metadata={METADATA: head})


def from_bytes(data: bytes) -> dict[str, Any]:
    """Return the state that :func:`to_bytes` converted.

    Raises:
        ValueError: the bytes are not a saved state.
    """
    try:
        # safetensors reads metadata only from files, so parse the header here: 8 bytes of length, then JSON
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return _nested(json.loads(header["__metadata__"][METADATA]), deserialize(data))
    except _UNREADABLE as error:
        raise ValueError(f"not a state saved by hvdcompress: {error}") from None


def _flattened(saved: Mapping[str, Any]) -> tuple[str, dict[str, np.ndarray[Any, Any]]]:
    arrays = {
        f"{name}{_SEPARATOR}{slot}": np.ascontiguousarray(array)
        for name, slots in saved["state"].items()
        for slot, array in slots.items()
    }
    return json.dumps({key: value for key, value in saved.items() if key != "state"}), arrays


def _nested(head: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, dict[str, Any]] = {}
    for key, array in arrays.items():
        name, _, slot = key.rpartition(_SEPARATOR)
        state.setdefault(name, {})[slot] = array
    saved = {**head, "state": state}
    snapshot.check(saved)
    return saved


def by_rank(saved: Mapping[str, Any]) -> dict[str, bytes]:
    """Return one rank's state as bytes, under a key that names the rank: no two ranks have a key in common."""
    return {_key(saved["rank"], saved["world"]): to_bytes(saved)}


def of_rank(saved: Mapping[str, bytes], rank: int, world_size: int, nodes: Nodes | None) -> dict[str, Any]:
    """Return the state of one rank from results of :func:`by_rank`, re-sharded if necessary.

    Args:
        saved: that of this rank, or of all ranks if their number or nodes were others.
        rank: this rank.
        world_size: number of ranks.
        nodes: the nodes; None for one level.

    Raises:
        ValueError: a value is not a saved state, or the state of a rank is missing.
    """
    if not saved:
        raise ValueError("the saved state is empty: it has the state of no rank")
    if own := saved.get(_key(rank, world_size)):
        state = from_bytes(own)
        if snapshot.nodes_of(state) == nodes:
            return state
    return snapshot.reshard([from_bytes(each) for each in saved.values()], world_size, nodes)[rank]


def _key(rank: int, world_size: int) -> str:
    return f"rank-{rank}-of-{world_size}"


# -- one file ----------------------------------------------------------------------------------------------


def save(saved: Mapping[str, Any], folder: str | Path) -> Path:
    """Write one rank's state into ``folder``, and remove files older than the previous set.

    Raises:
        OSError: writing failed, for example because the disk is full. Earlier files are unchanged.
    """
    rank = saved["rank"]
    path = path_of(folder, rank, saved["world"], max(saved["steps"].values(), default=0))
    head, arrays = _flattened(saved)
    # safetensors chooses its own temporary file names, so write into a temporary folder. Its name does not change, so
    # that the next save removes what a killed rank has left
    unfinished = path.with_name(f"rank-{rank}.tmp")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save_file(arrays, unfinished / path.name, metadata={METADATA: head, _TIME: str(time.time_ns())})
        _to_disk(unfinished / path.name)
        os.replace(unfinished / path.name, path)
        _to_disk(path.parent)
    except (OSError, SafetensorError) as error:
        raise OSError(f"cannot save the state as {path}: {error}; earlier files are unchanged") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    _clear(path.parent, rank, saved["world"])
    return path


def _to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk before continuing."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _clear(folder: Path, rank: int, world_size: int) -> None:
    """Remove this rank's older files. Rank 0 also removes files of ranks that no longer exist."""
    files = _files(folder)
    own = [file for file in files if file.rank == rank]
    gone = sorted(own, key=lambda file: (file.path.stat().st_mtime_ns, file.step))[:-KEPT]
    if rank == 0:
        begun = {(file.step, file.world_size) for file in own if file not in gone}
        gone += [file for file in files if file.rank >= world_size and (file.step, file.world_size) not in begun]
    for file in gone:
        file.path.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """Read one rank's saved state from a file.

    Raises:
        ValueError: the file is not a saved state.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            return _nested(json.loads(file.metadata()[METADATA]), arrays)
    except _UNREADABLE as error:
        raise ValueError(f"{path} is not a state saved by hvdcompress: {error}") from None


def _head(path: Path) -> tuple[dict[str, Any], int]:
    """Return what a file says of its state besides arrays, and the time of saving in ns (0 without a time).

    Raises:
        ValueError: the file is not a saved state, or is truncated.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
        head = json.loads(metadata[METADATA])
        snapshot.check_head(head)
        return head, int(metadata.get(_TIME, 0))
    except _UNREADABLE as error:
        raise ValueError(f"{path} is not a state saved by hvdcompress: {error}") from None


def describe(path: Path) -> str:
    """Return what made a saved state, as YAML: step, rank, driver, versions, momentum, what was decided, and the plan.

    Args:
        path: the file, or a folder, of which the newest file is taken.

    Raises:
        FileNotFoundError: the folder holds no saved state.
        ValueError: the file is no saved state.
    """
    if path.is_dir():
        newest = max(_files(path), key=lambda file: file.path.stat().st_mtime_ns, default=None)
        if newest is None:
            raise NoState(
                f"{path} was written by torch.distributed.checkpoint. It is not opened, because reading its metadata "
                "can run code; docs/guides/checkpoints.md shows how to copy the state of a rank into a file of its own"
                if (path / ".metadata").is_file()
                else f"no saved state in {path}"
            )
        path = newest.path
    head, _ = _head(path)
    keys = ("rank", "world", "made_by", "fallback", "plan")
    about = {"file": str(path), "step": max(head["steps"].values(), default=0), **{key: head[key] for key in keys}}
    return yaml.safe_dump(about, sort_keys=False)


# -- a folder ----------------------------------------------------------------------------------------------


class _File(NamedTuple):
    """Contents of a file name."""

    path: Path
    step: int
    rank: int
    world_size: int


def _files(folder: str | Path) -> list[_File]:
    """Return the files in a folder whose names are those of saved states."""
    paths = sorted(Path(folder).glob("step-*"))
    return [_File(path, *map(int, parts.groups())) for path in paths if (parts := _NAME.fullmatch(path.name))]


def load(
    folder: str | Path, rank: int, world_size: int, nodes: Nodes | None = None, kind: str = GRADIENTS
) -> dict[str, Any]:
    """Load the state of one rank from the newest complete set in a folder, re-sharded if necessary.

    A warning names newer sets that are incomplete. A folder that contains only files of this rank counts as complete:
    it may be on a local disk that other ranks do not see.

    Args:
        folder: the folder.
        rank: this rank.
        world_size: number of ranks.
        nodes: the nodes; None for one level.
        kind: the kind of state that is expected.

    Raises:
        NoState: the folder has no saved state, or one of another kind.
        FileNotFoundError: it has no set of all ranks.
        ValueError: a file is damaged, or of an unknown format; the message names it.
    """
    sets: dict[tuple[int, int], dict[int, Path]] = {}
    for file in _files(folder):
        sets.setdefault((file.step, file.world_size), {})[file.rank] = file.path
    if not sets:
        raise NoState(f"no saved state in {folder}: expected step-*-rank-*-of-{world_size}.safetensors")
    local_only = all((list(paths), before) == ([rank], world_size) for (_, before), paths in sets.items())
    wrong = []
    for step, before in sorted(sets, key=lambda one: (_head(min(sets[one].values()))[1], one), reverse=True):
        paths = sets[step, before]
        lacking = itertools.islice((each for each in range(before) if each not in paths), 8)
        names = ", ".join(path_of("", each, before, step).name for each in lacking)
        if local_only or not names:
            break
        wrong.append(f"{folder} lacks {names}; the residuals of all {before} ranks are needed")
    else:
        raise FileNotFoundError("; ".join(wrong))
    if wrong:
        warnings.warn(f"{'; '.join(wrong)}; loading the earlier state of step {step} instead", stacklevel=2)
    saved = read(paths[rank if before == world_size else 0])
    if (found := saved.get("kind", GRADIENTS)) != kind:
        raise NoState(f"the state in {folder} is of {found}, not of {kind}")
    if before == world_size and snapshot.nodes_of(saved) == nodes:
        return saved
    if local_only:
        raise ValueError(f"{folder} has the state of rank {rank} alone, and it is of other nodes: all ranks are needed")
    return snapshot.reshard([read(paths[each]) for each in range(before)], world_size, nodes)[rank]
