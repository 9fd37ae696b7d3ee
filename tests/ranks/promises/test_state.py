"""State is saved and restored, taken over by another number of ranks, discarded, and left alone in a pause."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import hvdcompress
from hvdcompress.engine.saving import checkpoint
from hvdcompress.engine.saving.snapshot import reshard
from tests.ranks.checks import assert_close, assert_same_state, logged
from tests.ranks.exchanges import METHODS

SHAPES = {"a": (37, 41), "c": (8, 131)}


def made(driver, steps=1, method="topk", settings=None, shapes=None):
    """Return a Compressor after some steps."""
    handle = driver.make(method, METHODS[method] if settings is None else settings, shapes or driver.shapes)
    for step in range(steps):
        handle.reduce(driver.gradients(step, shapes or driver.shapes))
    return handle


@pytest.mark.also("one rank")
@pytest.mark.parametrize("method", METHODS)
def test_training_continues_from_saved_state_to_the_bit(driver, method):
    """From ``state_dict()`` into a new Compressor, and from files into one that was used."""
    tolerance = driver.again(method, METHODS[method])
    if tolerance is None or (driver.expensive and method not in dict(driver.some(METHODS))):
        pytest.skip("methods of another kind of state are enough")
    handle = made(driver, 3, method)
    folder = driver.folder / f"state-{method}"
    handle.save(folder)
    driver.meet()
    new, used = made(driver, 0, method), made(driver, 1, method)
    new.load_state(handle.state())
    used.load(folder)
    for other in (new, used):
        assert_same_state(other.state(), handle.state(), f"{method}, saved again before a step")
    for step in range(3, 5):
        want = handle.reduce(driver.gradients(step, driver.shapes))
        for other in (new, used):
            got = other.reduce(driver.gradients(step, driver.shapes))
            assert_close(got, want, tolerance, f"{method}, step {step}")
    for other in (new, used) if tolerance == (0.0, 0.0) else ():
        assert_same_state(other.state(), handle.state(), method)


def test_saved_state_names_driver_and_versions(driver):
    """Under another plan or version of the library, rank 0 logs once what differs."""
    plan = {"density": 0.1, "min_elements": 1}
    handle, same, changed = (
        driver.make("topk", {**plan, **more}, driver.shapes) for more in ({}, {}, {"density": 0.2})
    )
    handle.reduce(driver.gradients(0, driver.shapes))
    saved = handle.state()
    made_by = saved["made_by"]
    assert made_by["driver"], made_by
    assert {"python", "numpy"} <= made_by["versions"].keys()
    assert made_by["versions"]["hvdcompress"] == hvdcompress.__version__
    assert saved["plan"]["density"] == 0.1 and saved["fallback"]["verdict"] == "open"
    earlier = {**saved, "made_by": {**made_by, "versions": {"hvdcompress": "0.0.9"}}}
    want = (
        "the saved state is of another training: "
        f"hvdcompress was 0.0.9, is {hvdcompress.__version__}; "
        "density was 0.1, is 0.2"
    )
    with logged() as lines:
        driver.meet()
        same.load_state(saved)
        for _ in range(2):
            changed.load_state(earlier)
        said = [line for line in lines if "saved state" in line]
        if driver.rank == 0 or not driver.shared:
            assert said == ([want] if driver.rank == 0 else []), said
        driver.meet()
    assert_same_state(changed.state(), saved, "loaded in spite of the differences")


def has_residual(saved, name):
    """Return whether a state has a tensor's residual. With two levels, only its owner has it."""
    return "residual" in saved["state"].get(name, {})


@pytest.mark.also("three ranks", "two levels")
def test_another_number_of_ranks_takes_over(driver):
    """States are re-sharded: the sum of residuals over ranks is preserved."""
    settings = {"density": 0.02}
    others = driver.yardstick("topk", settings, world_size=driver.world_size + 1)
    for step in range(2):
        others.allreduce([driver.gradients(step, SHAPES, rank=rank) for rank in range(driver.world_size + 1)])
    save(driver, others.saved(), driver.folder / "more-ranks")
    handle = driver.make("topk", settings, SHAPES)
    handle.load(driver.folder / "more-ranks")
    handle.reduce(driver.gradients(2, SHAPES))
    net = driver.yardstick("topk", settings)
    net.restore(driver.reshard(others.saved()), driver.specs(SHAPES))
    net.allreduce(driver.everyone(2, SHAPES))
    assert handle.state()["steps"] == {"a": 3, "c": 3}
    for name in SHAPES if driver.exact else ():
        np.testing.assert_array_equal(handle.residual(name), net.residual(name, driver.rank))
    everyone = driver.gather(handle.state())
    for name in SHAPES:
        total = sum(one["state"][name]["residual"].astype(np.float64) for one in everyone if has_residual(one, name))
        for one in reshard(everyone, driver.world_size + 2):
            np.testing.assert_allclose(one["state"][name]["residual"] * (driver.world_size + 2), total, 1e-4, 1e-5)


def save(driver, states, folder):
    """Save the states of all ranks on rank 0."""
    for saved in states if driver.rank == 0 else ():
        checkpoint.save(saved, folder)
    driver.meet()


@pytest.mark.parametrize("key", ["rank", "world", "format"])
def test_state_of_another_rank_world_or_format_is_refused(driver, key):
    handle = made(driver)
    saved = handle.state()
    wrong = {"rank": driver.rank + 1, "world": driver.world_size + 1, "format": 99}[key]
    for other in (handle, made(driver, 0)):
        driver.must_raise(ValueError, [key, str(wrong)], lambda o=other: o.load_state({**saved, key: wrong}), False)
    assert_same_state(handle.state(), saved, "after the refusal")


@pytest.mark.excepted("mpi", "tensors become known as they come: what is loaded of others waits for them")
def test_state_of_unknown_tensors_is_refused(driver):
    handle = made(driver)
    saved = handle.state()
    other = {**saved, "steps": {**saved["steps"], "stranger": 1}}
    driver.must_raise(ValueError, ["stranger"], lambda: handle.load_state(other), False)
    assert_same_state(handle.state(), saved, "after the refusal")


def test_residual_with_nan_or_of_another_dtype_or_length_is_refused(driver):
    handle = made(driver, 3)  # after the warm-up
    saved = handle.state()
    name = next(name for name in "abc" if "residual" in saved["state"].get(name, ()))  # of this rank, with two levels
    residual = saved["state"][name]["residual"]
    for bad in (residual * np.float32("nan"), residual.astype(np.float64), residual.astype(np.int32), residual[:-1]):
        wrong = {**saved, "state": {**saved["state"], name: {**saved["state"][name], "residual": bad}}}
        driver.must_raise(ValueError, [f"'residual' of '{name}'"], lambda w=wrong: handle.load_state(w), same=False)
    assert_same_state(handle.state(), saved, "after refusals")


def test_newest_state_that_all_ranks_have_is_loaded(driver):
    """Whatever the number of ranks that saved it, and never files of different steps. Names may have any letters."""
    shapes, settings = {"line\nbreak": (37, 41), "Größe/λ": (8, 131)}, {"density": 0.02}
    folder = driver.folder / "several"
    handle = made(driver, 1, settings=settings, shapes=shapes)
    handle.save(folder)
    driver.meet()
    others = driver.yardstick("topk", settings, world_size=driver.world_size + 1)
    for step in range(3):
        others.allreduce([driver.gradients(step, shapes, rank=rank) for rank in range(driver.world_size + 1)])
    save(driver, others.saved(), folder)
    handle.load(folder)
    assert set(handle.state()["steps"].values()) == {3} and handle.state()["steps"].keys() == shapes.keys()
    handle.reduce(driver.gradients(3, shapes))
    save(driver, [handle.state()], folder)  # the other ranks ended before they saved
    with warnings.catch_warnings(record=True):
        handle.load(folder)
    assert set(handle.state()["steps"].values()) == {3}


def test_discarded_step_leaves_no_trace(driver):
    """Training continues as if the step had not been; also the first step, and one with NaN."""
    for method, settings in driver.some(METHODS):
        tolerance = driver.again(method, settings)
        if tolerance is None:
            continue
        handle, twin = made(driver, 0, method), made(driver, 0, method)
        for step in range(4):
            given = driver.gradients(100 + step, driver.shapes)
            if step == 2 and driver.rank == 0 and method not in driver.passes_on and not driver.by_tensor:
                given["a"][3, 3] = np.nan
            if step != 1:
                handle.reduce(given)
                handle.discard()
            got, want = (one.reduce(driver.gradients(step, driver.shapes)) for one in (handle, twin))
            assert_close(got, want, tolerance, f"{method}, step {step}")
        if tolerance == (0.0, 0.0):
            assert_same_state(handle.state(), twin.state(), method)
        handle.discard()
        driver.must_raise(RuntimeError, ["no step to discard"], handle.discard, same=False)


@pytest.mark.excepted("loopback", "one object holds all ranks, and their steps")
@pytest.mark.excepted("tensorflow", "ranks tell each other no more than fits into a probe: steps are not compared")
def test_step_discarded_on_one_rank_alone_is_an_error(driver):
    handle = made(driver, 2)
    if driver.rank == 0:
        handle.discard()
    given = driver.gradients(2, driver.shapes)
    driver.must_raise(driver.error, ["ranks disagree on the step"], lambda: handle.reduce(given))


@pytest.mark.excepted("tensorflow", "a graph has the collectives of the plan's methods", refused=["cannot pause"])
def test_paused_steps_return_averages_and_leave_no_trace(driver):
    for method, settings in METHODS.items():
        tolerance = driver.again(method, settings)
        if tolerance is None:
            continue
        handle, twin = made(driver, 0, method), made(driver, 0, method)
        exact = made(driver, 0, "none")
        for step in range(3):
            if step != 1:
                given = driver.gradients(100 + step, driver.shapes)
                with handle.paused():
                    assert_close(handle.reduce(given), exact.reduce(given), (1e-6, 1e-7), f"{method}, paused")
            got, want = (one.reduce(driver.gradients(step, driver.shapes)) for one in (handle, twin))
            assert_close(got, want, tolerance, f"{method}, step {step}")
        if tolerance == (0.0, 0.0):
            assert_same_state(handle.state(), twin.state(), method)
