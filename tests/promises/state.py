"""What is kept from step to step can be saved, restored, and taken over by another number of ranks."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

import hvdcompress
from hvdcompress.engine.saving import checkpoint
from hvdcompress.engine.saving.snapshot import reshard
from hvdcompress.optimizers import SGD
from tests.harness import assert_close, logged
from tests.promises.numbers import assert_same_state
from tests.promises.registry import promise
from tests.promises.variants import METHODS

SUBJECT = "State"
KINDS = ("none", "topk", "scalecom", "dgc", "gradiveq", "powersgd", "fft")  # a method for each kind of state
FROM_A_DICT = ("topk", "scalecom", "powersgd")  # where Compressors are expensive: the first also from files


@promise()
def state_is_restored_to_the_bit(driver: Any) -> None:
    """Training goes on from a saved state, to the bit of two ranks: from ``state_dict()`` or files, in a new Compressor
    or one that was used, for every kind of state."""
    for method, settings in {m: METHODS[m] for m in KINDS}.items() if driver.expensive else METHODS.items():
        tolerance = driver.again(method, settings)
        if tolerance is None:
            continue
        handle = driver.make(method, settings, driver.shapes)
        for step in range(3):
            handle.reduce(driver.gradients(step, driver.shapes))
        saved = handle.state()
        handle.save(driver.folder / f"state-{method}")
        driver.meet()
        others = {}
        if not driver.expensive or method in FROM_A_DICT:
            others["a new one, from a dict"] = driver.make(method, settings, driver.shapes)
            others["a new one, from a dict"].load_state(saved)
        if not driver.expensive or method not in FROM_A_DICT[1:]:
            others["a used one, from files"] = driver.make(method, settings, driver.shapes)
            others["a used one, from files"].reduce(driver.gradients(9, driver.shapes))
            others["a used one, from files"].load(driver.folder / f"state-{method}")
        for step in range(3, 6):
            want = handle.reduce(driver.gradients(step, driver.shapes))
            for how, other in others.items():
                got = other.reduce(driver.gradients(step, driver.shapes))
                assert_close(got, want, tolerance, f"{method}, {how}, step {step}")
        for how, other in others.items() if tolerance == (0.0, 0.0) else ():
            assert_same_state(other.state(), handle.state(), f"{method}, {how}")


@promise()
def a_saved_state_says_what_made_it(driver: Any) -> None:
    """A saved state names the driver, the versions of the packages in use, and the optimizer's momentum. Where it is
    loaded under another plan, momentum or version of the library, rank 0 logs once what differs. A state without these
    names, of an earlier version, is loaded, too."""
    plan = {"density": 0.1, "min_elements": 1}
    handle, same, changed = (
        driver.make("topk", {**plan, **more}, driver.shapes) for more in ({}, {}, {"density": 0.2})
    )
    for one, momentum in ((handle, 0.5), (same, 0.5), (changed, 0.9)):
        one.use(SGD(momentum=momentum))
    handle.reduce(driver.gradients(0, driver.shapes))
    saved = handle.state()
    made_by = saved["made_by"]
    assert made_by["driver"] and made_by["momentum"] == "0.5", made_by
    assert {"python", "numpy"} <= made_by["versions"].keys()
    assert made_by["versions"]["hvdcompress"] == hvdcompress.__version__
    assert saved["plan"]["density"] == 0.1 and saved["fallback"]["verdict"] == "open"
    earlier = {**saved, "made_by": {**made_by, "versions": {"hvdcompress": "0.0.9"}}}
    want = (
        "the saved state is of another training: "
        f"hvdcompress was 0.0.9, is {hvdcompress.__version__}; the optimizer's momentum was 0.5, is 0.9; "
        "density was 0.1, is 0.2"
    )
    with logged() as lines:
        driver.meet()
        for one in (saved, {key: value for key, value in saved.items() if key != "made_by"}):
            same.load_state(one)
        for _ in range(2):
            changed.load_state(earlier)
        said = [line for line in lines if "saved state" in line]
        if driver.rank == 0 or not driver.shared:
            assert said == ([want] if driver.rank == 0 else []), said
        driver.meet()
    assert_same_state(changed.state(), saved, "loaded all the same")


@promise()
def what_was_loaded_can_be_saved_again(driver: Any) -> None:
    """A state that has just been loaded is what is saved, before any further step; in a new or a used Compressor."""
    for method in ("topk", "gradiveq"):
        handle, new = (driver.make(method, METHODS[method], driver.shapes) for _ in range(2))
        for step in range(3):
            handle.reduce(driver.gradients(step, driver.shapes))
        saved = handle.state()
        handle.reduce(driver.gradients(3, driver.shapes))
        for other in (handle, new):
            other.load_state(saved)
            assert_same_state(other.state(), saved, method)


@promise()
def another_number_of_ranks_takes_over(driver: Any) -> None:
    """States of another number of ranks are re-sharded: the sum of residuals over ranks stays."""
    shapes, settings = {"a": (37, 41), "c": (8, 131)}, {"density": 0.02}
    others = driver.yardstick("topk", settings, world_size=driver.world_size + 1)
    for step in range(2):
        others.allreduce_many([driver.gradients(step, shapes, rank=rank) for rank in range(driver.world_size + 1)])
    if driver.rank == 0:
        for saved in others.saved():
            checkpoint.save(saved, driver.folder / "more-ranks")
    driver.meet()
    handle = driver.make("topk", settings, shapes)
    handle.load(driver.folder / "more-ranks")
    handle.reduce(driver.gradients(2, shapes))  # from here on they are known to have the sum
    net = driver.yardstick("topk", settings)
    net.restore(driver.reshard(others.saved()), driver.specs(shapes))
    net.allreduce_many(driver.everyone(2, shapes))
    assert handle.state()["steps"] == {"a": 3, "c": 3}
    if driver.exact:
        for name in shapes:
            np.testing.assert_array_equal(handle.residual(name), net.residual(name, driver.rank))
    everyone = driver.gather(handle.state())
    for name in shapes:
        total = sum(one["state"][name]["residual"].astype(np.float64) for one in everyone if name in one["state"])
        for one in reshard(everyone, driver.world_size + 2):
            np.testing.assert_allclose(one["state"][name]["residual"] * (driver.world_size + 2), total, 1e-4, 1e-5)


@promise()
def states_that_do_not_fit_are_refused(driver: Any) -> None:
    """A state of another rank, world or format is refused, with the key's name, and nothing is changed."""
    handle = driver.make("topk", {"density": 0.05}, driver.shapes)
    handle.reduce(driver.gradients(0, driver.shapes))
    saved = handle.state()
    for key, value in (("rank", driver.rank + 1), ("world", driver.world_size + 1), ("format", 99)):
        words = [key, str(value)]
        for other in (handle, driver.make("topk", {"density": 0.05}, driver.shapes)):
            driver.must_raise(ValueError, words, lambda o=other, k=key, v=value: o.load_state({**saved, k: v}), False)
    assert_same_state(handle.state(), saved, "after refusals")


@promise()
def states_of_other_tensors_are_refused(driver: Any) -> None:
    """A state of tensors that are not here is refused with their names, and nothing is changed."""
    handle = driver.make("topk", {"density": 0.05}, driver.shapes)
    handle.reduce(driver.gradients(0, driver.shapes))
    saved = handle.state()
    other = {**saved, "steps": {**saved["steps"], "stranger": 1}}
    driver.must_raise(ValueError, ["stranger"], lambda: handle.load_state(other), False)
    assert_same_state(handle.state(), saved, "after the refusal")


@promise()
def any_name_comes_back(driver: Any) -> None:
    """A tensor's name may have line breaks and other letters: what is saved of it is found again."""
    shapes = {"line\nbreak": (37, 41), "Größe/λ": (8, 131)}
    handle, other = (driver.make("topk", {"density": 0.05}, shapes) for _ in range(2))
    for step in range(2):
        handle.reduce(driver.gradients(step, shapes))
    handle.save(driver.folder / "names")
    driver.meet()
    other.load(driver.folder / "names")
    assert_same_state(other.state(), handle.state(), "names")


@promise()
def the_newest_state_of_all_ranks_is_loaded(driver: Any) -> None:
    """Of several states in a folder, the newest that is there of all ranks is loaded, whatever their number, and never
    files of different steps."""
    shapes, settings = {"a": (37, 41), "c": (8, 131)}, {"density": 0.02}
    handle, folder = driver.make("topk", settings, shapes), driver.folder / "several"
    handle.reduce(driver.gradients(0, shapes))
    handle.save(folder)
    driver.meet()
    others = driver.yardstick("topk", settings, world_size=driver.world_size + 1)
    for step in range(3):
        others.allreduce_many([driver.gradients(step, shapes, rank=rank) for rank in range(driver.world_size + 1)])
    if driver.rank == 0:
        for saved in others.saved():
            checkpoint.save(saved, folder)
    driver.meet()
    handle.load(folder)
    assert handle.state()["steps"] == {"a": 3, "c": 3}
    handle.reduce(driver.gradients(3, shapes))
    if driver.rank == 0:  # the others are ended before they have saved
        checkpoint.save(handle.state(), folder)
    driver.meet()
    if driver.world_size > 1:
        with warnings.catch_warnings(record=True):
            handle.load(folder)
    assert handle.state()["steps"] == ({"a": 3, "c": 3} if driver.world_size > 1 else {"a": 4, "c": 4})


@promise()
def arrays_that_are_no_residuals_are_refused(driver: Any) -> None:
    """A saved residual that has a NaN, or is of another dtype or length, is refused by its tensor's name."""
    handle = driver.make("topk", {"density": 0.05}, driver.shapes)
    handle.reduce(driver.gradients(0, driver.shapes))
    saved = handle.state()
    name = next(name for name in "abc" if name in saved["state"])
    residual = saved["state"][name]["residual"]
    for bad in (residual * np.float32("nan"), residual.astype(np.float64), residual.astype(np.int32), residual[:-1]):
        wrong = {**saved, "state": {**saved["state"], name: {"residual": bad}}}
        words = [f"'residual' of '{name}'"]
        driver.must_raise(ValueError, words, lambda w=wrong: handle.load_state(w), same=False)
    assert_same_state(handle.state(), saved, "after refusals")


@promise()
def a_discarded_step_leaves_no_trace(driver: Any) -> None:
    """``discard()`` takes the last step back: training goes on, to the bit of two ranks, as if it had not been; also
    the first one, and one that had a NaN."""
    for method in FROM_A_DICT if driver.expensive else KINDS:
        settings = METHODS[method]
        tolerance = driver.again(method, settings)
        if tolerance is None:
            continue
        handle, twin = (driver.make(method, settings, driver.shapes) for _ in range(2))
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
        driver.must_raise(
            RuntimeError, ["no step to discard"], lambda one=handle: [one.discard() for _ in range(2)], same=False
        )


@promise()
def what_was_discarded_on_one_rank_alone_is_said(driver: Any) -> None:
    """Ranks compare the steps that they have done."""
    handle = driver.make("topk", METHODS["topk"], driver.shapes)
    for step in range(2):
        handle.reduce(driver.gradients(step, driver.shapes))
    if driver.rank == 0:
        handle.discard()
    driver.must_raise(
        driver.error, ["ranks disagree on the step"], lambda: handle.reduce(driver.gradients(2, driver.shapes))
    )


@promise()
def steps_in_a_pause_are_averages_and_leave_no_trace(driver: Any) -> None:
    """In ``with compressor.paused():`` gradients are averaged as they are, and nothing that is kept moves; a rank that
    pauses alone is told."""
    for method in KINDS:
        settings = METHODS[method]
        tolerance = driver.again(method, settings)
        if tolerance is None:
            continue
        handle, twin = (driver.make(method, settings, driver.shapes) for _ in range(2))
        exact = driver.make("none", {}, driver.shapes)
        for step in range(3):
            if step != 1:
                given = driver.gradients(100 + step, driver.shapes)
                with handle.paused():
                    assert_close(handle.reduce(given), exact.reduce(given), (1e-6, 1e-7), f"{method}, paused")
            got, want = (one.reduce(driver.gradients(step, driver.shapes)) for one in (handle, twin))
            assert_close(got, want, tolerance, f"{method}, step {step}")
        if tolerance == (0.0, 0.0):
            assert_same_state(handle.state(), twin.state(), method)
