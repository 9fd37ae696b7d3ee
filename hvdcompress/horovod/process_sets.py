"""Compressors of Horovod's process sets, under every framework: their numbers, and whether their ranks are gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hvdcompress.engine.safety.watchdog import Watchdog
from hvdcompress.launchers import is_elastic

_numbers: Counter[int] = Counter()  # {process set id: number of the next Compressor}


def number_compressor(hvd: Any, tensor: Callable[[list[int]], Any], process_set: Any, watchdog: Watchdog) -> int:
    """Return the number of a new Compressor within its process set. It is part of the names of its collectives.

    Ranks create their Compressors in the same order, and ranks outside of a set create none. But a rank that joins an
    elastic training starts to count at 0, so there the ranks agree on the largest number.

    Args:
        hvd: Horovod's module for the framework.
        tensor: makes a tensor of the framework.
        process_set: the process set.
        watchdog: watchdog of the new Compressor.
    """
    set_id = process_set.process_set_id
    number = _numbers[set_id]
    if is_elastic():
        name = f"hvdcompress.set{set_id}.number"
        with watchdog.rendezvous("every rank's Compressor"):
            number = int(hvd.allreduce(tensor([number]), name=name, op=hvd.Max, process_set=process_set)[0])
    _numbers[set_id] = number + 1
    return number


def has_changed(process_set: Any, world_size: int) -> bool:
    """Return whether a process set has changed its number of ranks, or Horovod was shut down."""
    try:
        return bool(process_set.size() != world_size)
    except ValueError:
        return True
