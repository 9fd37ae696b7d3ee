"""Compare one step of a driver with the loopback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdcompress.testing import Trial
from tests.ranks.checks import assert_close, assert_same_on_all_ranks, summed
from tests.ranks.drivers.base import Arrays, Driver


def assert_reduced(
    driver: Driver,
    got: Mapping[str, Any],
    net: Trial,
    everyone: Sequence[Arrays],
    what: object = "",
    tolerance: tuple[float, float] | None = None,
    op: str = "average",
) -> None:
    """Check that a step's result is the loopback's, and has the same bits on all ranks.

    Args:
        driver: the driver on this rank.
        got: the reduced gradients by name.
        net: the loopback, which reduces the same gradients now.
        everyone: the gradients of each rank.
        what: said in the error.
        tolerance: as for :func:`assert_close`; by default that of a sum over ranks.
        op: "average" or "sum".
    """
    found = {name: np.array(array) for name, array in got.items()}
    want = net.allreduce(everyone, op=op)[driver.rank]
    assert_close(found, want, tolerance or summed(driver.world_size), str(what))
    assert_same_on_all_ranks(found, driver.gather, str(what))
