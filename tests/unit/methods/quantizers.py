"""What the tests of QSGD, signSGD and TernGrad check alike."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdcompress.loopback import Loopback
from hvdcompress.testing import numbers


def assert_errors_average_out(id: str, **settings: Any) -> None:
    """With equal gradients on p ranks and private streams, the error of the mean has 1/p of one rank's energy."""
    world_size = 16
    g = numbers((512,), 4)
    energy = []
    for p in (1, world_size):
        net = Loopback(id, world_size=p, min_elements=1, **settings)
        energy.append(np.mean([np.square(net.allreduce([g] * p, "w")[0] - g).sum() for _ in range(40)]))
    assert 0.8 / world_size < energy[1] / energy[0] < 1.25 / world_size


def assert_nothing_is_lost(id: str, atol: float, **settings: Any) -> None:
    """Σ over ranks of (sent + residual) = Σ gradients, in every step, and something is left in the residuals."""
    net = Loopback(id, world_size=3, min_elements=1, **settings)
    sent, given = np.zeros(101), np.zeros(101)
    for step in range(12):
        gradients = [numbers((101,), rank, step) for rank in range(3)]
        sent += net.allreduce(gradients, "w", op="sum")[0]
        given += np.sum(gradients, axis=0, dtype=np.float64)
        kept = np.sum([net.residual("w", rank) for rank in range(3)], axis=0, dtype=np.float64)
        np.testing.assert_allclose(sent + kept, given, atol=atol)
        assert kept.any()
