"""The terminal that commands print to: moving lines and colours only where a person watches."""

from __future__ import annotations

import os
import sys

from rich.console import Console

from experiments.cluster.started import started


def console_of(stderr: bool = False) -> Console:
    """The terminal, or what is in its place.

    A spinner, and other lines that are written over, need a terminal of one's own. A launcher gives each of its ranks
    one, and mixes what they print, with words of its own before each line.

    Args:
        stderr: print to the error stream.

    Returns:
        A console that counts as a terminal only where it is one, and this process is no rank. Colours are rich's choice
        there; elsewhere there are some only if FORCE_COLOR asks for them.
    """
    terminal = (sys.stderr if stderr else sys.stdout).isatty() and started() is None
    colours = "auto" if terminal or not os.environ.get("FORCE_COLOR") else "standard"
    # Where there is no terminal rich assumes 80 columns, which would cut tables in logs.
    width = None if terminal or "COLUMNS" in os.environ else 160
    return Console(stderr=stderr, force_terminal=terminal, color_system=colours, width=width)  # type: ignore[arg-type]
