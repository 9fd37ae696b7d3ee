"""Files of JSON lines (``metrics/*.jsonl``, ``results.jsonl``): written line by line, read while they grow.

A process that is killed may leave half a line behind; readers skip it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Follower", "append", "end_line", "read"]


def append(file: Path, record: dict[str, Any]) -> None:
    """Append one record: with a single write, so that a reader hardly ever sees half of a line."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record) + "\n")


def end_line(file: Path) -> None:
    """Add a line break after half of a line, so that the next record begins a line of its own."""
    with file.open("ab+") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.write(b"\n")


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a file that may not exist; lines that were cut off are skipped."""
    return list(Follower(file).records(whole_lines=False))


class Follower:
    """Reads a growing file: each call yields the records that came since the last one, from complete lines only."""

    def __init__(self, file: Path):
        self.file, self.offset = file, 0

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Return what has been appended since the last call."""
        return self.records(whole_lines=True)

    def records(self, whole_lines: bool) -> Iterator[dict[str, Any]]:
        """The records since the last call; the last line may lack its line break if ``whole_lines`` is False."""
        if not self.file.exists():
            return
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            for line in stream:
                if whole_lines and not line.endswith(b"\n"):
                    break
                self.offset += len(line)
                try:
                    yield json.loads(line)
                except ValueError:  # cut off when a rank was killed (in a character, even); later lines are whole
                    continue
