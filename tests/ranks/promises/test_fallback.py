"""Compression ends where the first steps show that it does not save time."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcompress.engine.fallback import REPEATS, SCHEDULE, SPREAD, Fallback, Verdict
from tests.ranks.checks import assert_close, state_of, summed

STEPS = sum(count for _, count in SCHEDULE) + SPREAD + REPEATS + 4
SETTINGS = {"method": "topk", "density": 0.1, "min_elements": 100, "fallback": True, "seed": 3}

pytestmark = [
    pytest.mark.excepted("loopback", "all ranks are in one process, so there is nothing to gain"),
    pytest.mark.excepted("tensorflow", "a graph has the collectives of the plan's methods; a warning says so"),
]


def make(driver, compressed, dense, **settings):
    """Return a Compressor whose steps seem to take these times, in seconds."""
    handle = driver.make({**SETTINGS, **settings}, {}, driver.shapes)
    fallback, now = handle.compressor.rank_state.fallback, 0.0

    def note(began, ended):
        nonlocal now
        assert ended > began
        seconds = dense if fallback.uncompressed else compressed
        Fallback.note(fallback, now, now + seconds)
        now += seconds

    fallback.note = note
    return handle


def mean(everyone):
    sums = {name: sum(each[name].astype(np.float64) for each in everyone) for name in everyone[0]}
    return {name: (total / len(everyone)).astype(np.float32) for name, total in sums.items()}


def norm(arrays):
    return np.sqrt(sum(float((each.astype(np.float64) ** 2).sum()) for each in arrays.values()))


def test_compression_ends_where_it_does_not_pay(driver):
    """With ``fallback: true``, some of the first steps are exchanged uncompressed.

    If compressed steps take no less time on the slowest rank, some steps also send the residuals, so that nothing is
    lost, and from then on results are the exact averages. A Compressor that loads the state does not compare again.
    """
    handle = make(driver, compressed=0.2 + 0.1 * driver.rank, dense=0.25)
    compressor, fallback = handle.compressor, handle.compressor.rank_state.fallback
    total, exact = ({name: np.zeros(shape) for name, shape in driver.shapes.items()} for _ in range(2))
    verdicts = []
    for step in range(STEPS):
        everyone = driver.everyone(step, driver.shapes)
        verdicts.append(fallback.verdict)
        was_exact = fallback.uncompressed
        got = handle.reduce(everyone[driver.rank])
        if was_exact:
            assert_close(got, mean(everyone), summed(driver.world_size), f"step {step}")
        for name, array in mean(everyone).items():
            total[name] += got[name]
            exact[name] += array
        if verdicts[-1] is not Verdict.DENSE and fallback.verdict is Verdict.DENSE:
            assert_close(total, exact, (1e-4, 1e-4), "all gradients so far")
    assert fallback.verdict is Verdict.DENSE and Verdict.FLUSH in verdicts[1:]
    assert "given up" in compressor.describe()
    before = compressor.ledger.bytes_sent()
    handle.reduce(driver.gradients(STEPS, driver.shapes))
    sent = compressor.ledger.bytes_sent() - before
    dense = sum(4 * int(np.prod(shape)) for shape in driver.shapes.values())
    # With two levels, some drivers still exchange among all ranks here, and others among the owners of tensors
    of_node = driver.of_node(sent)
    sums = (sent, sum(of_node)) if driver.nodes else (sent,)
    assert any(dense <= each <= dense + 200 * len(of_node) for each in sums), "what is sent uncompressed is counted"
    compressor.discard()  # an uncompressed step has nothing to discard
    saved = state_of(compressor)
    handle.close()
    other = driver.make(SETTINGS, {}, driver.shapes)
    other.compressor.load_state_dict(saved)
    everyone = driver.everyone(STEPS, driver.shapes)
    assert_close(other.reduce(everyone[driver.rank]), mean(everyone), summed(driver.world_size), "after loading")
    other.close()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_residuals_are_sent_although_steps_are_discarded(driver, dtype):
    """In shares that hardly change the norm, so that a guard by the norm does not skip them. float16's range puts a
    part back into the residuals, which is sent in the next steps."""
    shapes = {"w": (40, 30)}
    handle = driver.make({**SETTINGS, "density": 0.01}, {}, shapes, dtype=dtype)
    fallback = handle.compressor.rank_state.fallback
    fallback.note = lambda began, ended: None
    size = 50000.0 if dtype == "float16" else 1.0
    everyone = [{"w": np.full(shapes["w"], size, dtype)}] * driver.world_size
    total, count, previous, norms = np.zeros(shapes["w"]), 0, Verdict.OPEN, []
    while fallback.verdict is not Verdict.DENSE or previous is not Verdict.DENSE:
        if count == 12:
            fallback.verdict = Verdict.FLUSH
        previous = fallback.verdict
        got = handle.reduce(everyone[driver.rank])
        if len(norms) in (0, SPREAD, SPREAD + REPEATS - 1) and previous is Verdict.FLUSH:
            norms.append(0.0)  # each of these steps is discarded once
            handle.compressor.discard()
            continue
        total += got["w"]
        count += 1
        if previous is Verdict.FLUSH:
            norms.append(norm(got))
    assert len(norms) - 3 >= SPREAD + REPEATS and max(norms) < 2 * norm(everyone[0])
    np.testing.assert_allclose(total, count * size, rtol=1e-3)
    handle.close()


def test_compression_is_kept_where_it_pays(driver):
    """One uncompressed step of seconds is enough; it changes neither residuals nor step counts, as in a pause."""
    handle = make(driver, compressed=0.1, dense=3.0)
    plain = driver.make({**SETTINGS, "fallback": False}, {}, driver.shapes)
    fallback, uncompressed = handle.compressor.rank_state.fallback, 0
    for step in range(STEPS):
        everyone = driver.everyone(step, driver.shapes)
        is_exact = fallback.uncompressed
        uncompressed += is_exact
        got = handle.reduce(everyone[driver.rank])
        want = mean(everyone) if is_exact else plain.reduce(everyone[driver.rank])
        assert_close(got, want, summed(driver.world_size) if is_exact else (0.0, 0.0), f"step {step}")
    assert uncompressed == 1 and fallback.verdict is Verdict.COMPRESS
    assert "kept" in handle.compressor.describe()
    handle.close()
    plain.close()
