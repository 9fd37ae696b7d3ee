"""Folders of results: which one is taken, who owns it, and the files of a report in it."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path


def choose(parent: Path, name: str, out: Path | None, resume: bool, overwrite: bool | None) -> Path:
    """Choose the folder for results; earlier results are not touched unless the user asks for it.

    Args:
        parent: where folders are made, ``runs/``.
        name: the run's; a number is added where a folder of that name exists.
        out: the folder that the user named.
        resume: take the newest folder of the name, or ``out``.
        overwrite: allow a folder that holds a run; None where the command has no such option.

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
            again = "another --out" if overwrite is None else "--overwrite"
            raise ValueError(f"{folder} is there already: give --resume to go on, or {again} to start again")
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"{folder} is not the folder of a run (no config.yaml): it is not deleted")
    return folder


@contextlib.contextmanager
def users_own(folder: Path) -> Iterator[None]:
    """At the end, give the folder to the user who called sudo, and so the parent folders that were made for it."""
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
    """Give a file or folder of root's to its new owner, unless it has other names (hard links)."""
    with contextlib.suppress(OSError):  # gone meanwhile, or on a file system without owners
        found = os.stat(path, dir_fd=opened, follow_symlinks=False)
        if found.st_uid == 0 and (stat.S_ISDIR(found.st_mode) or found.st_nlink == 1):
            os.chown(path, *owner, dir_fd=opened, follow_symlinks=False)


def write_files(folder: Path, texts: dict[str, str], pages: Callable[[], dict[str, str]]) -> list[Path]:
    """Write the files of a report.

    Args:
        folder: made if it does not exist.
        texts: contents by the files' names.
        pages: makes the contents that need the extra "report" (matplotlib, Jinja2); they are left out without it.

    Returns:
        The files that were written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for make in (lambda: texts, pages):  # the texts are written even if a page cannot be drawn
        with contextlib.suppress(ModuleNotFoundError):
            for name, text in make().items():
                (folder / name).write_text(text, encoding="utf-8")
                files.append(folder / name)
    return files
