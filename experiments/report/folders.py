"""Folders of runs: a new one for each, ``runs/NAME``, ``runs/NAME-2``, …, or the one to go on in."""

from __future__ import annotations

import re
from pathlib import Path


def choose(name: str, out: Path | None = None, resume: bool = False) -> Path:
    """Choose the folder of a run; earlier results are never touched.

    Args:
        name: the run's.
        out: the folder that the user named.
        resume: take ``out``, or the newest folder of the name.

    Raises:
        ValueError: there is nothing to resume, or ``out`` holds something already.
    """
    runs = Path("runs")
    numbers = {
        int(match[1] or 1): folder
        for folder in (runs.iterdir() if runs.is_dir() else ())
        if (match := re.fullmatch(rf"{re.escape(name)}(?:-(\d+))?", folder.name))
    }
    newest = max(numbers, default=0)
    if resume:
        folder = out or numbers.get(newest, runs / name)
        if not folder.is_dir():
            raise ValueError(f"nothing to resume: there is no folder {folder}")
        return folder
    if out and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already: give --resume to go on, or another --out")
    return out or runs / (f"{name}-{newest + 1}" if newest else name)
