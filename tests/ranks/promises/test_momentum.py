"""The optimizer's momentum is adapted to, or cancelled for, gradients that error feedback delays."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcompress import get_method
from hvdcompress.engine.saving.snapshot import reshard
from hvdcompress.parts.momentum import adapts
from tests.ranks.checks import assert_close
from tests.ranks.promises.test_state import save

BAD, SAVED, RESHARDED, STEPS = 3, 5, 6, 8  #: steps
#: a method for each form of the optimizer's buffer: sums of sparse vectors, matrices of low rank, one sparse vector,
#: dense vectors, and a method with a momentum of its own
METHODS = {
    "topk": {"density": 0.05},
    "powersgd": {},
    "scalecom": {"density": 0.05},
    "signsgd": {},
    "dgc": {"density": 0.05},
}


@pytest.mark.parametrize("method", METHODS)
def test_cancelled_momentum_trains_as_sgd_without_momentum(driver, method):
    """With ``optimizer_momentum: cancel``, a step contains the reduced gradient at the effective learning rate.

    So it is while a schedule changes the momentum, over a step that is undone, and in new Compressors that continue
    from files, of as many ranks and of more. Tensors that are sent uncompressed keep their momentum.
    """
    if driver.expensive and method not in dict(driver.some(METHODS)):
        pytest.skip("a Compressor is expensive")
    check_momentum(driver, method, {**METHODS[method], "min_elements": 100, "optimizer_momentum": "cancel"})


@pytest.mark.parametrize("method", ["topk", "powersgd"])
def test_adapted_momentum_equals_the_loopback(driver, method):
    """``tests/unit/parts/test_momentum.py`` compares the loopback with the formula."""
    if driver.expensive and method != "topk":
        pytest.skip("a Compressor is expensive")
    check_momentum(driver, method, {**METHODS[method], "min_elements": 100})


def step_of_loopback(net, buffers, given, momentum):
    """Do a step of SGD with a rate of 1. Return the reduced gradients, and by how much each tensor decreases."""
    reduced = net.allreduce(given)[0]
    with net.adapted(buffers, reduced, momentum=momentum):
        for name, array in reduced.items() if all(np.isfinite(array).all() for array in reduced.values()) else ():
            buffers[name][...] = momentum * buffers[name] + array
        return reduced, {name: buffer.copy() for name, buffer in buffers.items()}


def check_momentum(driver, method, settings):
    handle, net = driver.make(method, settings, driver.shapes), driver.yardstick(method, settings)
    tolerance = driver.tolerance(method, settings)
    is_adapted = {
        member.name: adapts(bucket.program.main)
        for bucket in net.plan.buckets(driver.specs(driver.shapes), net.grouping)
        for member in bucket.members
    }

    def zeros(dtype):
        return {name: np.zeros(shape, dtype) for name, shape in driver.shapes.items()}

    buffers, plain = zeros(np.float32), zeros(np.float64)
    for step in range(STEPS):
        momentum = 0.9 if step % 3 else 0.75
        given = driver.everyone(step, driver.shapes)
        if step == BAD:  # in all tensors, since some drivers undo each by itself
            given[-1] = {name: np.full_like(array, np.nan) for name, array in given[-1].items()}
        if step in (SAVED, RESHARDED):
            folder = driver.folder / f"momentum-{method}-{step}-{'cancel' in settings.values()}"
            if step == SAVED:
                handle.save(folder)
                driver.meet()
            else:
                save(driver, reshard(net.saved(), driver.world_size + 1), folder)
                again = driver.reshard(reshard(net.saved(), driver.world_size + 1))
                net.restore(again, driver.specs(driver.shapes))
            handle = driver.make(method, settings, driver.shapes)  # and a new optimizer
            handle.load(folder)
            buffers, plain = zeros(np.float32), zeros(np.float64)
        got = handle.train(given[driver.rank], momentum)
        reduced, want = step_of_loopback(net, buffers, given, momentum)
        if step == BAD:
            continue
        if tolerance:
            rtol, atol = tolerance
            assert_close(got, want, (rtol + 2e-6, atol + 1e-6), f"{method}, step {step}")
        if "optimizer_momentum" not in settings:
            continue
        own = get_method("dgc").momentum if method == "dgc" else 0.0
        for name, adapted in is_adapted.items():
            plain[name] = momentum * plain[name] + reduced[name]
            expected = reduced[name].astype(float) * (1.0 - own) / (1.0 - momentum) if adapted else plain[name]
            assert_close({name: want[name].astype(float)}, {name: expected}, (1e-4, 1e-5), f"{method}, step {step}")


def test_momentum_is_kept_when_compression_ends(driver):
    """When a tensor is sent uncompressed again, its momentum begins with the gradients from then on."""
    shared = {"density": 0.05, "min_elements": 100}
    settings = {**shared, "schedule": {"optimizer_momentum": {"steps": {0: "cancel", 3: "keep"}}}}
    handle, plain = driver.make("topk", settings, driver.shapes), driver.yardstick("topk", shared)
    expected = np.zeros(driver.shapes["a"])
    for step in range(6):
        given = driver.everyone(step, driver.shapes)
        got = handle.train(given[driver.rank], 0.9)["a"]
        reduced = plain.allreduce(given)[0]["a"].astype(np.float64)
        expected = 10.0 * reduced if step < 3 else reduced if step == 3 else 0.9 * expected + reduced
        assert_close({"a": got.astype(float)}, {"a": expected}, (1e-4, 1e-4), f"step {step}")
