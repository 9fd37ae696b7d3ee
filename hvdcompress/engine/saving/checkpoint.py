"""State on disk: one safetensors file per rank, with the plan, the step counts and the number of ranks as metadata.

The files of all ranks after the same step form a *set*: ``step-120-rank-0-of-4.safetensors`` …
``step-120-rank-3-of-4.safetensors``. :func:`load` reads the newest complete set of a folder. The set before it is kept
until the next one is written. A set of a different number of ranks is re-sharded, which preserves the sum of the
residuals over ranks. Files without a step in their name, ``rank-0-of-4.safetensors``, are from earlier versions and can
be loaded, too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterable, Mapping
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
_TIME = "hvdcompress.time"  # metadata key of the time of saving in ns; copying a file changes its own time
_SEPARATOR = "\n"  # between the names of a tensor and of a slot; slot names have no line break
_NAME = re.compile(r"(?:step-(\d+)-)?rank-(\d+)-of-(\d+)\.safetensors")
_UNREADABLE = (SafetensorError, KeyError, TypeError, ValueError, RecursionError)


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


# -- one file ----------------------------------------------------------------------------------------------


def save(saved: Mapping[str, Any], folder: str | Path) -> Path:
    """Write one rank's ``state_dict()`` into ``folder``, and remove files older than the previous set.

    Raises:
        OSError: writing failed, for example because the disk is full. Earlier files are unchanged.
    """
    rank = saved["rank"]
    world_size = saved["world"]
    path = path_of(folder, rank, world_size, max(saved["steps"].values(), default=0))
    head, arrays = _flattened(saved)
    # safetensors chooses its own temporary file names, so write into a temporary folder. Its name does not change, so
    # that the next save removes what a killed rank has left
    unfinished = path.with_name(f"rank-{rank}-of-{world_size}.tmp")
    try:
        _remove(unfinished)
        unfinished.mkdir(parents=True)
        save_file(arrays, unfinished / path.name, metadata={METADATA: head, _TIME: str(time.time_ns())})
        _to_disk(unfinished / path.name)
        os.replace(unfinished / path.name, path)
        _to_disk(path.parent)
    except (OSError, SafetensorError) as error:
        raise OSError(f"cannot save the state as {path}: {error}; earlier files are unchanged") from error
    finally:
        with contextlib.suppress(OSError):
            _remove(unfinished)
    _clear(path.parent, rank, world_size)
    return path


def _to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk before continuing."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _clear(folder: Path, rank: int, world_size: int) -> None:
    """Remove this rank's older files. Rank 0 also removes files of ranks that no longer exist."""
    own = [file for file in _files(folder) if file.rank == rank]
    for file in sorted(own, key=lambda file: (_modified(file.path), file.step or 0))[:-KEPT]:
        _remove(file.path)
    left = list(folder.glob(f"rank-{rank}-of-*.tmp")) + list(folder.glob(f"rank-{rank}-of-*.*.tmp"))
    if rank == 0:
        files = _files(folder)
        begun = {(file.step, file.world_size) for file in files if file.rank == 0}
        left += [file.path for file in files if file.rank >= world_size and (file.step, file.world_size) not in begun]
    for path in left:
        _remove(path)


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


def describe(path: Path) -> str:
    """Return what made a saved state, as YAML: step, rank, driver, versions, momentum, what was decided, and the plan.

    Args:
        path: the file, or a folder, of which the newest file is taken.

    Raises:
        FileNotFoundError: the folder holds no saved state.
        ValueError: the file is no saved state.
    """
    if path.is_dir():
        files = [file.path for file in _files(path)]
        if not files:
            raise FileNotFoundError(f"no saved state in {path}")
        path = max(files, key=_modified)
    try:
        with safe_open(path, framework="numpy") as file:
            head = json.loads(file.metadata()[METADATA])
        snapshot.check_head(head)
    except _UNREADABLE as error:
        raise ValueError(f"{path} is no state saved by hvdcompress: {error}") from None
    keys = ("rank", "world", "made_by", "fallback", "plan")
    about = {"file": str(path), "step": max(head["steps"].values(), default=0)}
    about |= {key: head[key] for key in keys if key in head}
    return yaml.safe_dump(about, sort_keys=False)


# -- a folder ----------------------------------------------------------------------------------------------


class _File(NamedTuple):
    """Contents of a file name. ``step`` is None if the name has none."""

    path: Path
    step: int | None
    rank: int
    world_size: int


class _Head(NamedTuple):
    """Contents of a file header that were checked against the name of the file."""

    steps: dict[str, int]
    saved: int  #: time of saving in ns


def _files(folder: str | Path) -> list[_File]:
    """Return the files in a folder whose names are those of saved states."""
    folder = Path(folder)
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if parts := _NAME.fullmatch(path.name):
            step, rank, world_size = parts.groups()
            found.append(_File(path, None if step is None else int(step), int(rank), int(world_size)))
    return found


def _modified(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # another rank has just removed it
        return path.stat().st_mtime_ns
    return 0


def _head(file: _File) -> _Head:
    """Read the header of a file.

    Raises:
        ValueError: the file is not a saved state, is truncated, or does not match its name.
    """
    try:
        with safe_open(file.path, framework="numpy") as opened:
            metadata = opened.metadata()
            head = json.loads(metadata[METADATA])
        snapshot.check_head(head)
        saved = int(metadata[_TIME]) if _TIME in metadata else _modified(file.path)
    except (*_UNREADABLE, OSError) as error:
        raise ValueError(f"{file.path} is not a state saved by hvdcompress: {error}") from None
    if (head["rank"], head["world"]) != (file.rank, file.world_size):
        raise ValueError(f"{file.path} contains the state of rank {head['rank']} of {head['world']}")
    return _Head(head["steps"], saved)


class _Set:
    """The files of one step and one number of ranks.

    Attributes:
        wrong: why the set cannot be loaded; None if it can.
        missing: whether files of some ranks are missing and nothing else is wrong.
        order: sort key; newer sets have greater keys.
    """

    def __init__(self, files: Iterable[_File], local_only: bool):
        self.files = {file.rank: file.path for file in files}
        first = next(iter(files))
        self.world_size = first.world_size
        self.wrong = None
        self.missing = False
        heads = []
        wrong = []
        for file in files:
            try:
                heads.append(_head(file))
            except ValueError as error:
                wrong.append(str(error))
        times = [head.saved for head in heads] or [_modified(path) for path in self.files.values()]
        self.step = max((step for head in heads for step in head.steps.values()), default=first.step or 0)
        self.order = max(times), self.step
        lacking = list(itertools.islice((rank for rank in range(self.world_size) if rank not in self.files), 8))
        if lacking and not local_only:
            self.missing = not wrong
            prefix = "" if first.step is None else f"step-{first.step}-"
            names = ", ".join(f"{prefix}rank-{rank}-of-{self.world_size}.safetensors" for rank in lacking)
            wrong.append(f"{first.path.parent} lacks {names}; the residuals of all {self.world_size} ranks are needed")
        if any(head.steps != heads[0].steps for head in heads):
            names = ", ".join(path.name for path in self.files.values())
            wrong.append(f"{first.path.parent} contains states of different steps: {names}")
        if wrong:
            self.wrong = "; ".join(wrong)


def load(folder: str | Path, rank: int, world_size: int, nodes: Nodes | None = None) -> dict[str, Any]:
    """Load the state of one rank from the newest complete set in a folder, re-sharded if necessary.

    A warning names the problems of newer sets that are incomplete or damaged. A folder that contains only files of this
    rank counts as complete: it may be on a local disk that other ranks do not see.

    Args:
        folder: the folder.
        rank: this rank.
        world_size: number of ranks.
        nodes: the nodes; None for one level.

    Raises:
        FileNotFoundError: the folder has no saved state, or no set of all ranks.
        ValueError: all sets are damaged, of an unknown format, or mix different steps.
    """
    files = _files(folder)
    local_only = all((file.rank, file.world_size) == (rank, world_size) for file in files)
    groups: dict[tuple[int | None, int], list[_File]] = {}
    for file in files:
        groups.setdefault((file.step, file.world_size), []).append(file)
    sets = sorted((_Set(group, local_only) for group in groups.values()), key=lambda one: one.order, reverse=True)
    if not sets:
        raise FileNotFoundError(f"no saved state in {folder}: expected step-*-rank-{rank}-of-{world_size}.safetensors")
    good = next((one for one in sets if one.wrong is None), None)
    wrong = "; ".join(one.wrong for one in sets[: None if good is None else sets.index(good)] if one.wrong)
    if good is None:
        raise (FileNotFoundError if all(one.missing for one in sets) else ValueError)(wrong)
    if wrong:
        warnings.warn(f"{wrong}; loading the earlier state of step {good.step} instead", stacklevel=2)
    if good.world_size == world_size:
        own = read(good.files[rank])
        if snapshot.nodes_of(own) == nodes:
            return own
    if local_only:
        raise ValueError(f"{folder} has the state of rank {rank} alone, and it is of other nodes: all ranks are needed")
    return snapshot.reshard([read(good.files[old]) for old in range(good.world_size)], world_size, nodes)[rank]
