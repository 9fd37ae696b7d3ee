"""A bucket's progress from step to step: stages of a program, phases of a method, and triggers that restart them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcompress import get_method, registry
from hvdcompress.loopback import Loopback
from hvdcompress.method import AllReduce, Method, Reduced, Sparse, TensorSpec
from hvdcompress.plan import Plan, Program
from hvdcompress.testing import Trial


@registry.method
class Phased(Method):
    """Sends everything for two steps, then every other value. A loss that rises by half, or |x| > 100, restarts it."""

    paper, sends = "none", "test"
    phases = ("dense", "half")

    def phase_of(self, age: int) -> int:
        return int(age >= 2)

    def wants_trigger(self, metric: str, value: float, low: float, high: float) -> bool:
        return metric == "loss" and value > 1.5 * low

    def exchange(self, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        index = work.ops.top_k(x, len(x))[:: 2 if ctx.phase else 1]
        total = yield AllReduce(work.ops.take(x, index))
        return Reduced(total=Sparse(index, total), trigger=work.ops.max_abs(x) > 100)


@pytest.fixture
def net() -> Loopback:
    return Loopback(Phased(), world_size=2, min_elements=1)


def run(net: Loopback, steps: int, value: float = 1.0) -> list[int]:
    """Return how many of 8 values are reduced in each step."""
    given = [np.full(8, value, np.float32)] * net.world_size
    return [np.count_nonzero(net.allreduce(given, "w")[0]) for _ in range(steps)]


def test_phases_count_from_the_first_step_of_the_method(net: Loopback) -> None:
    assert run(net, 4) == [8, 8, 4, 4]
    late = Program(((0, get_method("none")), (3, Phased())))
    assert run(Loopback(Plan(late, min_elements=1), world_size=2), 7) == [8, 8, 8, 8, 8, 4, 4]


def test_a_metric_is_compared_with_its_extremes_since_the_last_trigger(net: Loopback) -> None:
    run(net, 3)
    for loss in (2.0, 1.0, 1.4, 1.2):  # never 1.5 times the lowest loss
        net.report_metrics(loss=loss, learning_rate=0.1)
        assert run(net, 1) == [4]
    net.report_metrics(loss=1.6)
    assert run(net, 2) == [4, 8]
    net.report_metrics(loss=2.0)  # the first loss since the trigger
    net.report_metrics(loss=2.5)
    assert run(net, 2) == [8, 4]
    net.report_metrics(loss=float("nan"))
    assert run(net, 2) == [4, 8]


def test_a_trigger_of_a_method_waits_for_the_next_good_step(net: Loopback) -> None:
    run(net, 3)
    run(net, 1, value=200.0)  # its request is sent with the next status
    assert np.isnan(net.allreduce([np.full(8, np.nan, np.float32)] * 2, "w")[0]).all()  # this step is undone
    assert run(net, 4) == [4, 8, 8, 4]


def test_triggers_and_metrics_are_saved_and_restored() -> None:
    nets = [Trial(Phased(), 2), Trial(Phased(), 2)]
    run(nets[0], 3)
    nets[0].report_metrics(loss=1.0)
    nets[0].trigger()
    run(nets[0], 2)
    nets[0].report_metrics(loss=2.0)
    nets[1].restore(nets[0].saved(), [TensorSpec("w", (8,))])
    for net in nets:
        net.report_metrics(loss=2.5)
        assert run(net, 3) == [8, 4, 4]
        net.report_metrics(loss=3.5)
        assert run(net, 2) == [4, 8]
    assert nets[0].saved()[0]["restarts"] == nets[1].saved()[0]["restarts"] == {"w": [2, 2, 9]}
