"""Tables of data frames, as Markdown, with a format per column."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

MISSING = "–"  #: the cell of a figure that is not there


def markdown(frame: pd.DataFrame, **formats: Callable[[Any], str]) -> str:
    """Return a Markdown table; columns of numbers are aligned right.

    Args:
        frame: one row per line of the table.
        formats: by column, what turns a value into text, such as ``numbers.seconds_of``; ``str`` where none is given.
    """
    cells = {
        column: [MISSING if pd.isna(value) else formats.get(str(column), str)(value) for value in frame[column]]
        for column in frame
    }
    align = ["right" if pd.api.types.is_numeric_dtype(frame[column]) else "left" for column in frame]
    return str(pd.DataFrame(cells, dtype=str).to_markdown(index=False, disable_numparse=True, colalign=align))


def show(frame: pd.DataFrame, title: str = "", **formats: Callable[[Any], str]) -> None:
    """Print a table to the terminal."""
    print("\n".join(filter(None, (title, markdown(frame, **formats), ""))), flush=True)
