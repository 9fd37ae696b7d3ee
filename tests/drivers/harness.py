"""What the scripts of cases share that every rank runs: a registry of cases, and the loop over them.

``python SCRIPT OUT [CASE…]`` runs the cases and writes ``OUT/<rank>.json``: {"results": {case: "ok" | "skip: why" |
traceback}, "numbers": {…}}. One launch runs them all, since starting ranks costs seconds.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SECONDS_A_CASE = 150
CASES: dict[str, Callable[[], None]] = {}
NUMBERS: dict[str, Any] = {}  #: figures for the test that launched us
OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


class Skip(Exception):
    """This case needs other ranks or another controller."""


def heavy_tailed(shapes: dict[str, tuple[int, ...]], step: int, rank: int) -> dict[str, np.ndarray]:
    """Gradients that float16 and bfloat16 hold exactly, so that dtypes and drivers can be compared."""
    out = {}
    for number, (name, shape) in enumerate(shapes.items()):
        rng = np.random.default_rng([step, rank, number])
        values = rng.standard_t(3, size=shape).astype(np.float32)
        values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).clip(-100, 100)
        out[name] = np.where(np.abs(values) < 1e-3, np.float32(0), values)
    return out


def must_raise(
    kind: Any, words: list[str], run: Callable[[], object], gather: Callable[[str], list[str]], same: bool = True
) -> None:
    """``run`` raises on every rank, with these words in the message; ``same``: the same message."""
    try:
        run()
    except kind as error:
        message = str(error)
    else:
        message = "no error"
    everyone = gather(message)
    assert not same or len(set(everyone)) == 1, f"ranks differ: {everyone}"
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


def run(rank: int, meet: Callable[[], Any]) -> None:
    """Run the chosen cases, one after the other, in step with the other ranks, whom ``meet`` waits for."""
    results: dict[str, str] = {}
    for name in sys.argv[2:] or list(CASES):
        faulthandler.dump_traceback_later(SECONDS_A_CASE, exit=True)  # a hang is a bug: say where
        try:
            CASES[name]()
            results[name] = "ok"
        except Skip as skip:
            results[name] = f"skip: {skip}"
        except BaseException:
            results[name] = traceback.format_exc()
        (OUT / f"{rank}.json").write_text(json.dumps({"results": results, "numbers": NUMBERS}))
        meet()
    faulthandler.cancel_dump_traceback_later()
