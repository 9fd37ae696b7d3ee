"""Where an experiment's results go, and what may be kept of an earlier attempt."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdcompress.lab.training.experiment import Experiment
from hvdcompress.lab.training.report import read_events


def choose(parent: Path, name: str, out: Path | None, resume: bool, overwrite: bool) -> Path:
    """The folder for an experiment's results: nothing that is there is touched unless the user asks for it.

    Raises:
        ValueError: what was asked for cannot be done; the message says what can.
    """
    if resume and overwrite:
        raise ValueError("--resume keeps what --overwrite deletes: give one of them")
    taken = sorted(
        (int(match[1] or 1), folder)
        for folder in (parent.iterdir() if parent.is_dir() else ())
        if (match := re.fullmatch(rf"{re.escape(name)}(?:-(\d+))?", folder.name))
    )
    if resume:
        folder = out or (taken[-1][1] if taken else parent / name)
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"nothing to resume: {folder} holds no run")
        return folder
    if out is None and not overwrite:
        return parent / (f"{name}-{taken[-1][0] + 1}" if taken else name)
    folder = out or parent / name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not overwrite:
            raise ValueError(f"{folder} is there already: give --resume to go on, or --overwrite to start anew")
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"{folder} is not the folder of a run (no config.yaml): it is not deleted")
    return folder


@contextlib.contextmanager
def users_own(folder: Path) -> Iterator[None]:
    """What root writes inside belongs, at the end, to the user who called sudo; so do folders made on the way there."""
    made = [parent for parent in folder.absolute().parents if not parent.exists()]
    try:
        yield
    finally:
        if hasattr(os, "geteuid") and os.geteuid() == 0 and "SUDO_UID" in os.environ:
            owner = int(os.environ["SUDO_UID"]), int(os.environ.get("SUDO_GID", "-1"))
            # by open folders and innermost first: paths could be made to lead elsewhere by then
            for _, folders, files, opened in os.fwalk(folder, topdown=False):
                for name in (*folders, *files):
                    _give(name, owner, opened)
            for path in (folder, *made):
                _give(path, owner)


def _give(path: str | Path, owner: tuple[int, int], opened: int | None = None) -> None:
    """Root's file or folder to its new owner; nothing that has other names, or another owner already."""
    with contextlib.suppress(OSError):  # gone meanwhile, or on a file system without owners
        found = os.stat(path, dir_fd=opened, follow_symlinks=False)
        if found.st_uid == 0 and (stat.S_ISDIR(found.st_mode) or found.st_nlink == 1):
            os.chown(path, *owner, dir_fd=opened, follow_symlinks=False)


def prepare(folder: Path, experiment: Experiment, resume: bool) -> None:
    """Make the folder ready: empty, or with the finished runs of an earlier attempt.

    Raises:
        ValueError: a finished run was made with other settings.
    """
    metrics = folder / "metrics"
    if not resume and folder.exists():
        shutil.rmtree(folder)
    for run in experiment.runs():
        file = metrics / f"{run.id}.jsonl"
        events = read_events(file)
        if not any(event.get("event") == "finished" for event in events):
            file.unlink(missing_ok=True)
        elif changed := _changes(events[0]["spec"], json.loads(json.dumps(run.spec()))):
            raise ValueError(
                f"{file} was made with other settings ({changed}): resume with the same ones, or run without --resume"
            )
    metrics.mkdir(parents=True, exist_ok=True)
    experiment.save(folder / "config.yaml")


def _changes(old: Any, new: Any, key: str = "") -> str:
    """The keys at which two nested dicts differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        parts = (_changes(old.get(k), new.get(k), f"{key}.{k}".lstrip(".")) for k in {**old, **new})
        return ", ".join(filter(None, parts))
    return "" if old == new else f"{key}: {old!r} there, {new!r} now"
