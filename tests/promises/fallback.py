"""Compression is given up where the first steps show that it does not save time."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdcompress.engine.fallback import SCHEDULE, Fallback, Verdict
from tests.harness import assert_close, heavy_tailed, summed
from tests.promises.registry import promise

SUBJECT = "Fallback"
SHAPES = {"a": (37, 41), "b": (16, 7, 3, 5), "c": (8, 131), "d": (1,), "e": (5,)}
STEPS = sum(count for _, count in SCHEDULE) + 4
SETTINGS = {"method": "topk", "density": 0.1, "min_elements": 100, "fallback": True, "seed": 3}


def _make(driver: Any, compressed: float, dense: float, **settings: Any) -> Any:
    """Return a handle whose steps seem to take so many seconds."""
    handle = driver.make({**SETTINGS, **settings}, {}, SHAPES)
    local = handle.compressor.local

    now = 0.0

    def note(began: float, ended: float) -> None:
        nonlocal now
        assert ended > began
        seconds = dense if local.fallback.uncompressed else compressed
        Fallback.note(local.fallback, now, now + seconds)
        now += seconds

    local.fallback.note = note
    return handle


def _gradients(driver: Any, step: int) -> list[dict[str, np.ndarray]]:
    return [heavy_tailed(SHAPES, step, rank) for rank in range(driver.world_size)]


def _mean(everyone: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    sums = {name: sum(each[name].astype(np.float64) for each in everyone) for name in SHAPES}
    return {name: (total / len(everyone)).astype(np.float32) for name, total in sums.items()}


@promise(ranks=2)
def compression_is_given_up_where_it_does_not_pay(driver: Any) -> None:
    """With `fallback: true`, some of the first steps are exchanged uncompressed. If steps with compression do not take
    less time on the slowest rank, one step brings all residuals, so that nothing is lost, and from then on results are
    the exact averages. A Compressor that loads the state does not compare again."""
    handle = _make(driver, compressed=0.2 + 0.1 * driver.rank, dense=0.25)
    compressor, fallback = handle.compressor, handle.compressor.local.fallback
    total = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    exact = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    flushed = -1
    for step in range(STEPS):
        everyone = _gradients(driver, step)
        before, was_exact = fallback.verdict, compressor.local.fallback.uncompressed
        got = handle.reduce(everyone[driver.rank])
        mean = _mean(everyone)
        if was_exact:
            assert_close(got, mean, summed(driver.world_size), f"step {step}")
        if before is Verdict.FLUSH:
            flushed = step
        for name in SHAPES:
            total[name] += got[name]
            exact[name] += mean[name]
        if before is not Verdict.DENSE and fallback.verdict is Verdict.DENSE:
            for name in SHAPES:
                np.testing.assert_allclose(total[name], exact[name], rtol=1e-4, atol=1e-4 * np.abs(exact[name]).max())
    assert fallback.verdict is Verdict.DENSE and flushed > 0
    assert "given up" in compressor.describe()
    before = compressor.ledger.bytes_sent()
    handle.reduce(_gradients(driver, STEPS)[driver.rank])
    sent = compressor.ledger.bytes_sent() - before
    dense = sum(4 * int(np.prod(shape)) for shape in SHAPES.values())
    # With two levels, some drivers still exchange among all ranks here, and others among the owners of tensors
    of_node = driver.of_node(sent)
    sums = (sent, sum(of_node)) if driver.nodes else (sent,)
    assert any(dense <= each <= dense + 200 * len(of_node) for each in sums), "what is sent uncompressed is counted"
    compressor.discard()  # of an uncompressed step there is nothing to take back
    saved = compressor.state_dict()
    handle.close()
    other = driver.make(SETTINGS, {}, SHAPES)
    other.compressor.load_state_dict(saved)
    everyone = _gradients(driver, STEPS)
    assert_close(other.reduce(everyone[driver.rank]), _mean(everyone), summed(driver.world_size), "after loading")
    other.close()


@promise(ranks=2)
def compression_is_kept_where_it_pays(driver: Any) -> None:
    """With `fallback: true`, a single uncompressed step of seconds is enough to keep compression, and steps that are
    compared leave residuals and step counts as they are, as a pause does."""
    handle = _make(driver, compressed=0.1, dense=3.0)
    plain = driver.make({**SETTINGS, "fallback": False}, {}, SHAPES)
    local = handle.compressor.local
    uncompressed = 0
    for step in range(STEPS):
        everyone = _gradients(driver, step)
        is_exact = local.fallback.uncompressed
        got = handle.reduce(everyone[driver.rank])
        if is_exact:
            uncompressed += 1
            assert_close(got, _mean(everyone), summed(driver.world_size), f"step {step}")
        else:
            want = plain.reduce(everyone[driver.rank])
            for name in SHAPES:
                np.testing.assert_array_equal(got[name], want[name], err_msg=f"step {step}, {name}")
    assert uncompressed == 1 and local.fallback.verdict is Verdict.COMPRESS
    assert "kept" in handle.compressor.describe()
    handle.close()
    plain.close()


@promise(ranks=2)
def uncompressed_steps_are_clipped_too(driver: Any) -> None:
    """With `fallback: true` and `clip_norm`, steps that are compared, and those after compression was given up, are
    clipped as compressed ones are."""
    handle = _make(driver, compressed=0.3, dense=0.2, clip_norm=0.5)
    fallback = handle.compressor.local.fallback
    for step in range(STEPS):
        everyone = _gradients(driver, step)
        is_exact = fallback.uncompressed
        got = handle.reduce(everyone[driver.rank])
        norm = np.sqrt(sum(float((each.astype(np.float64) ** 2).sum()) for each in got.values()))
        assert norm <= 0.5 * (1 + 1e-5), step
        if is_exact:
            mean = _mean(everyone)
            whole = np.sqrt(sum(float((each.astype(np.float64) ** 2).sum()) for each in mean.values()))
            assert abs(handle.compressor.gradient_norm() - whole) < 1e-4 * whole
            clipped = {name: (each * (0.5 / (whole + 1e-6))).astype(np.float32) for name, each in mean.items()}
            for name in SHAPES:
                np.testing.assert_allclose(got[name], clipped[name], rtol=1e-4, atol=1e-7)
    assert fallback.verdict is Verdict.DENSE
    handle.close()
