"""The optimizer's momentum is adapted to, or cancelled for, gradients that error feedback delays."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcompress import get
from hvdcompress.engine.saving.snapshot import reshard
from hvdcompress.optimizers import SGD
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
def test_cancelled_momentum_leaves_the_reduced_gradient_in_the_buffer(driver, method):
    """With SGD and ``optimizer_momentum: cancel``, the buffer is the reduced gradient at the effective learning rate.

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


def check_momentum(driver, method, settings):
    sgd = SGD(0.9)

    def make():
        handle = driver.make(method, settings, driver.shapes)
        handle.use(sgd)
        return handle

    handle, net = make(), driver.yardstick(method, settings)
    plain = driver.yardstick(method, {**settings, "optimizer_momentum": "keep"})
    for rank in net.ranks:
        rank.optimizer = sgd.read
    buffers = {name: np.zeros(shape) for name, shape in driver.shapes.items()}
    tolerance = driver.tolerance(method, settings)
    for step in range(STEPS):
        sgd.momentum = 0.9 if step % 3 else 0.75
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
                for other in (net, plain):
                    again = driver.reshard(reshard(other.saved(), driver.world_size + 1))
                    other.restore(again, driver.specs(driver.shapes))
            handle = make()
            handle.load(folder)
        got, want = handle.reduce(given[driver.rank]), net.allreduce_many(given)[0]
        reduced = plain.allreduce_many(given)[0]
        if step == BAD:
            continue
        if tolerance:
            assert_close(got, want, tolerance, f"{method}, step {step}")
        is_adapted = {
            member.name: adapts(bucket.program.main)
            for bucket in net.plan.buckets(driver.specs(driver.shapes))
            for member in bucket.members
        }
        if "optimizer_momentum" not in settings:
            assert step == 0 or any(not np.array_equal(want[name], reduced[name]) for name in is_adapted)
            continue
        own = get("dgc").momentum if method == "dgc" else 0.0
        for name, adapted in is_adapted.items():
            buffers[name] = sgd.momentum * buffers[name] + want[name]
            found, expected = reduced[name], want[name]
            if adapted:
                found, expected = buffers[name], reduced[name] * (1.0 - own) / (1.0 - sgd.momentum)
            pair = ({name: array.astype(np.float64)} for array in (found, expected))
            assert_close(*pair, (1e-4, 1e-5), f"{method}, buffer, step {step}")


def test_momentum_is_restored_when_compression_ends(driver):
    """When a tensor is sent uncompressed again, its momentum begins with the gradients from then on."""
    shared = {"density": 0.05, "min_elements": 100}
    plain = driver.yardstick("topk", {**shared, "optimizer_momentum": "keep"})
    settings = {**shared, "schedule": {"optimizer_momentum": {"steps": {0: "cancel", 3: "keep"}}}}
    handle = driver.make("topk", settings, driver.shapes)
    handle.use(SGD(0.9))
    buffer, natural = np.zeros(driver.shapes["a"]), np.zeros(driver.shapes["a"])
    for step in range(6):
        given = driver.everyone(step, driver.shapes)
        got = handle.reduce(given[driver.rank])["a"]
        reduced = plain.allreduce_many(given)[0]["a"].astype(np.float64)
        buffer = 0.9 * buffer + got
        natural = 10.0 * reduced if step < 3 else reduced if step == 3 else 0.9 * natural + reduced
        assert_close({"a": buffer}, {"a": natural}, (1e-4, 1e-4), f"step {step}")
