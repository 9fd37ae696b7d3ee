"""A trigger on one rank restarts the schedules of all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ranks.checks import assert_close
from tests.ranks.comparison import with_overhead

SETTINGS = {"dense_steps": 2, "compressed_steps": 4, "min_elements": 1}


def check_restart(driver, acts, bad_steps=()):
    """Run ten steps of a method with phases. The bytes that are sent show when a trigger takes effect.

    Args:
        driver: the driver.
        acts: step -> what is called before it, with the Compressor or the loopback, and whether this rank is to act.
        bad_steps: steps with NaN.
    """
    handle, net = driver.make("gradiveq", SETTINGS, driver.shapes), driver.yardstick("gradiveq", SETTINGS)
    tolerance = driver.tolerance("gradiveq", SETTINGS)
    for step in range(10):
        if step in acts:
            acts[step](handle, driver.rank == driver.world_size - 1)
            acts[step](net, True)
        everyone = driver.everyone(step, driver.shapes)
        if step in bad_steps:  # in every tensor, since TensorFlow undoes each by itself
            everyone[-1] = {name: np.full_like(array, np.nan) for name, array in everyone[-1].items()}
        got, want = handle.reduce(everyone[driver.rank]), net.allreduce(everyone)[driver.rank]
        mine, theirs = handle.state(), net.saved()[driver.rank]
        restarts = {name: theirs["restarts"].get(name) for name in driver.shapes}
        assert {name: mine["restarts"].get(name) for name in driver.shapes} == restarts, f"restarts in step {step}"
        assert mine["steps"] == theirs["steps"], f"step {step}"
        if tolerance:
            assert_close(got, want, tolerance, f"step {step}")
        sent = {name: entry.sent for name, entry in net.ledger.tensors(driver.rank).items()}
        assert handle.sent() == with_overhead(sent, handle, step + 1), f"bytes up to step {step}"
    assert net.saved()[0]["restarts"]["a"][0] == 1, "the loopback has restarted once"


def trigger(compressor, this_rank):
    if this_rank:
        compressor.trigger()


@pytest.mark.also("three ranks", "two levels", "gloo", "one rank")
def test_trigger_on_one_rank_restarts_all(driver):
    check_restart(driver, {3: trigger})


def test_metric_observed_on_one_rank_restarts_all(driver):
    def observe_drop(compressor, this_rank):
        if this_rank:
            compressor.report_metrics(learning_rate=0.01)

    check_restart(driver, {1: lambda compressor, _: compressor.report_metrics(learning_rate=1.0), 3: observe_drop})


def test_trigger_in_a_step_with_nan_waits_for_the_next_good_step(driver):
    check_restart(driver, {3: trigger}, bad_steps=(3, 4))
