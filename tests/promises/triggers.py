"""What one rank asks for or notices, all act on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.harness import assert_close
from tests.promises.registry import promise
from tests.promises.results import with_overhead

SUBJECT = "Triggers"
SETTINGS = {"dense_steps": 2, "compressed_steps": 4, "min_elements": 1}


def _against_loopback(
    driver: Any, acts: dict[int, Callable[[Any, bool], None]], bad_steps: tuple[int, ...] = ()
) -> None:
    """Ten steps of a method with phases; ``acts``: what to do before a step, with the handle or the loopback, and
    whether this rank does so, too. What is sent tells of the phase, and so tells when a trigger was acted upon."""
    handle, net = driver.make("gradiveq", SETTINGS, driver.shapes), driver.yardstick("gradiveq", SETTINGS)
    tolerance = driver.tolerance("gradiveq", SETTINGS)
    for step in range(10):
        if step in acts:
            acts[step](handle, driver.rank == driver.world_size - 1)
            acts[step](net, True)
        everyone = driver.everyone(step, driver.shapes)
        if step in bad_steps:  # every tensor, as TensorFlow's are undone one by one
            everyone[-1] = {name: np.full_like(array, np.nan) for name, array in everyone[-1].items()}
        got, want = handle.reduce(everyone[driver.rank]), net.allreduce_many(everyone)[driver.rank]
        mine, theirs = handle.state(), net.saved()[driver.rank]
        restarts = {name: theirs["restarts"].get(name) for name in driver.shapes}
        assert {name: mine["restarts"].get(name) for name in driver.shapes} == restarts, f"restarts in step {step}"
        assert mine["steps"] == theirs["steps"], f"step {step}"
        if tolerance:
            assert_close(got, want, tolerance, f"step {step}")
        sent = {name: entry.sent for name, entry in net.ledger.tensors(driver.rank).items()}
        assert handle.sent() == with_overhead(sent, handle, step + 1), f"bytes up to step {step}"
    assert net.saved()[0]["restarts"]["a"][0] == 1, "the loopback has restarted once"


@promise()
def a_trigger_on_one_rank_restarts_all(driver: Any) -> None:
    """``trigger()`` on one rank restarts every rank's schedule after the next step."""
    _against_loopback(driver, {3: lambda it, mine: it.trigger() if mine else None})


@promise()
def what_one_rank_observes_restarts_all(driver: Any) -> None:
    """``observe()`` of a metric on one rank restarts all, if a method takes it for a reason to."""
    acts = {
        1: lambda it, mine: it.observe(learning_rate=1.0),
        3: lambda it, mine: it.observe(learning_rate=0.01) if mine else None,
    }
    _against_loopback(driver, acts)


@promise()
def a_trigger_in_a_step_with_a_nan_waits(driver: Any) -> None:
    """A trigger that is asked for in a step that meets a NaN waits for the next good step."""
    _against_loopback(driver, {3: lambda it, mine: it.trigger() if mine else None}, bad_steps=(3, 4))
