"""State on disk: one safetensors file per rank, plain arrays with the plan, the steps and the world next to them.

What all ranks save after one step is a *set*: ``step-120-rank-0-of-4.safetensors`` …
``step-120-rank-3-of-4.safetensors``. The newest complete one of a folder is loaded; the one before it is kept until the
next has been written. Loaded by another number of ranks, a set is re-sharded: residuals keep their sum over ranks.
Files without a step, ``rank-0-of-4.safetensors``, are of earlier versions, and are read, too.
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

from hvdcompress.engine.saving import snapshot

METADATA = "hvdcompress"  #: the key of what is no array: plan, steps, world, …
KEPT = 2  #: files that a rank keeps: while one set is being written, the one before it is whole
_TIME = "hvdcompress.time"  # the key of when it was saved, in ns: copies of a file lose their own time
_SEPARATOR = "\n"  # between a tensor's name and its slot, which has no line break
_NAME = re.compile(r"(?:step-(\d+)-)?rank-(\d+)-of-(\d+)\.safetensors")
_UNREADABLE = (SafetensorError, KeyError, TypeError, ValueError, RecursionError)


def path_of(folder: str | Path, rank: int, world: int, step: int) -> Path:
    """The file of one rank after ``step`` steps in ``folder``."""
    return Path(folder) / f"step-{step}-rank-{rank}-of-{world}.safetensors"


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
    except _UNREADABLE as error:
        raise ValueError(f"these bytes are no state saved by hvdcompress: {error}") from None


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
    """Write one rank's ``state_dict()`` into ``folder``, and drop what is older than the set before.

    Raises:
        OSError: it cannot be written, as on a full disk; what was saved before is as it was.
    """
    rank, world = saved["rank"], saved["world"]
    path = path_of(folder, rank, world, max(saved["steps"].values(), default=0))
    head, arrays = _flattened(saved)
    # a folder, as safetensors writes files of its own choice; the same each time, as a rank that is killed leaves it
    unfinished = path.with_name(f"rank-{rank}-of-{world}.tmp")
    try:
        _remove(unfinished)
        unfinished.mkdir(parents=True)
        save_file(arrays, unfinished / path.name, metadata={METADATA: head, _TIME: str(time.time_ns())})
        _to_disk(unfinished / path.name)
        os.replace(unfinished / path.name, path)
        _to_disk(path.parent)
    except (OSError, SafetensorError) as error:
        raise OSError(f"the state cannot be saved as {path}: {error}; what was saved before is as it was") from error
    finally:
        with contextlib.suppress(OSError):
            _remove(unfinished)
    _clear(path.parent, rank, world)
    return path


def _to_disk(path: Path) -> None:
    """Have the system write a file, or a folder's entries, before anything that follows."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _remove(path: Path) -> None:
    """Remove a file or a folder that may not be there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _clear(folder: Path, rank: int, world: int) -> None:
    """Remove this rank's files but for the newest, and, as rank 0, what ranks have left that are no more."""
    own = [file for file in _files(folder) if file.rank == rank]
    for file in sorted(own, key=lambda file: (_modified(file.path), file.step or 0))[:-KEPT]:
        _remove(file.path)
    left = list(folder.glob(f"rank-{rank}-of-*.tmp")) + list(folder.glob(f"rank-{rank}-of-*.*.tmp"))
    if rank == 0:
        files = _files(folder)
        begun = {(file.step, file.world) for file in files if file.rank == 0}
        left += [file.path for file in files if file.rank >= world and (file.step, file.world) not in begun]
    for path in left:
        _remove(path)


def read(path: Path) -> dict[str, Any]:
    """One rank's saved state.

    Raises:
        ValueError: the file is no saved state.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            return _nested(json.loads(file.metadata()[METADATA]), arrays)
    except _UNREADABLE as error:
        raise ValueError(f"{path} is no state saved by hvdcompress: {error}") from None


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
    """What a file's name says; ``step`` is None where it does not say it."""

    path: Path
    step: int | None
    rank: int
    world: int


class _Head(NamedTuple):
    """What a file's header says, and the file's whole length agrees with."""

    steps: dict[str, int]
    saved: int  #: when, in ns


def _files(folder: str | Path) -> list[_File]:
    """The files of saved states, by their names; others are not looked at."""
    folder = Path(folder)
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if parts := _NAME.fullmatch(path.name):
            step, rank, world = parts.groups()
            found.append(_File(path, None if step is None else int(step), int(rank), int(world)))
    return found


def _modified(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # another rank has just removed it
        return path.stat().st_mtime_ns
    return 0


def _head(file: _File) -> _Head:
    """A file's header.

    Raises:
        ValueError: the file is no saved state, is cut short, or is not what its name says.
    """
    try:
        with safe_open(file.path, framework="numpy") as opened:
            metadata = opened.metadata()
            head = json.loads(metadata[METADATA])
        snapshot.check_head(head)
        saved = int(metadata[_TIME]) if _TIME in metadata else _modified(file.path)
    except (*_UNREADABLE, OSError) as error:
        raise ValueError(f"{file.path} is no state saved by hvdcompress: {error}") from None
    if (head["rank"], head["world"]) != (file.rank, file.world):
        raise ValueError(f"{file.path} holds the state of rank {head['rank']} of {head['world']}")
    return _Head(head["steps"], saved)


class _Set:
    """The files of one step and one number of ranks.

    Attributes:
        wrong: why it cannot be loaded; None if it can.
        missing: all that is wrong is that it lacks a rank's file.
        order: the greater, the newer.
    """

    def __init__(self, files: Iterable[_File], alone: bool):
        self.files = {file.rank: file.path for file in files}
        first = next(iter(files))
        self.world = first.world
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
        lacking = list(itertools.islice((rank for rank in range(self.world) if rank not in self.files), 8))
        if lacking and not alone:
            self.missing = not wrong
            prefix = "" if first.step is None else f"step-{first.step}-"
            names = ", ".join(f"{prefix}rank-{rank}-of-{self.world}.safetensors" for rank in lacking)
            wrong.append(f"{first.path.parent} lacks {names}: residuals of all {self.world} ranks are needed")
        if any(head.steps != heads[0].steps for head in heads):
            names = ", ".join(path.name for path in self.files.values())
            wrong.append(f"{first.path.parent} holds states of different steps: {names}")
        if wrong:
            self.wrong = "; ".join(wrong)


def load(folder: str | Path, rank: int, world: int) -> dict[str, Any]:
    """The state of ``rank`` out of ``world`` from a folder: the newest complete set, re-sharded if need be.

    Where a newer set is incomplete or damaged, a warning names what is wrong with it. A folder with files of this rank
    alone, on a disk that other ranks do not see, counts as complete.

    Raises:
        FileNotFoundError: the folder holds no saved state, or none of all ranks.
        ValueError: what it holds is damaged, of another format, or of different steps.
    """
    files = _files(folder)
    alone = all((file.rank, file.world) == (rank, world) for file in files)
    groups: dict[tuple[int | None, int], list[_File]] = {}
    for file in files:
        groups.setdefault((file.step, file.world), []).append(file)
    sets = sorted((_Set(group, alone) for group in groups.values()), key=lambda one: one.order, reverse=True)
    if not sets:
        raise FileNotFoundError(f"no saved state in {folder}: there is no step-*-rank-{rank}-of-{world}.safetensors")
    good = next((one for one in sets if one.wrong is None), None)
    wrong = "; ".join(one.wrong for one in sets[: None if good is None else sets.index(good)] if one.wrong)
    if good is None:
        raise (FileNotFoundError if all(one.missing for one in sets) else ValueError)(wrong)
    if wrong:
        warnings.warn(f"{wrong}; the state of step {good.step} is loaded, which was saved before", stacklevel=2)
    if good.world == world:
        return read(good.files[rank])
    return snapshot.reshard([read(good.files[old]) for old in range(good.world)], world)[rank]
