"""Ranks that do not agree all raise one message, which names the difference."""

from __future__ import annotations

import numpy as np
import pytest

ONE_OBJECT = "one object holds all ranks"
PROBE = "ranks tell each other no more than fits into a probe with each tensor"


def check_disagreement(driver, words, method="topk", settings=None, shapes=None, **more):
    """Check that making a Compressor, or its first step, is the same error on every rank."""
    shapes = shapes or driver.shapes

    def run():
        driver.make(method, settings or {}, shapes, **more).reduce(driver.gradients(0, shapes))

    message = driver.must_raise(Exception, ["ranks disagree", *words], run, same=False)
    # frameworks put their own words around it
    said = message[message.index("ranks disagree") :].splitlines()[0].strip("'\" ")
    assert len(set(driver.gather(said))) == 1, f"ranks differ: {driver.gather(said)}"


@pytest.mark.also("three ranks", "gloo")
@pytest.mark.excepted("loopback", f"{ONE_OBJECT}: there is one plan")
def test_different_methods(driver):
    """The message has the key, both values and the rank."""
    method = "scalecom" if driver.rank == 1 else "topk"
    check_disagreement(driver, ["'method'", "topk", "scalecom", "rank 1"], method)
    check_disagreement(driver, ["'method'", "topk", "none"], "none" if driver.rank == 1 else "topk")


@pytest.mark.excepted("loopback", f"{ONE_OBJECT}: there is one plan")
@pytest.mark.parametrize("key,values", [("density", (0.01, 0.02)), ("seed", (0, 1)), ("min_elements", (6, 5))])
def test_different_settings(driver, key, values):
    words = [f"'{key}'", *map(str, values), "rank 1"]
    check_disagreement(driver, words, settings={key: values[driver.rank == 1]})


@pytest.mark.only("two levels")
@pytest.mark.excepted("loopback", f"{ONE_OBJECT}: there is one plan")
def test_different_numbers_of_nodes(driver):
    check_disagreement(driver, ["'nodes'", "rank 1"], settings={"nodes": 0 if driver.rank == 1 else driver.num_nodes})


@pytest.mark.excepted("loopback", f"{ONE_OBJECT}: a ValueError, once")
@pytest.mark.excepted(
    "ddp", "DDP compares the number of parameters itself; other names are one message", refused=["same model"]
)
def test_different_names(driver):
    shapes = {("w" if name == "b" and driver.rank == 1 else name): shape for name, shape in driver.shapes.items()}
    check_disagreement(driver, ["rank 1"], shapes=shapes)
    fewer = {name: shape for name, shape in driver.shapes.items() if name != "c" or driver.rank == 0}
    check_disagreement(driver, ["rank 1"], shapes=fewer)


@pytest.mark.excepted("loopback", f"{ONE_OBJECT}: a ValueError, once")
@pytest.mark.excepted("ddp", "DDP compares shapes itself, when it is made")
@pytest.mark.excepted("tensorflow", f"{PROBE}: shapes are not compared")
def test_different_shapes_and_dtypes(driver):
    """The message has the tensor's name and both shapes or dtypes."""
    shapes = {**driver.shapes, "c": (8, 131 + (driver.rank == 1))}
    check_disagreement(driver, ["c'", "131", "132", "rank 1"], shapes=shapes)
    check_disagreement(driver, ["float64", "float32"], dtype="float64" if driver.rank == 1 else "float32")


@pytest.mark.excepted("loopback", f"{ONE_OBJECT}, and their steps")
@pytest.mark.excepted("tensorflow", f"{PROBE}: steps are not compared")
def test_different_steps(driver):
    """One rank has loaded another state, and its warm-up is over: its collectives would differ."""
    settings = {"density": 0.01, "warmup": {"steps": 2}}
    ahead, behind = (driver.make("topk", settings, driver.shapes) for _ in range(2))
    for step in range(2):
        ahead.reduce(driver.gradients(step, driver.shapes))
    if driver.rank == 1:
        behind.load_state(ahead.state())
    given = driver.gradients(2, driver.shapes)
    driver.must_raise(driver.error, ["ranks disagree on the step"], lambda: behind.reduce(given))


@pytest.mark.excepted("loopback", f"{ONE_OBJECT}: there is one loss scale")
@pytest.mark.excepted("tensorflow", f"{PROBE}: loss scales are not compared")
@pytest.mark.parametrize("steps_before", [0, 2])
def test_different_loss_scales(driver, steps_before):
    now = {"scale": 1.0}
    handle = driver.make("topk", {}, driver.shapes, loss_scale=lambda: now["scale"])
    for step in range(steps_before):
        handle.reduce(driver.gradients(step, driver.shapes))
    now["scale"] = 2.0 if driver.rank == 1 else 1.0
    given = driver.gradients(steps_before, driver.shapes)
    driver.must_raise(driver.error, ["loss scale", "1.0", "2.0"], lambda: handle.reduce(given))


@pytest.mark.excepted("loopback", f"{ONE_OBJECT}: there is one operation")
@pytest.mark.excepted("ddp", "DDP averages, and does nothing else")
@pytest.mark.excepted("torch", "Horovod compares the operations of the ranks itself", refused=["Mismatched"])
@pytest.mark.excepted("tensorflow", "Horovod compares the operations of the ranks itself", refused=["Mismatched"])
def test_sum_on_one_rank_and_average_on_others(driver):
    check_disagreement(driver, ["op", "sum", "average"], op="sum" if driver.rank == 1 else "average")


def test_setting_out_of_range_or_unknown_is_refused_before_anything_is_sent(driver):
    for key, value in (("density", 7.0), ("bits", 3), ("min_elements", -1)):
        driver.must_raise(ValueError, [key], lambda s={key: value}: driver.make("topk", s, driver.shapes), same=False)
    ones = np.ones(3, np.float32)
    np.testing.assert_array_equal(driver.make("none", {}, {"w": (3,)}).reduce({"w": ones})["w"], ones)


@pytest.mark.excepted("loopback", "it is given no parameters: shared state and steps are compared")
@pytest.mark.excepted("mpi", "it is given no parameters: shared state and steps are compared")
@pytest.mark.excepted("tensorflow", f"{PROBE}: nothing is compared", refused=["verify_every must be 0"])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_verify_every_names_the_parameter_that_differs(driver, steps_before):
    """One rank changes a parameter by one bit: every rank names it within ``verify_every`` steps."""
    handle = driver.make("scalecom", {"density": 0.05, "verify_every": 2}, driver.shapes)
    for step in range(steps_before):
        handle.reduce(driver.gradients(step, driver.shapes))
    if driver.rank == 1:
        handle.change("c")
        handle.change("b")
    for step in range(steps_before, 2 * steps_before):  # nothing is compared
        handle.reduce(driver.gradients(step, driver.shapes))
    given = driver.gradients(2, driver.shapes)
    words = ["ranks differ: parameter 'b'", f"after {2 * steps_before} steps", "on rank 1", "2 of 5", "verify_every"]
    driver.must_raise(driver.error, words, lambda: handle.reduce(given))


@pytest.mark.also("two levels")
@pytest.mark.excepted("tensorflow", f"{PROBE}: nothing is compared", refused=["verify_every must be 0"])
@pytest.mark.parametrize("method", ["powersgd", "gradiveq"])
def test_verify_every_names_the_shared_state_that_differs(driver, method):
    """Such as PowerSGD's factor. Where nothing differs, results are as without ``verify_every``."""
    plain, handle = (driver.make(method, {"verify_every": every}, driver.shapes) for every in (0, 2))
    for step in range(4):
        given = driver.gradients(step, driver.shapes)
        want, got = plain.reduce(dict(given)), handle.reduce(dict(given))
        for name in want:
            rtol, atol = driver.again(method, {}) or (1.0, 1.0)
            np.testing.assert_allclose(got[name], want[name], rtol, atol * max(1.0, np.abs(want[name]).max()))
    saved = handle.state()
    slots = [(name, slot) for name, own in saved["state"].items() for slot in own if slot in ("q", "basis")]
    everyone = driver.gather(sorted(slots))
    odd = max(rank for rank, own in enumerate(everyone) if own)
    name, slot = everyone[odd][0]
    if driver.rank == odd:
        changed = np.array(saved["state"][name][slot])
        changed.reshape(-1)[0] += 1
        saved["state"][name][slot] = changed
    handle.load_state(saved)
    given = driver.gradients(4, driver.shapes)
    words = [f"ranks differ: the state '{slot}' of tensor '{name}'", f"on rank {odd}", "1 of"]
    driver.must_raise(driver.error, words, lambda: handle.reduce(given))
