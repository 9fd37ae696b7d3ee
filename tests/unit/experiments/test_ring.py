"""The ring all-reduce: its sums against numpy's, its bytes against the formula, and what a codec does to both."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import numpy as np
import pytest

from experiments.ring import algorithm
from experiments.ring.algorithm import simulate
from experiments.ring.codecs import Chosen, Dense, Projection, Recoded
from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec
from hvdcompress.ops import fast
from hvdcompress.parts import codecs, matrices, seed

WORLD_SIZES = (1, 2, 3, 4, 7)
SIZES = (0, 1, 2, 7, 64, 1001)
CODECS = ("fp16", "bf16", "qsgd4", "qsgd8", "rangefloat8", "rangefloat12m7")


def vectors(n: int, world_size: int, number: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng([n, world_size, number])
    return [rng.standard_normal(n).astype(np.float32) for _ in range(world_size)]


def turns(n: int, world_size: int, step: int = 0) -> list[Context]:
    return [Context(rank, world_size, step, TensorSpec("w", (n,))) for rank in range(world_size)]


def recoded(name: str, n: int, world_size: int, step: int = 0) -> list[Recoded]:
    return [Recoded(codecs.codec(name), ctx) for ctx in turns(n, world_size, step)]


def orthonormal(d: int, size: int) -> np.ndarray:
    rows = np.linalg.qr(np.random.default_rng(d).standard_normal((size, d)))[0].T
    return np.ascontiguousarray(rows, np.float32)


def assert_equal_on_all_ranks(sums: list[algorithm.RingSum]) -> None:
    assert len({one.total.tobytes() for one in sums}) == 1
    assert len({one.payload for one in sums}) == 1


def assert_bytes(sums: list[algorithm.RingSum], segment: list[int]) -> None:
    """Each rank sends every segment but one, twice: 2(p − 1)/p of the payload if they are equal."""
    world_size, payload = len(sums), sum(segment)
    assert {one.payload for one in sums} == {payload}
    assert sum(one.sent for one in sums) == 2 * (world_size - 1) * payload
    for rank, one in enumerate(sums):
        assert one.sent == 2 * payload - segment[(rank + 1) % world_size] - segment[(rank + 2) % world_size]
        if len(set(segment)) == 1:
            assert one.sent == 2 * (world_size - 1) / world_size * payload


# -- the plain ring ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("n", SIZES)
def test_dense(world_size: int, n: int) -> None:
    xs = vectors(n, world_size)
    before = [x.copy() for x in xs]
    sums = simulate(xs, [Dense()] * world_size)
    assert_equal_on_all_ranks(sums)
    np.testing.assert_allclose(sums[0].total, np.sum(xs, axis=0, dtype=np.float64), rtol=1e-5, atol=1e-5)
    assert_bytes(sums, [4 * (stop - start) for start, stop in algorithm.segments(n, world_size)])
    for x, copy in zip(xs, before, strict=True):
        np.testing.assert_array_equal(x, copy)


def test_whole_numbers_come_out_exactly() -> None:
    xs = [np.arange(1003, dtype=np.float32) * (rank + 1) for rank in range(5)]
    np.testing.assert_array_equal(simulate(xs, [Dense()] * 5)[3].total, 15 * np.arange(1003, dtype=np.float32))


@pytest.mark.parametrize("grain", (1, 3, 64))
@pytest.mark.parametrize("n", SIZES)
def test_segments_cover_the_vector_in_whole_grains(n: int, grain: int) -> None:
    for world_size in WORLD_SIZES:
        bounds = algorithm.segments(n, world_size, grain)
        assert len(bounds) == world_size and bounds[0][0] == 0 and bounds[-1][1] == n
        assert all(a[1] == b[0] for a, b in zip(bounds, bounds[1:], strict=False))
        assert all(start % grain == 0 or start == n for start, _ in bounds)
        grains = [-(-(stop - start) // grain) for start, stop in bounds]
        assert max(grains) - min(grains) <= 1


def test_a_segment_is_compressed_while_another_one_is_on_its_way() -> None:
    """Algorithm 1: each transfer overlaps with the compression of a segment, or with the decompression of one."""
    events: list[str] = []

    class Watched(Dense):
        def prepare(self, x: np.ndarray, start: int) -> np.ndarray:
            events.append("compress")
            return super().prepare(x, start)

        def decode(self, payload: np.ndarray, start: int, stop: int) -> np.ndarray:
            events.append("decompress")
            return super().decode(payload, start, stop)

    def exchange(payload: np.ndarray, num_bytes: int) -> Callable[[], np.ndarray]:
        assert len(payload) == num_bytes == 8
        events.append("send")
        return lambda: events.append("receive") or np.ones(2, np.float32).view(np.uint8)

    algorithm.ring(np.ones(8, np.float32), Watched(), 1, 4, exchange)
    assert events == [
        "compress",
        *["send", "compress", "receive"] * 3,
        *["send", "decompress", "receive"] * 3,
        "decompress",
    ]


# -- payloads that add -------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_chosen_values(world_size: int) -> None:
    for n in (1, 7, 1001):
        ctx = turns(n, world_size)[0]
        for k in {1, n // 3 or 1, n}:
            index = seed.distinct_indices(seed.shared_key(ctx), k, n)
            xs = vectors(n, world_size)
            sums = simulate(xs, [Chosen(index)] * world_size)
            assert_equal_on_all_ranks(sums)
            want = np.zeros(n)
            want[index] = np.sum(xs, axis=0, dtype=np.float64)[index]
            np.testing.assert_allclose(sums[0].total, want, rtol=1e-5, atol=1e-5)
            assert sums[0].payload == 4 * k
            inside = [((a <= index) & (index < b)).sum() for a, b in algorithm.segments(n, world_size)]
            assert_bytes(sums, [4 * int(count) for count in inside])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("n", (0, 5, 24, 24 * 8, 24 * 9 + 7))
@pytest.mark.parametrize("with_mean", (False, True))
def test_projection(world_size: int, n: int, with_mean: bool) -> None:
    """Σ Q(x) = Q(Σ x): as if the sum had been compressed, by the formula of the paper in float64."""
    size, d = 24, 5
    basis, xs = orthonormal(d, size), vectors(n, world_size)
    whole = n // size * size
    mean = np.random.default_rng(9).standard_normal(whole).astype(np.float32) if with_mean else None
    sums = simulate(xs, [Projection(basis, world_size, mean)] * world_size)
    assert_equal_on_all_ranks(sums)
    want = np.sum(xs, axis=0, dtype=np.float64)
    mu = (np.zeros(whole) if mean is None else mean.astype(np.float64)).reshape(-1, size)
    u = basis.astype(np.float64)
    want[:whole] = ((want[:whole].reshape(-1, size) - mu) @ u.T @ u + mu).reshape(-1)
    np.testing.assert_allclose(sums[0].total, want, rtol=1e-5, atol=2e-5)
    per_segment = [(b - a) // size * d + (b - a) % size for a, b in algorithm.segments(n, world_size, size)]
    assert_bytes(sums, [4 * count for count in per_segment])
    assert sums[0].payload == 4 * (n // size * d + n % size)


def test_projection_of_what_lies_in_it_loses_nothing() -> None:
    basis, world_size = orthonormal(3, 16), 3
    xs = [(np.random.default_rng(r).standard_normal((10, 3)) @ basis).reshape(-1).astype(np.float32) for r in range(3)]
    sums = simulate(xs, [Projection(basis, world_size)] * world_size)
    np.testing.assert_allclose(sums[1].total, np.sum(xs, axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("paper,order", [(True, "hwio"), (False, "oihw")])
def test_gradiveq_around_the_ring_is_gradiveq_by_all_reduce(paper: bool, order: matrices.Order) -> None:
    world_size, shape = 3, (8, 4, 3, 3)
    method = {"dense_steps": 4, "compressed_steps": 6, "slice_elements": 32, "paper": paper}
    net = Loopback("gradiveq", world_size=world_size, min_elements=1, **method)
    rng = np.random.default_rng(0)
    base = rng.standard_normal((2, *shape)).astype(np.float32)
    for _ in range(5):
        grads = [np.tensordot(rng.standard_normal(2), base, 1).astype(np.float32) for _ in range(world_size)]
        state = dict(net.ranks[0].states["w"].slots) if net.ranks[0].states else {}  # before the step
        sent = net.ledger.bytes_sent(rank=0)
        want = net.allreduce(grads, name="w", op="sum")[0]
    d, spec = int(state["rank"][0]), TensorSpec("w", shape)
    basis = state["basis"][: d * 32].reshape(d, 32)
    xs = [matrices.arranged(grad.reshape(-1), spec, fast, order) for grad in grads]
    sums = simulate(xs, [Projection(basis, world_size, state.get("mean"))] * world_size)
    got = matrices.stored_order(sums[0].total, spec, fast, order).reshape(shape)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert sums[0].payload == net.ledger.bytes_sent(rank=0) - sent


# -- payloads that do not ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("n", SIZES)
def test_recoded(name: str, world_size: int, n: int) -> None:
    xs, codec = vectors(n, world_size), codecs.codec(name)
    sums = simulate(xs, recoded(name, n, world_size))
    assert_equal_on_all_ranks(sums)
    assert_bytes(sums, [codec.num_bytes(b - a) for a, b in algorithm.segments(n, world_size)])
    # each of p roundings errs by at most a step of the codec, of the greatest partial sum of all
    step = {"fp16": 2**-11, "bf16": 2**-8, "qsgd4": 1 / 7, "qsgd8": 1 / 127, "rangefloat8": 2**-5}.get(name, 2**-8)
    greatest = np.abs(xs).sum(axis=0).max(initial=0) if n else 0.0
    error = np.abs(sums[0].total - np.sum(xs, axis=0, dtype=np.float64))
    assert (error <= 2 * world_size * step * greatest + 1e-6).all()


def test_recoded_by_a_codec_that_loses_nothing_is_the_plain_ring() -> None:
    xs = vectors(101, 6)
    want = simulate(xs, [Dense()] * 6)
    got = simulate(xs, recoded("fp32", 101, 6))
    assert [one.total.tobytes() for one in got] == [one.total.tobytes() for one in want]
    assert [one.sent for one in got] == [one.sent for one in want]


def test_quantized_components_of_a_projection() -> None:
    xs, p = vectors(24 * 9 + 7, 3), 3
    plain = Projection(orthonormal(5, 24), p)
    want = simulate(xs, [plain] * p)
    exact, eight = (
        simulate(xs, [Recoded(codecs.codec(name), ctx, plain) for ctx in turns(len(xs[0]), p)])
        for name in ("fp32", "qsgd8")
    )
    assert [one.total.tobytes() for one in exact] == [one.total.tobytes() for one in want]
    assert_equal_on_all_ranks(eight)
    assert eight[0].payload < want[0].payload / 2
    assert 0 < np.linalg.norm(eight[0].total - want[0].total) < 0.05 * np.linalg.norm(want[0].total)


def test_stochastic_rounding_stays_unbiased_around_the_ring() -> None:
    """The mean of 400 sums comes within 5 standard errors."""
    xs, n, world_size, trials = vectors(64, 4), 64, 4, 400
    totals = np.array([simulate(xs, recoded("qsgd4", n, world_size, step))[0].total for step in range(trials)])
    bias = totals.mean(0) - np.sum(xs, axis=0, dtype=np.float64)
    assert (np.abs(bias) <= 5 * totals.std(0) / np.sqrt(trials) + 1e-6).all()


@pytest.mark.parametrize("name", ["bf16", "qsgd4", "rangefloat8"])
@pytest.mark.parametrize("world_size", [2, 8, 32])
def test_errors_grow_around_the_ring(name, world_size) -> None:
    """Rounded p times, each time by a share of a partial sum, √i for i vectors: √(Σ i/p) = √((p + 1)/2) times more."""
    xs, ranks = vectors(8192, world_size), recoded(name, 8192, world_size)
    once = [rank.decode(rank.add(None, x, 0), 0, 8192) for x, rank in zip(xs, ranks, strict=True)]
    around, gathered = simulate(xs, ranks)[0].total, np.sum(once, axis=0, dtype=np.float64)
    exact = np.sum(xs, axis=0, dtype=np.float64)
    growth = np.linalg.norm(around - exact) / np.linalg.norm(gathered - exact)
    assert growth == pytest.approx(np.sqrt((world_size + 1) / 2), rel=0.25)


def test_doctest() -> None:
    failed, tried = doctest.testmod(algorithm)
    assert tried and not failed
