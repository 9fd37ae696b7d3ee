"""The configurations in ``configs/``: experiments and benchmarks, found by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdcompress.registry import suggest

__all__ = ["FOLDER", "Packaged", "every", "find", "resolve"]

FOLDER = Path(__file__).resolve().parents[1] / "configs"
KINDS = {"experiments": "experiment", "bench": "benchmark"}  #: by the folder's name
USES = {
    "compare": "comparison",
    "scale": "scale",
}  #: lists of methods for these commands, which lie among benchmarks


@dataclass(frozen=True)
class Packaged:
    """A packaged configuration: its name, its kind, what the first line of its file says, and the file."""

    name: str
    kind: str
    about: str
    file: Path


def every(kinds: Sequence[str] = ()) -> list[Packaged]:
    """The packaged configurations, by kind and name.

    Args:
        kinds: only these kinds, such as "experiment"; all if there are none.
    """
    found = []
    for folder, kind in KINDS.items():
        for file in sorted((FOLDER / folder).glob("*.yaml")):
            actual = USES.get(file.stem, kind) if folder == "bench" else kind
            if not kinds or actual in kinds:
                found.append(Packaged(file.stem, actual, _about(file), file))
    return found


def _about(file: Path) -> str:
    """The first line of the comment that a file begins with."""
    with file.open(encoding="utf-8") as stream:
        return stream.readline().lstrip("# ").strip()


def find(name: str, kinds: Sequence[str] = ()) -> Packaged:
    """The packaged configuration of that name.

    Raises:
        ValueError: there is none; the message lists the known ones.
    """
    known = every(kinds)
    for one in known:
        if one.name == name:
            return one
    names = [one.name for one in known]
    hint = suggest(name, names)
    what = f"{' or '.join(kinds)} " if kinds else ""
    raise ValueError(
        f"there is no file {name!r}, and no packaged {what}configuration of that name{hint}; "
        f"packaged: {', '.join(names)}"
    )


def resolve(given: Path | str, kinds: Sequence[str] = ()) -> Path:
    """A configuration's file from what a user gave: a path that exists, or else a packaged configuration's name.

    Args:
        given: the path or the name.
        kinds: the kinds of packaged configurations that are meant.

    Raises:
        ValueError: it is neither.
    """
    path = Path(given)
    return path if path.is_file() else find(str(given), kinds).file
