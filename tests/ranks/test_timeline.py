"""Tests of the names of collectives in Horovod's timeline."""

from __future__ import annotations

import importlib
import re
import time

import pytest

pytestmark = pytest.mark.drivers("torch", "tensorflow")

SECONDS = 20  #: Horovod writes the timeline in a thread of its own
#: Driver -> pattern of the prefix of all names, and the names of some collectives. A broadcast in PyTorch is sent as a
#: sum.
NAMES = {
    "torch": (
        r"hvdcompress\.set0\.compressor\d+",
        ("allreduce.{}.weight.round0", "allreduce.{}.weight.round1", "allreduce.{}.status.round0"),
    ),
    "tensorflow": (
        r"HorovodAllreduce\.hvdcompress\.tf\.set0\.compressor\d+",
        ("{}.weight.round0.Broadcast", "{}.weight.round1.AllReduce"),
    ),
}


def test_names_of_collectives_in_the_timeline(driver):
    """Horovod writes the timeline on rank 0 alone. Launches have ``HOROVOD_TIMELINE=DYNAMIC`` in the environment."""
    hvd, (pattern, names) = importlib.import_module(f"horovod.{driver.name}"), NAMES[driver.name]
    handle = driver.make("scalecom", {"density": 0.05}, {"weight": (37, 41), "bias": (37,)})
    prefix = handle.compressor.prefix
    assert re.fullmatch(pattern, prefix)
    file = driver.folder / "timeline.json"
    hvd.start_timeline(str(file))
    for step in range(2):
        handle.reduce(driver.gradients(step, handle.shapes))
    hvd.stop_timeline()
    wanted, shown = {name.format(prefix) for name in names}, set()
    deadline = time.monotonic() + SECONDS
    while driver.rank == 0 and not shown >= wanted:
        assert time.monotonic() < deadline, sorted(shown)
        time.sleep(0.1)
        text = file.read_text() if file.exists() else ""
        shown = set(re.findall(r'"process_name".*?"name": "([^"]*)"', text))
