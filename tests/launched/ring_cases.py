"""Cases of the ring over MPI, which ``experiments scale`` measures links with: it is the simulated one, to the bit."""

from __future__ import annotations

import numpy as np

from experiments.scale import ring
from hvdcompress.method import Context, TensorSpec
from hvdcompress.parts import codecs
from tests.harness import case
from tests.launched.mpi_cases import must_raise
from tests.promises.drivers.mpi import MPI

COMM = MPI.COMM_WORLD
RANK, WORLD = COMM.rank, COMM.size


@case
def the_ring_over_mpi_is_the_simulated_one() -> None:
    basis = np.ascontiguousarray(np.linalg.qr(np.random.default_rng(0).standard_normal((24, 5)))[0].T, np.float32)
    for n in (0, 1, 2, 7, 240, 5003, 200_000):
        xs = [np.random.default_rng([n, rank]).standard_normal(n).astype(np.float32) for rank in range(WORLD)]
        turns = [Context(rank, WORLD, 0, TensorSpec("w", (n,))) for rank in range(WORLD)]
        kinds: list[list[ring.SegmentCodec]] = [
            [ring.Dense()] * WORLD,
            [ring.Chosen(np.arange(0, n, 3))] * WORLD,
            [ring.Projection(basis, WORLD)] * WORLD,
            *([ring.Recoded(codecs.codec(name), ctx) for ctx in turns] for name in ("bf16", "qsgd4", "rangefloat8")),
        ]
        for each in kinds:
            want, got = ring.simulate(xs, each)[RANK], ring.ring_allreduce(xs[RANK], each[RANK], COMM)
            np.testing.assert_array_equal(got.total, want.total)
            assert (got.payload, got.sent) == (want.payload, want.sent)
    for wrong in (np.ones(3), np.ones((2, 2), np.float32), [1.0]):
        must_raise(ValueError, ["float32"], lambda w=wrong: ring.ring_allreduce(w, ring.Dense(), COMM))


@case
def a_ring_of_unequal_vectors_is_an_error_on_every_rank() -> None:
    if WORLD == 1:
        return
    x = np.arange(8, dtype=np.float32)
    other = ring.Dense() if RANK else ring.Chosen(np.arange(3))
    unequal = [f"from 5 to {4 + WORLD} elements"]
    must_raise(RuntimeError, unequal, lambda: ring.ring_allreduce(np.ones(5 + RANK, np.float32), ring.Dense(), COMM))
    must_raise(RuntimeError, ["from 12 to 32 bytes"], lambda: ring.ring_allreduce(x, other, COMM))
    wrong = x if RANK else x.astype(np.float64)
    must_raise(
        (ValueError, RuntimeError),
        ["flat float32"],
        lambda: ring.ring_allreduce(wrong, ring.Dense(), COMM),
        same=False,
    )
    np.testing.assert_array_equal(ring.ring_allreduce(x, ring.Dense(), COMM).total, WORLD * x)  # nothing is stuck
