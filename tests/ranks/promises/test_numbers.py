"""Dtypes, shapes, loss scales, and numbers that are very large, very small, NaN or Inf."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from tests.ranks.checks import assert_close, assert_same_slots, assert_same_state
from tests.ranks.comparison import assert_equals_loopback
from tests.ranks.exchanges import METHODS

ODD_SHAPES = {"none": (0,), "empty": (3, 0, 2), "row": (0, 5), "scalar": (), "prime": (1009,), "matrix": (64, 33)}


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_float16_and_float64_keep_their_dtype(driver, dtype):
    for method in ("none", "topk", "scalecom", "fp16")[: 3 if driver.expensive else 4]:
        assert_equals_loopback(driver, method, {}, steps=2, dtype=dtype)


@pytest.mark.excepted("loopback", "NumPy has no bfloat16")
@pytest.mark.excepted("mpi", "NumPy has no bfloat16")
def test_bfloat16_is_the_rounded_float32(driver):
    for method in ("none", "topk", "scalecom"):
        handle, net = driver.make(method, {}, driver.shapes, dtype="bfloat16"), driver.yardstick(method, {})
        for step in range(2):
            everyone = driver.everyone(step, driver.shapes)
            got, want = handle.reduce(everyone[driver.rank]), net.allreduce(everyone)[driver.rank]
            want = {name: rounded_to_bfloat16(array) for name, array in want.items()}
            if driver.exact:
                assert_close(got, want, (0.0, 0.0), f"{method}, step {step}")


def rounded_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Return float32 rounded to the nearest bfloat16, ties to even, as float32."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def test_float16_loses_nothing_that_has_waited_in_residuals(driver):
    """Residuals grow beyond what float16 can hold; they are handed over in parts."""
    steps = 15
    signs = np.sign(np.random.default_rng(0).standard_normal((40, 50)))  # of full rank
    for method, settings in (("topk", {"density": 0.02}), ("powersgd", {"matrix_rank": 1})):
        given = {"w": np.float16(8000) * (signs if method == "powersgd" else np.ones((40, 50))).astype(np.float16)}
        handle = driver.make(method, settings, {"w": (40, 50)}, dtype="float16")
        received = np.zeros((40, 50))
        for step in range(steps):
            got = handle.reduce(given)["w"]
            assert np.isfinite(got).all(), f"{method}, step {step}"
            received += got
        kept = np.mean(driver.gather(np.asarray(handle.residual("w"), np.float64)), axis=0)
        np.testing.assert_allclose(received + kept, steps * given["w"].astype(np.float64), rtol=2e-3, err_msg=method)


@pytest.mark.also("three ranks")
def test_average_of_float16_gradients_stays_within_its_range(driver):
    """The method rounds 60000 up to 65536, which is Inf in float16: every step would be skipped."""
    shapes = {"w": (30, 40)}
    handle = driver.make("natural", {"min_elements": 1}, shapes, dtype="float16")
    got = handle.reduce({"w": np.full(shapes["w"], 60000.0, np.float16)})["w"].astype(np.float32)
    assert np.isfinite(got).all() and got.max() == 65504 and abs(got.mean() - 60000) < 2000
    handle.close()


def test_odd_shapes(driver):
    """No elements, no dimensions, a prime number of elements."""
    for method in ("none", "topk", "qsgd", "scalecom", "fft", "powersgd", "oktopk")[: 4 if driver.expensive else None]:
        assert_equals_loopback(driver, method, {"min_elements": 0}, steps=2, shapes=ODD_SHAPES)


def test_float64_above_the_range_of_float32(driver):
    """``none`` sums 1e300 as float64; a float32 method treats it as an overflow, and keeps its state."""
    for method in ("none", "topk"):
        handle = driver.make(method, {"min_elements": 1}, driver.shapes, dtype="float64")
        got = handle.reduce({name: np.full(shape, 1e300) for name, shape in driver.shapes.items()})
        for name, array in got.items():
            assert (array == 1e300).all() if method == "none" else np.isnan(array).all(), (method, name)
            assert not handle.residual(name).any()


def test_denormal_numbers_are_kept(driver):
    """Numbers below 1.2e-38 are not flushed to zero, as the threads of some frameworks do."""
    for method, settings in (("none", {}), ("scalecom", {"density": 0.3})):
        handle, net = driver.make(method, settings, {"w": (1200,)}), driver.yardstick(method, settings)
        for step in range(3):
            everyone = [{"w": np.float32([1e-40 * (r + 1), 3e-42, 1e-38, 2.0] * 300)} for r in range(driver.world_size)]
            want = net.allreduce(everyone)[driver.rank]
            got = handle.reduce(everyone[driver.rank])
            if driver.exact:
                assert_close(got, want, (0.0, 0.0), f"{method}, step {step}")
        if driver.exact:
            np.testing.assert_array_equal(handle.residual("w"), net.residual("w", driver.rank))


def test_loss_scale_may_change(driver):
    """Residuals are kept unscaled: results are the unscaled ones times the loss scale."""
    now = {"scale": 1.0}
    settings = {"density": 0.02, "beta": 0.5}
    tolerance = driver.again("scalecom", settings)
    plain = driver.make("scalecom", settings, driver.shapes)
    scaled = driver.make("scalecom", settings, driver.shapes, loss_scale=lambda: now["scale"])
    for scale in (1.0, 1024.0, 65536.0):  # powers of two: exact
        now["scale"], given = scale, driver.gradients(int(scale), driver.shapes)
        want = plain.reduce(given)
        got = scaled.reduce({name: array * np.float32(scale) for name, array in given.items()})
        assert_close({n: g / np.float32(scale) for n, g in got.items()}, want, tolerance, f"scale {scale}")
    for name in driver.shapes if tolerance == (0.0, 0.0) else ():
        np.testing.assert_array_equal(scaled.residual(name), plain.residual(name))


def test_nan_on_one_rank_undoes_its_tensor(driver):
    """With NaN or Inf on one rank, the tensor is NaN on every rank, and later steps are as if it had not been."""
    for method, settings in driver.some(METHODS):
        steps_with_nan(driver, method, settings, ["a"])


@pytest.mark.excepted("tensorflow", "each gradient has a graph of its own: only that tensor is undone")
def test_nan_on_one_rank_undoes_the_whole_step(driver):
    """With NaN or Inf on one rank, all tensors are NaN on all ranks, and all state is as before."""
    for method, settings in driver.some(METHODS):
        steps_with_nan(driver, method, settings, list(driver.shapes))


def steps_with_nan(driver, method, settings, names):
    """Steps with NaN or Inf between good ones, compared with a Compressor that has only the good ones."""
    tolerance = driver.again(method, settings)
    if tolerance is None or method in driver.passes_on:
        return
    handle, control = (driver.make(method, settings, driver.shapes) for _ in range(2))
    for step in range(3):
        given = driver.gradients(step, driver.shapes)
        want, got = control.reduce(given), handle.reduce(given)
        assert_close({n: got[n] for n in names}, {n: want[n] for n in names}, tolerance, f"{method}, step {step}")
        before, bad = handle.state(), {name: array.copy() for name, array in given.items()}
        if driver.rank == driver.world_size - 1:
            bad["a"].flat[3] = np.inf if step % 2 else np.nan
        got, after = handle.reduce(bad), handle.state()
        assert all(np.isnan(got[name]).all() for name in names), f"{method}: NaN on every rank"
        for name in names:
            assert_same_slots(after, before, name, f"{method}, after a step with NaN")
    if len(names) > 1:
        assert_same_state(handle.state(), control.state(), method)
        assert handle.compressor.ledger.steps == 3, "steps with NaN do not count"


def test_numpy_error_settings_and_warning_filters_do_not_matter(driver):
    """A program may have NumPy raise errors and turn warnings into errors."""
    for method in ("topk", "powersgd", "fft"):
        handle = driver.make(method, {"min_elements": 1}, driver.shapes)
        net = driver.yardstick(method, {"min_elements": 1})
        everyone = driver.everyone(0, driver.shapes)
        for one in everyone:
            one["a"][0, :3] = 1e-42, 1e-38, 1e37  # a denormal, and a number whose square overflows
        want = net.allreduce(everyone)[driver.rank]
        with np.errstate(all="raise"), warnings.catch_warnings():
            warnings.simplefilter("error")
            got = handle.reduce(everyone[driver.rank])
        if driver.exact_with(method):
            assert_close(got, want, (0.0, 0.0), method)
