"""All features at once, behind every driver. ``tests/unit/engine/test_interactions.py`` tries each pair of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdcompress.engine.saving import checkpoint
from hvdcompress.engine.saving.snapshot import reshard
from tests.harness import assert_close
from tests.promises.registry import promise
from tests.promises.variants import Settings

SUBJECT = "Together"
BAD, TRIGGERED, SAVED, RESHARDED, STEPS = 4, 6, 8, 10, 13  #: steps; the first is sent as it is, by the warm-up


def everything(driver: Any) -> Settings:
    """A plan with all that a plan can have; matrices by low-pass top-k, the convolution by a method with phases."""
    phased = {
        "method": "gradiveq",
        "dense_steps": 2,
        "compressed_steps": 3,
        "feedback": "plain",
        "local_clip_norm": 20.0,
    }
    return {
        "density": 0.05,
        "feedback": "lowpass",
        "beta": 0.3,
        "local_clip_norm": 20.0,
        "warmup": {"steps": 1},
        "min_elements": 4,
        "rules": [{"match": {"ndim": 4}, **phased}, {"match": {"name": "c"}, "density": 0.2, "beta": 1.0}],
        **({} if driver.by_tensor else {"bucket_elements": 2000}),
    }


@promise()
def all_features_at_once(driver: Any) -> None:
    """Feedback, clipping, a warm-up, rules, buckets, a loss scale that changes, a step that meets a NaN with a trigger
    asked for in it, and new Compressors that go on from files, of as many ranks and of more: together they give what
    loopback gives."""
    settings, scale = everything(driver), [1.0]

    def make() -> Any:
        return driver.make("topk", settings, driver.shapes, loss_scale=lambda: scale[0])

    handle, net = make(), driver.yardstick("topk", settings)
    tolerance = driver.tolerance("gradiveq", settings)
    for step in range(STEPS):
        scale[0] = 2.0 ** (step % 4)
        given = driver.everyone(step, driver.shapes)
        if step in (BAD, TRIGGERED):
            spoilt = [{name: array.copy() for name, array in one.items()} for one in given]
            for array in spoilt[-1].values():  # all of them, as some drivers undo each by itself
                array.flat[-1] = np.nan if step == BAD else np.inf
            if step == TRIGGERED and driver.rank == 0:
                handle.trigger()
            if step == TRIGGERED:
                net.trigger()
            net.allreduce_many(spoilt)
            got = handle.reduce(spoilt[driver.rank])
            for name, array in got.items():  # a sum of gradients as they are shows what is not finite where it is
                undone = not np.isfinite(array).all() if name in handle.unseen() else np.isnan(array).all()
                assert undone, f"step {step} is undone: {name}"
        if step == SAVED:
            handle.save(driver.folder / "together")
            driver.meet()
            handle = make()
            handle.load(driver.folder / "together")
        if step == RESHARDED:
            more = reshard(net.saved(), driver.world_size + 1)
            if driver.rank == 0:
                for saved in more:
                    checkpoint.save(saved, driver.folder / "more")
            driver.meet()
            handle = make()
            handle.load(driver.folder / "more")
            net.restore(driver.reshard(more), driver.specs(driver.shapes))
        got = handle.reduce({name: array * np.float32(scale[0]) for name, array in given[driver.rank].items()})
        want = net.allreduce_many(given)[driver.rank]
        if tolerance is not None:
            assert_close({n: array / np.float32(scale[0]) for n, array in got.items()}, want, tolerance, f"step {step}")
        if driver.exact_with("gradiveq"):
            for name in driver.shapes:
                ours, theirs = handle.residual(name), net.residual(name, driver.rank)
                np.testing.assert_array_equal(ours, theirs, err_msg=f"{name}, step {step}")
    restarts = handle.state()["restarts"]
    assert restarts == net.saved()[0]["restarts"] and all(each[0] == 1 for each in restarts.values())
