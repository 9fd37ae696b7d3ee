"""The papers whose claims can be tested, by the id of their method."""

from __future__ import annotations

import importlib

from hvdcompress.lab.reproduce.claims import Paper
from hvdcompress.registry import suggest

MODULES = {  #: each has a ``PAPER``
    "gaussiank": "hvdcompress.lab.reproduce.gaussiank",
    "gradiveq": "hvdcompress.lab.reproduce.gradiveq",
}


def find(id: str) -> Paper:
    """A paper.

    Raises:
        ValueError: there is none of that id; the message names those that there are.
    """
    if id not in MODULES:
        raise ValueError(f"no claims of {id!r}{suggest(id, list(MODULES))}; there are: {', '.join(MODULES)}, summary")
    return importlib.import_module(MODULES[id]).PAPER
