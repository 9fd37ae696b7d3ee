"""Dtypes, shapes, loss scales, and numbers that are too large, too small or none."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from tests.harness import assert_close
from tests.promises.registry import promise
from tests.promises.results import assert_all, compare
from tests.promises.variants import METHODS

SUBJECT = "Numbers"
ODD_SHAPES = {"none": (0,), "empty": (3, 0, 2), "row": (0, 5), "scalar": (), "prime": (1009,), "matrix": (64, 33)}


def rounded_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bfloat16, ties to even; as float32."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


@promise()
def float16_and_float64_go_through(driver: Any) -> None:
    """Gradients of float16 and float64 come back as such, with the loopback's numbers."""
    for dtype in ("float16", "float64"):
        for method in ("none", "topk", "scalecom", "fp16", "bf16", "gtopk", "qsgd"):
            if driver.expensive and method in ("bf16", "gtopk", "qsgd"):
                continue
            assert_all(driver, compare(driver, method, {}, steps=2, dtype=dtype))


@promise()
def float16_holds_what_has_waited(driver: Any) -> None:
    """What has waited in residuals until float16 cannot hold it is handed over in parts, and none of it is lost."""
    shapes, steps = {"w": (40, 50)}, 15
    for method in ("topk", "powersgd", "scalecom") if driver.expensive else ("topk", "scalecom", "powersgd", "dgc"):
        settings = {"density": 0.02} if method != "powersgd" else {"matrix_rank": 1}
        given = {"w": np.full((40, 50), 8000.0, np.float16)}
        if method == "powersgd":  # full rank, so that much waits
            given = {"w": (8000 * np.sign(np.random.default_rng(0).standard_normal((40, 50)))).astype(np.float16)}
        handle = driver.make(method, settings, shapes, dtype="float16")
        received = np.zeros((40, 50))
        for step in range(steps):
            got = handle.reduce(given)["w"]
            assert np.isfinite(got).all(), f"{method}, step {step}"
            received += got
        if method == "dgc":  # its momentum adds to what was given
            continue
        kept = np.mean(driver.gather(np.asarray(handle.residual("w"), np.float64)), axis=0)
        np.testing.assert_allclose(received + kept, steps * given["w"].astype(np.float64), rtol=2e-3, err_msg=method)


@promise()
def bfloat16_goes_through(driver: Any) -> None:
    """Gradients of bfloat16 come back as the loopback's float32, rounded."""
    for method in ("none", "topk", "scalecom", *(() if driver.expensive else ("fp16", "bf16"))):
        handle, net = driver.make(method, {}, driver.shapes, dtype="bfloat16"), driver.yardstick(method, {})
        for step in range(2):
            everyone = driver.everyone(step, driver.shapes)
            got, want = handle.reduce(everyone[driver.rank]), net.allreduce_many(everyone)[driver.rank]
            want = {name: rounded_to_bfloat16(array) for name, array in want.items()}
            if driver.exact:
                assert_close(got, want, (0.0, 0.0), f"{method}, step {step}")


@promise()
def odd_shapes_go_through(driver: Any) -> None:
    """No elements, one, no dimensions, a prime number of elements: nothing is too odd for any method."""
    for method in ("none", "topk", "scalecom", "qsgd", "fft") if driver.expensive else METHODS:
        assert_all(driver, compare(driver, method, {"min_elements": 0}, steps=2, shapes=ODD_SHAPES))


@promise()
def large_float64_stays_or_is_an_overflow(driver: Any) -> None:
    """1e300 is finite: ``none`` sums it as float64; a float32 method takes it for an overflow, and spoils no state."""
    for method in ("none", "topk"):
        handle = driver.make(method, {"min_elements": 1}, driver.shapes, dtype="float64")
        got = handle.reduce({name: np.full(shape, 1e300) for name, shape in driver.shapes.items()})
        for name, array in got.items():
            assert (array == 1e300).all() if method == "none" else np.isnan(array).all(), (method, name)
            assert not handle.residual(name).any()


@promise()
def denormal_numbers_are_kept(driver: Any) -> None:
    """Numbers below 1.2e-38 are no zeros, though a framework's threads may take them for such."""
    shapes = {"w": (1200,)}
    for method, settings in (("none", {}), ("topk", {"density": 0.2}), ("scalecom", {"density": 0.3})):
        handle, net = driver.make(method, settings, shapes), driver.yardstick(method, settings)
        for step in range(3):
            everyone = [{"w": np.float32([1e-40 * (r + 1), 3e-42, 1e-38, 2.0] * 300)} for r in range(driver.world_size)]
            want = net.allreduce_many(everyone)[driver.rank]
            got = handle.reduce(everyone[driver.rank])
            if driver.exact:
                assert_close(got, want, (0.0, 0.0), f"{method}, step {step}")
        if driver.exact:
            np.testing.assert_array_equal(handle.residual("w"), net.residual("w", driver.rank))


@promise()
def the_loss_scale_may_change(driver: Any) -> None:
    """Residuals are kept unscaled: under a loss scale that changes, results are the plain ones times the scale."""
    now = {"scale": 1.0}
    settings = {"density": 0.02, "beta": 0.5}
    tolerance = driver.again("scalecom", settings)
    plain = driver.make("scalecom", settings, driver.shapes)
    scaled = driver.make("scalecom", settings, driver.shapes, loss_scale=lambda: now["scale"])
    for scale in (1.0, 1024.0, 512.0, 65536.0):  # powers of two: exact
        now["scale"], given = scale, driver.gradients(int(scale), driver.shapes)
        want = plain.reduce(given)
        got = scaled.reduce({name: array * np.float32(scale) for name, array in given.items()})
        assert_close({n: g / np.float32(scale) for n, g in got.items()}, want, tolerance, f"scale {scale}")
    for name in driver.shapes if tolerance == (0.0, 0.0) else ():
        np.testing.assert_array_equal(scaled.residual(name), plain.residual(name))


@promise()
def a_nan_on_one_rank_undoes_its_tensor(driver: Any) -> None:
    """A NaN or an Inf on one rank: that tensor is NaN on every rank, and later steps are as if it had not been."""
    for method in ("none", "topk", "scalecom", "dgc", "gradiveq") if driver.expensive else METHODS:
        _with_bad_steps(driver, method, ["a"])


@promise()
def a_nan_on_one_rank_undoes_the_whole_step(driver: Any) -> None:
    """A NaN or an Inf on one rank undoes the whole step: all tensors are NaN on all ranks, all state as before."""
    for method in METHODS:
        _with_bad_steps(driver, method, list(driver.shapes))


def _with_bad_steps(driver: Any, method: str, names: list[str]) -> None:
    tolerance = driver.again(method, METHODS[method])
    if tolerance is None or method in driver.passes_on:
        return
    handle, control = (driver.make(method, METHODS[method], driver.shapes) for _ in range(2))
    for step in range(4):
        given = driver.gradients(step, driver.shapes)
        want, got = control.reduce(given), handle.reduce(given)
        assert_close({n: got[n] for n in names}, {n: want[n] for n in names}, tolerance, f"{method}, step {step}")
        before, bad = handle.state(), {name: array.copy() for name, array in given.items()}
        if driver.rank == driver.world_size - 1:
            bad["a"].flat[3] = np.inf if step % 2 else np.nan
        got, after = handle.reduce(bad), handle.state()
        assert all(np.isnan(got[name]).all() for name in names), f"{method}: NaN on every rank"
        for name in names:
            assert_same_slots(before, after, name, method)
    assert len(names) == 1 or handle.compressor.ledger.steps == 4, "bad steps do not count"


def assert_same_slots(a: dict, b: dict, name: str, what: str) -> None:
    """Two saved states have the same of one tensor, to the bit."""
    for table in ("steps", "restarts"):
        assert a[table].get(name) == b[table].get(name), (what, table, name)
    ours, theirs = a["state"].get(name, {}), b["state"].get(name, {})
    assert ours.keys() == theirs.keys(), (what, name)
    for slot, array in ours.items():
        np.testing.assert_array_equal(array, theirs[slot], err_msg=f"{what}, {name}, {slot}")


def assert_same_state(a: dict, b: dict, what: str) -> None:
    """Two saved states are the same, to the bit."""
    assert a.keys() == b.keys() and a["steps"] == b["steps"] and a["restarts"] == b["restarts"], what
    assert a["state"].keys() == b["state"].keys(), what
    for name in a["state"]:
        assert_same_slots(a, b, name, what)


@promise()
def settings_of_the_program_do_not_matter(driver: Any) -> None:
    """Programs may have numpy raise errors, and take warnings for errors: numbers and residuals are as without."""
    for method in ("none", "topk", "powersgd", "fft") if driver.expensive else METHODS:
        handle, net = (
            driver.make(method, {"min_elements": 1}, driver.shapes),
            driver.yardstick(method, {"min_elements": 1}),
        )
        for step in range(2):
            everyone = driver.everyone(step, driver.shapes)
            for one in everyone:
                one["a"] = one["a"].copy()
                one["a"][0, :3] = 1e-42, 1e-38, 1e37  # a denormal, and what overflows in a square
            want = net.allreduce_many(everyone)[driver.rank]
            before = np.seterr(all="raise")
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    got = handle.reduce(everyone[driver.rank])
            finally:
                np.seterr(**before)
            if driver.exact_with(method):
                assert_close(got, want, (0.0, 0.0), f"{method}, step {step}")
