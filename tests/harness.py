"""What every rank does: run checks one after the other, in step with the other ranks, and write down how each went.

A script of cases is called as ``python SCRIPT OUT [CASE…]``; it writes ``OUT/<rank>.json``: {"results": {case: "ok" |
"skip: why" | traceback}, "seconds": {case: s}}. One launch runs them all, since starting ranks takes seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hvdcompress.engine.telemetry import log
from tests.spoiled import spoil

spoil()
SECONDS_A_CASE = 150
CASES: dict[str, Callable[[], None]] = {}
OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Register a case of the script that is run."""
    CASES[function.__name__] = function
    return function


class Skip(Exception):
    """This check needs other ranks, another controller, or another driver."""


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Context manager for the lines that this rank logs; warnings that were given before are given again."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.warn_once.cache_clear()
    log.LOGGER.addHandler(handler)
    try:
        yield lines
    finally:
        log.LOGGER.removeHandler(handler)


def heavy_tailed(shapes: Mapping[str, tuple[int, ...]], step: int, rank: int) -> dict[str, np.ndarray]:
    """Gradients that float16 and bfloat16 hold exactly, so that dtypes and drivers can be compared."""
    return {
        name: _drawn((step, rank, number), tuple(shape)).copy() for number, (name, shape) in enumerate(shapes.items())
    }


@lru_cache(maxsize=4096)
def _drawn(seed: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    values = np.asarray(np.random.default_rng(seed).standard_t(3, size=shape), np.float32)
    values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).clip(-100, 100)
    return np.where(np.abs(values) < 1e-3, np.float32(0), values)


EXACT = (0.0, 0.0)  #: a tolerance of :func:`assert_close`
REORDERED = (2e-6, 4e-7)  #: ranks are summed in another order than loopback's


def summed(world_size: int) -> tuple[float, float]:
    """How close sums over so many ranks are to loopback's: one or two numbers have the same sum in any order."""
    return EXACT if world_size <= 2 else REORDERED


def assert_close(got: dict, want: dict, tolerance: tuple[float, float], what: str) -> None:
    """Equal in names, shapes, dtypes and numbers; ``tolerance``: relative, and absolute of the greatest number."""
    assert got.keys() == want.keys(), what
    rtol, atol = tolerance
    for name in want:
        assert got[name].dtype == want[name].dtype and got[name].shape == want[name].shape, (what, name)
        greatest = float(np.abs(want[name]).max(initial=0)) if np.isfinite(want[name]).all() else 1.0
        np.testing.assert_allclose(got[name], want[name], rtol, atol * greatest, err_msg=f"{what}, {name}")


def assert_same_on_all_ranks(arrays: dict[str, np.ndarray], gather: Callable[[Any], list[Any]], what: str) -> None:
    """All ranks have these arrays alike, to the bit; ``gather`` brings every rank's object."""
    everyone = gather({name: array.tobytes() for name, array in arrays.items()})
    for name in arrays:
        assert len({one[name] for one in everyone}) == 1, f"{what}: ranks differ in {name}"


def must_raise(
    kind: Any, words: list[str], run: Callable[[], object], gather: Callable[[str], list[str]], same: bool = True
) -> str:
    """``run`` raises on every rank, with these words in the message, which is returned; ``same``: the same message."""
    try:
        run()
    except kind as error:
        message = str(error)
    else:
        message = "no error"
    everyone = gather(message)
    assert "no error" not in everyone, f"expected an error on every rank: {everyone}"
    assert not same or len(set(everyone)) == 1, f"ranks differ: {everyone}"
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"
    return message


def run(
    rank: int,
    meet: Callable[[], Any],
    cases: Mapping[str, Callable[[], None]] = CASES,
    seconds: Callable[[str], float] = lambda name: SECONDS_A_CASE,
) -> None:
    """Run the chosen cases, one after the other, in step with the other ranks, whom ``meet`` waits for."""
    results: dict[str, str] = {}
    took: dict[str, float] = {}
    for name in sys.argv[2:] or list(cases):
        faulthandler.dump_traceback_later(seconds(name), exit=True)  # a hang is a bug: say where
        began = time.monotonic()
        try:
            cases[name]()
            results[name] = "ok"
        except Skip as skip:
            results[name] = f"skip: {skip}"
        except BaseException:
            results[name] = traceback.format_exc()
        took[name] = round(time.monotonic() - began, 2)
        written = {"results": results, "seconds": took}
        (OUT / f"{rank}.json").write_text(json.dumps(written))
        meet()
    faulthandler.cancel_dump_traceback_later()
