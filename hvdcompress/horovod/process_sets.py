"""What Compressors under Horovod share, whatever the framework: numbers in process sets, and stock all-reduces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import isclose
from typing import Any

from hvdcompress.engine.agreement import JOIN_MESSAGE, PeerError
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


def factor_of(probe: Sequence[float], world_size: int) -> float:
    """Find out from a probe whether a stock all-reduce averages or sums.

    Args:
        probe: the reduced probe. Rank r contributed [1/p, (r + 1)/p²].
        world_size: number of ranks, p.

    Returns:
        1/p for an average, 1 for a sum.

    Raises:
        PeerError: the all-reduce does anything else, or not all ranks contributed.
    """
    # Two numbers, because Min, Max and Product can give one of the expected values for the first, but not for both
    for factor in (1.0 / world_size, 1.0):
        second = factor * (world_size + 1) / (2 * world_size)
        if isclose(probe[0], factor, rel_tol=0.01) and isclose(probe[1], second, rel_tol=0.01):
            return factor
    raise PeerError(
        "gradients were neither averaged nor summed over all ranks; set the optimizer's op to hvd.Average or hvd.Sum "
        f"(Min, Max, Product and Adasum are not supported). Also, {JOIN_MESSAGE}"
    )
