"""Every rank: the ring over MPI equals the simulated one to the bit, and ranks that differ get an error."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from experiments.ring.algorithm import ring_allreduce
from experiments.ring.codecs import Dense, Projection, Recoded, SegmentCodec
from hvdcompress.method import Context, TensorSpec
from hvdcompress.parts import codecs
from tests.oracles.ring import simulate

COMM = MPI.COMM_WORLD
RANK, WORLD = COMM.rank, COMM.size
PROJECTION = Projection(np.eye(5, 24, dtype=np.float32), WORLD)
PROJECTION_OF_4 = Projection(np.eye(1, 4, dtype=np.float32), WORLD)

for n in (0, 1, 5003, 200_000):
    xs = np.random.default_rng(n).standard_normal((WORLD, n)).astype(np.float32)
    contexts = [Context(rank, WORLD, 0, TensorSpec("w", (n,))) for rank in range(WORLD)]
    kinds: list[list[SegmentCodec]] = [
        [Dense()] * WORLD,
        [Recoded(codecs.codec("qsgd4"), context) for context in contexts],
        [Recoded(codecs.codec("qsgd8"), context, PROJECTION) for context in contexts],
    ]
    for each in kinds:
        want = simulate(list(xs), each)[RANK]
        got = ring_allreduce(xs[RANK], each[RANK], COMM)
        assert (got.total.tobytes(), got.payload, got.sent) == (want.total.tobytes(), want.payload, want.sent)

x = np.arange(8, dtype=np.float32)
with pytest.raises(ValueError, match="flat float32 arrays; rank 0"):
    ring_allreduce(x if RANK else x.astype(np.float64), Dense(), COMM)
with pytest.raises(ValueError, match=r"\(5, 20\), \(6, 24\)"):
    ring_allreduce(np.ones(5 + RANK, np.float32), Dense(), COMM)
with pytest.raises(ValueError, match=r"\(8, 8\), \(8, 32\)"):
    ring_allreduce(x, Dense() if RANK else PROJECTION_OF_4, COMM)
np.testing.assert_array_equal(ring_allreduce(x, Dense(), COMM).total, WORLD * x)  # no rank is stuck
