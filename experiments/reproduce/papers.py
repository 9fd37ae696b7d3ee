"""The papers whose claims can be tested, by the id of their method."""

from __future__ import annotations

import importlib
from collections.abc import Collection

from experiments.reproduce.claims import Claim, Paper
from hvdcompress.registry import suggest

PAPERS = ("scalecom", "gradiveq", "fft", "gaussiank")
MODULES = {id: f"experiments.reproduce.{id}" for id in PAPERS}  #: each has a ``PAPER``


def find(id: str) -> Paper:
    """A paper.

    Raises:
        ValueError: there is none of that id; the message names those that there are.
    """
    if id not in MODULES:
        raise ValueError(f"no claims of {id!r}{suggest(id, list(MODULES))}; there are: {', '.join(MODULES)}, summary")
    return importlib.import_module(MODULES[id]).PAPER


def named(paper: Paper, ids: Collection[str]) -> list[Claim]:
    """The claims of these ids, in the paper's order.

    Raises:
        ValueError: the paper has none of that id; the message names those that it has.
    """
    known = [claim.id for claim in paper.claims]
    for id in ids:
        if id not in known:
            raise ValueError(f"--claims: {paper.title} has no {id!r}{suggest(id, known)}; it has {', '.join(known)}")
    return [claim for claim in paper.claims if claim.id in ids]
