"""Test data and assertions that tests on ranks share."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hvdcompress.engine.saving import checkpoint
from hvdcompress.engine.telemetry import log

FOLDER = Path(os.environ.get("HVDCOMPRESS_TEST_REPORTS", "."))  #: of the launch, the same on all ranks

EXACT = (0.0, 0.0)  #: a tolerance of :func:`assert_close`
REORDERED = (2e-6, 4e-7)  #: ranks are summed in another order than the loopback's


def summed(world_size: int) -> tuple[float, float]:
    """Return how close sums over ranks are to the loopback's: the sum of two numbers does not depend on their order."""
    return EXACT if world_size <= 2 else REORDERED


def heavy_tailed(shapes: Mapping[str, tuple[int, ...]], step: int, rank: int) -> dict[str, np.ndarray]:
    """Return gradients that float16 and bfloat16 hold exactly, so that dtypes and drivers can be compared."""
    return {
        name: _drawn((step, rank, number), tuple(shape)).copy() for number, (name, shape) in enumerate(shapes.items())
    }


@lru_cache(maxsize=4096)
def _drawn(seed: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    values = np.asarray(np.random.default_rng(seed).standard_t(3, size=shape), np.float32)
    values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).clip(-100, 100)
    return np.where(np.abs(values) < 1e-3, np.float32(0), values)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Context manager for the lines that this rank logs, warnings that were given before included."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.warn_once.cache_clear()
    log.LOGGER.addHandler(handler)
    try:
        yield lines
    finally:
        log.LOGGER.removeHandler(handler)


def assert_close(got: dict, want: dict, tolerance: tuple[float, float], what: str) -> None:
    """Check that names, shapes, dtypes and numbers are equal.

    Args:
        got: arrays by name.
        want: arrays by name.
        tolerance: relative, and absolute in units of the array's largest magnitude.
        what: said in the error.
    """
    assert got.keys() == want.keys(), what
    rtol, atol = tolerance
    for name in want:
        assert got[name].dtype == want[name].dtype and got[name].shape == want[name].shape, (what, name)
        greatest = float(np.abs(want[name]).max(initial=0)) if np.isfinite(want[name]).all() else 1.0
        np.testing.assert_allclose(got[name], want[name], rtol, atol * greatest, err_msg=f"{what}, {name}")


def assert_same_on_all_ranks(arrays: dict[str, np.ndarray], gather: Callable[[Any], list[Any]], what: str) -> None:
    """Check that all ranks have the same bits. ``gather`` returns every rank's object."""
    everyone = gather({name: array.tobytes() for name, array in arrays.items()})
    for name in arrays:
        assert len({one[name] for one in everyone}) == 1, f"{what}: ranks differ in {name}"


def assert_same_state(a: dict, b: dict, what: str) -> None:
    """Check that two saved states are equal, to the bit."""
    assert a.keys() == b.keys() and a["steps"] == b["steps"] and a["restarts"] == b["restarts"], what
    assert a["state"].keys() == b["state"].keys(), what
    for name in a["state"]:
        assert_same_slots(a, b, name, what)


def assert_same_slots(a: dict, b: dict, name: str, what: str) -> None:
    """Check that two saved states are equal for one tensor, to the bit."""
    for table in ("steps", "restarts"):
        assert a[table].get(name) == b[table].get(name), (what, table, name)
    ours, theirs = a["state"].get(name, {}), b["state"].get(name, {})
    assert ours.keys() == theirs.keys(), (what, name)
    for slot, array in ours.items():
        np.testing.assert_array_equal(array, theirs[slot], err_msg=f"{what}, {name}, {slot}")


def must_raise(
    kind: Any, words: list[str], run: Callable[[], object], gather: Callable[[str], list[str]], same: bool = True
) -> str:
    """Check that ``run`` raises on every rank, with these words in the message; return this rank's message.

    Args:
        kind: the type of the exception, or a tuple of types.
        words: parts of the message.
        run: what is tried.
        gather: returns every rank's message.
        same: whether the messages of all ranks must be equal.
    """
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


def state_of(compressor: Any) -> dict[str, Any]:
    """Return the saved state of this rank as plain data; a Compressor of PyTorch has it as bytes."""
    saved = compressor.state_dict()
    return saved if "format" in saved else checkpoint.from_bytes(*saved.values())
