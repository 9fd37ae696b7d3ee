"""The ring all-reduce: sums against numpy, bytes against the formula 2(p − 1)/p, and the effect of codecs on both."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest

from experiments.ring import algorithm
from experiments.ring.codecs import Dense, Projection, Recoded
from hvdcompress.method import Context, TensorSpec
from hvdcompress.parts import codecs
from tests.oracles.ring import simulate

#: step of each number format, relative to the largest value
STEPS = {"bf16": 2**-8, "qsgd4": 1 / 7, "rangefloat8": 2**-5, "rangefloat12m7": 2**-8}
DENSE = Dense()
worlds = pytest.mark.parametrize("world_size,n", [(1, 7), (2, 0), (3, 1), (4, 64), (7, 1001)])


def vectors(n: int, world_size: int) -> list[np.ndarray]:
    return list(np.random.default_rng([n, world_size]).standard_normal((world_size, n)).astype(np.float32))


def recoded(name: str, n: int, world_size: int, values: Dense = DENSE) -> list[Recoded]:
    spec = TensorSpec("w", (n,))
    return [Recoded(codecs.codec(name), Context(rank, world_size, 0, spec), values) for rank in range(world_size)]


def orthonormal(d: int, size: int) -> np.ndarray:
    return np.ascontiguousarray(np.linalg.qr(np.random.default_rng(d).standard_normal((size, d)))[0].T, np.float32)


def assert_equal_on_all_ranks(sums: list[algorithm.RingSum], segment_bytes: list[int]) -> None:
    """Check the totals and the bytes: each rank sends every segment but one in each of the two phases."""
    world_size, payload = len(sums), sum(segment_bytes)
    assert len({one.total.tobytes() for one in sums}) == 1
    assert {one.payload for one in sums} == {payload}
    for rank, one in enumerate(sums):
        assert one.sent == 2 * payload - segment_bytes[(rank + 1) % world_size] - segment_bytes[(rank + 2) % world_size]


@worlds
def test_sums_of_all_values(world_size: int, n: int) -> None:
    xs, spans = vectors(n, world_size), algorithm.segments(n, world_size)
    exact = np.sum(xs, axis=0, dtype=np.float64)
    dense = simulate(xs, [DENSE] * world_size)
    np.testing.assert_allclose(dense[0].total, exact, rtol=1e-5, atol=1e-5)
    assert_equal_on_all_ranks(dense, [4 * (stop - start) for start, stop in spans])


def test_compression_of_a_segment_overlaps_with_the_transfer_of_another_one() -> None:
    """Algorithm 1 of GradiVeQ's paper."""
    receive = Mock(return_value=np.ones(2, np.float32).view(np.uint8))
    watched = Mock(prepare=Mock(wraps=DENSE.prepare), decode=Mock(wraps=DENSE.decode), send=Mock(return_value=receive))
    watched.attach_mock(receive, "receive")
    codec = Dense()
    codec.prepare, codec.decode = watched.prepare, watched.decode
    algorithm.ring(np.ones(8, np.float32), codec, 1, 4, watched.send)
    reduce_scatter = ["prepare", *["send", "prepare", "receive"] * 3]
    events = [name for name, *_ in watched.method_calls]
    assert events == [*reduce_scatter, *["send", "decode", "receive"] * 3, "decode"]


@pytest.mark.parametrize("world_size,n", [(1, 24 * 8), (2, 5), (4, 24 * 9 + 7)])
def test_a_projection_of_the_sum_is_the_sum_of_projections(world_size: int, n: int) -> None:
    """Σ Q(x) = Q(Σ x), with the formula of the paper in float64."""
    size, d = 24, 5
    basis, xs = orthonormal(d, size), vectors(n, world_size)
    whole = n // size * size
    projection = Projection(basis, world_size)
    sums = simulate(xs, [projection] * world_size)
    want, u = np.sum(xs, axis=0, dtype=np.float64), basis.astype(np.float64)
    want[:whole] = (want[:whole].reshape(-1, size) @ u.T @ u).reshape(-1)
    np.testing.assert_allclose(sums[0].total, want, rtol=1e-5, atol=2e-5)
    spans = algorithm.segments(n, world_size, size)
    assert_equal_on_all_ranks(sums, [4 * ((b - a) // size * d + (b - a) % size) for a, b in spans])
    [lossless, *_] = simulate(xs, recoded("fp32", n, world_size, projection))
    assert lossless.total.tobytes() == sums[0].total.tobytes(), "components in a codec"


@pytest.mark.parametrize("name", STEPS)
@worlds
def test_recoded_sums_err_by_a_step_per_hop(name: str, world_size: int, n: int) -> None:
    xs = vectors(n, world_size)
    sums = simulate(xs, recoded(name, n, world_size))
    num_bytes = codecs.codec(name).num_bytes
    assert_equal_on_all_ranks(sums, [num_bytes(b - a) for a, b in algorithm.segments(n, world_size)])
    largest = np.abs(xs).sum(axis=0).max(initial=0)
    error = np.abs(sums[0].total - np.sum(xs, axis=0, dtype=np.float64))
    assert (error <= 2 * world_size * STEPS[name] * largest + 1e-6).all()


@pytest.mark.parametrize("name,world_size", [("bf16", 2), ("qsgd4", 8)])
def test_errors_grow_around_the_ring(name: str, world_size: int) -> None:
    """Hop i rounds a partial sum of norm √i: the error is √((p + 1)/2) times that of vectors rounded once.

    It would grow faster if the hops drew the same random numbers, or rounded with a bias.
    """
    xs, ranks = vectors(8192, world_size), recoded(name, 8192, world_size)
    once = [rank.decode(rank.add(None, x, 0), 0, 8192) for x, rank in zip(xs, ranks, strict=True)]
    exact = np.sum(xs, axis=0, dtype=np.float64)
    growth = np.linalg.norm(simulate(xs, ranks)[0].total - exact) / np.linalg.norm(np.sum(once, axis=0) - exact)
    assert growth == pytest.approx(np.sqrt((world_size + 1) / 2), rel=0.25)
