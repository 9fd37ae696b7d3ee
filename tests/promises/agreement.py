"""Ranks that do not agree all get one message, which names what differs."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.promises.registry import promise

SUBJECT = "Agreement"


def _disagree(
    driver: Any, words: list[str], method: str, settings: dict, shapes: dict | None = None, **more: Any
) -> None:
    """Making a Compressor, or its first step, is the same error on every rank."""
    shapes = shapes or driver.shapes

    def run() -> None:
        driver.make(method, settings, shapes, **more).reduce(driver.gradients(0, shapes))

    message = driver.must_raise(Exception, ["ranks disagree", *words], run, same=False)
    # frameworks put their own words around it
    said = message[message.index("ranks disagree") :].splitlines()[0].strip("'\" ")
    assert len(set(driver.gather(said))) == 1, f"ranks differ: {driver.gather(said)}"


@promise(ranks=2)
def different_plans_are_one_message(driver: Any) -> None:
    """Ranks with different methods, hyper-parameters or seeds: the message has the key, both values and the rank."""
    odd = driver.rank == 1
    _disagree(driver, ["'method'", "topk", "scalecom", "rank 1"], "scalecom" if odd else "topk", {})
    _disagree(driver, ["'method'", "topk", "none"], "none" if odd else "topk", {})
    _disagree(driver, ["'density'", "0.01", "0.02", "rank 1"], "topk", {"density": 0.02 if odd else 0.01})
    _disagree(driver, ["'seed'", "0", "1"], "topk", {"seed": int(odd)})
    _disagree(driver, ["'min_elements'"], "topk", {"min_elements": 5 if odd else 6})
    if driver.nodes:
        _disagree(driver, ["'nodes'", "rank 1"], "topk", {"nodes": 0 if odd else driver.num_nodes})


@promise(ranks=2)
def different_names_are_one_message(driver: Any) -> None:
    """Ranks whose tensors have different names."""
    shapes = {("w" if name == "b" and driver.rank == 1 else name): shape for name, shape in driver.shapes.items()}
    _disagree(driver, ["rank 1"], "topk", {}, shapes)
    fewer = {name: shape for name, shape in driver.shapes.items() if name != "c" or driver.rank == 0}
    _disagree(driver, ["rank 1"], "topk", {}, fewer)


@promise(ranks=2)
def different_shapes_are_one_message(driver: Any) -> None:
    """Ranks whose tensors have different shapes or dtypes: the message has the tensor's name and both."""
    shapes = {**driver.shapes, "c": (8, 131 + (driver.rank == 1))}
    _disagree(driver, ["c'", "131", "132", "rank 1"], "topk", {}, shapes)
    _disagree(driver, ["float64", "float32"], "topk", {}, dtype="float64" if driver.rank == 1 else "float32")


@promise(ranks=2)
def different_steps_are_one_message(driver: Any) -> None:
    """Ranks that are at different steps, as one of them has loaded another state."""
    settings = {"density": 0.01, "warmup": {"steps": 2}}
    ahead, behind = (driver.make("topk", settings, driver.shapes) for _ in range(2))
    for step in range(2):
        ahead.reduce(driver.gradients(step, driver.shapes))
    if driver.rank == 1:  # its warm-up is over, the others' is not: their collectives would differ
        behind.load_state(ahead.state())
    given = driver.gradients(2, driver.shapes)
    driver.must_raise(driver.error, ["ranks disagree on the step"], lambda: behind.reduce(given))


@promise(ranks=2)
def different_loss_scales_are_one_message(driver: Any) -> None:
    """Ranks with different loss scales, at first or later."""
    now = {"scale": 1.0}
    for first in (0, 2):
        now["scale"] = 1.0
        handle = driver.make("topk", {}, driver.shapes, loss_scale=lambda: now["scale"])
        for step in range(first):
            handle.reduce(driver.gradients(step, driver.shapes))
        now["scale"] = 2.0 if driver.rank == 1 else 1.0
        given = driver.gradients(first, driver.shapes)
        driver.must_raise(driver.error, ["loss scale", "1.0", "2.0"], lambda h=handle, g=given: h.reduce(g))


@promise(ranks=2)
def different_operations_are_one_message(driver: Any) -> None:
    """A rank that sums while the others average."""
    _disagree(driver, ["op", "sum", "average"], "topk", {}, op="sum" if driver.rank == 1 else "average")


@promise()
def bad_settings_are_refused(driver: Any) -> None:
    """A hyper-parameter or plan key that is out of range or unknown is refused by name, before anything is sent."""
    for word, value in (("density", 7.0), ("bits", 3), ("min_elements", -1)):
        settings = {word: value}
        driver.must_raise(ValueError, [word], lambda s=settings: driver.make("topk", s, driver.shapes), same=False)
    np.testing.assert_array_equal(
        driver.make("none", {}, {"w": (3,)}).reduce({"w": np.ones(3, np.float32)})["w"], np.ones(3, np.float32)
    )


@promise(ranks=2)
def verify_every_names_the_parameter_that_differs(driver: Any) -> None:
    """Under ``verify_every: 2``, a parameter that one rank has changed by one bit is named by every rank within two
    steps; so are parameters that differ from the beginning. In between nothing is compared."""
    for before in (0, 1):
        handle = driver.make("scalecom", {"density": 0.05, "verify_every": 2}, driver.shapes)
        for step in range(before):
            handle.reduce(driver.gradients(step, driver.shapes))
        if driver.rank == 1:
            handle.change("c")
            handle.change("b")
        for step in range(before, 2 * before):
            handle.reduce(driver.gradients(step, driver.shapes))
        given = driver.gradients(2, driver.shapes)
        words = ["ranks differ: parameter 'b'", f"after {2 * before} steps", "on rank 1", "2 of 5", "verify_every"]
        driver.must_raise(driver.error, words, lambda h=handle, g=given: h.reduce(g))


@promise(ranks=2)
def verify_every_names_the_state_that_differs(driver: Any) -> None:
    """Under ``verify_every: 2``, state that all ranks must have alike, such as PowerSGD's factor, and that one rank has
    otherwise, is named by every rank; where nothing differs, results are what they are without it."""
    for method in ("powersgd", "gradiveq", "scalecom"):
        plain, handle = (driver.make(method, {"verify_every": every}, driver.shapes) for every in (0, 2))
        for step in range(4):
            given = driver.gradients(step, driver.shapes)
            want, got = plain.reduce(dict(given)), handle.reduce(dict(given))
            for name in want:
                rtol, atol = driver.again(method, {}) or (1.0, 1.0)
                np.testing.assert_allclose(got[name], want[name], rtol, atol * max(1.0, np.abs(want[name]).max()))
        if method == "scalecom":
            continue
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
        driver.must_raise(driver.error, words, lambda h=handle, g=given: h.reduce(g))
