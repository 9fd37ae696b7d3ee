"""All features at once. ``tests/unit/engine/test_state_machine.py`` tries random combinations of them."""

from __future__ import annotations

import numpy as np
import pytest

from hvdcompress.engine.saving.snapshot import reshard
from tests.ranks.checks import assert_close
from tests.ranks.promises.test_state import save

BAD, TRIGGERED, SAVED, RESHARDED, STEPS = 4, 6, 8, 10, 13  #: steps; the warm-up sends the first uncompressed


def everything(driver):
    """Return a plan with all features; matrices by low-pass top-k, the convolution by a method with phases."""
    phased = {"method": "gradiveq", "dense_steps": 2, "compressed_steps": 3, "feedback": "plain"}
    return {
        "density": 0.05,
        "feedback": "lowpass",
        "beta": 0.3,
        "local_clip_norm": 20.0,
        "warmup": {"steps": 1},
        "min_elements": 4,
        "rules": [
            {"match": {"ndim": 4}, **phased, "local_clip_norm": 20.0},
            {"match": {"name": "c"}, "density": 0.2, "beta": 1.0},
        ],
        **({} if driver.by_tensor else {"bucket_elements": 2000}),
    }


@pytest.mark.also("two levels")
def test_all_features_at_once(driver):
    """Compare with the loopback: feedback, clipping, a warm-up, rules, buckets, a loss scale that changes, steps with
    NaN and a trigger requested in one of them, new Compressors that continue from files, of as many ranks and of more.
    """
    check_all_features(driver)


def check_all_features(driver):
    settings, scale = everything(driver), [1.0]

    def make():
        return driver.make("topk", settings, driver.shapes, loss_scale=lambda: scale[0])

    handle, net = make(), driver.yardstick("topk", settings)
    tolerance = driver.tolerance("gradiveq", settings)
    for step in range(STEPS):
        scale[0] = 2.0 ** (step % 4)
        given = driver.everyone(step, driver.shapes)
        if step in (BAD, TRIGGERED):
            bad = [{name: array.copy() for name, array in one.items()} for one in given]
            for array in bad[-1].values():  # all tensors, since some drivers undo each by itself
                array.flat[-1] = np.nan if step == BAD else np.inf
            if step == TRIGGERED:
                net.trigger()
                if driver.rank == 0:
                    handle.trigger()
            net.allreduce(bad)
            for name, array in handle.reduce(bad[driver.rank]).items():
                # a sum of uncompressed gradients has NaN or Inf where a rank has
                undone = not np.isfinite(array).all() if name in handle.unseen() else np.isnan(array).all()
                assert undone, f"step {step} is undone: {name}"
        if step in (SAVED, RESHARDED):
            folder = driver.folder / f"together-{step}"
            if step == SAVED:
                handle.save(folder)
                driver.meet()
            else:
                more = reshard(net.saved(), driver.world_size + 1)
                save(driver, more, folder)
                net.restore(driver.reshard(more), driver.specs(driver.shapes))
            handle = make()
            handle.load(folder)
        got = handle.reduce({name: array * np.float32(scale[0]) for name, array in given[driver.rank].items()})
        want = net.allreduce(given)[driver.rank]
        if tolerance is not None:
            assert_close({n: array / np.float32(scale[0]) for n, array in got.items()}, want, tolerance, f"step {step}")
        for name in driver.shapes if driver.exact_with("gradiveq") else ():
            ours, theirs = handle.residual(name), net.residual(name, driver.rank)
            np.testing.assert_array_equal(ours, theirs, err_msg=f"{name}, step {step}")
    restarts = handle.state()["restarts"]
    assert restarts == net.saved()[0]["restarts"] and all(each[0] == 1 for each in restarts.values())
