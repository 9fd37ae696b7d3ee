"""A bucket's next step: loss scales, stages, phases and triggers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcompress import get, registry
from hvdcompress.loopback import Loopback
from hvdcompress.method import AllReduce, Method, Reduced, Sparse, TensorSpec
from hvdcompress.plan import Plan, Program
from hvdcompress.testing import Trial


def grads(step: int, world_size: int = 2) -> list[np.ndarray]:
    return [np.random.default_rng([step, rank]).normal(size=2000).astype(np.float32) for rank in range(world_size)]


@pytest.mark.parametrize("method", ["none", "fp16", "topk", "scalecom", "gaussiank", "randomk"])
@pytest.mark.parametrize("settings", [{}, {"warmup": {"steps": 2}}])
def test_a_changing_loss_scale_changes_nothing(method: str, settings: dict) -> None:
    """Scales that are powers of two: exact, in dense stages and compressed ones."""
    scale = [1.0]
    plain = Loopback(method, world_size=2, **settings)
    scaled = Loopback(method, world_size=2, loss_scale=lambda: scale[0], **settings)
    for step, scale[0] in enumerate([1.0, 4.0, 0.5, 1024.0, 2.0, 0.125]):  # noqa: B007
        want = plain.allreduce(grads(step), name="w")[1]
        got = scaled.allreduce([g * np.float32(scale[0]) for g in grads(step)], name="w")[1]
        np.testing.assert_array_equal(got / np.float32(scale[0]), want, err_msg=f"step {step}")


def test_stages_follow_each_other() -> None:
    net = Loopback("topk", world_size=2, warmup={"steps": 2}, schedule={"density": {"steps": {3: 0.1}}}, density=0.01)
    dense = Loopback("none", world_size=2)
    kept = []
    for step in range(5):
        got = net.allreduce(grads(step), name="w")[0]
        kept.append(np.count_nonzero(got))
        if step < 2:
            np.testing.assert_array_equal(got, dense.allreduce(grads(step), name="w")[0])
            assert not net.residual("w", rank=0).any()
    assert kept[0] == kept[1] == 2000
    assert 20 <= kept[2] <= 40
    assert 200 <= kept[3] <= 400 and 200 <= kept[4] <= 400


# -- phases and triggers ----------------------------------------------------------------------------------


@registry.method
class Phased(Method):
    """Dense for two steps, then every other value; wants a restart where a loss rises by half or |x| passes 100."""

    paper, sends = "none", "test"
    phases = ("dense", "half")

    def phase_of(self, age: int) -> int:
        return int(age >= 2)

    def wants_trigger(self, metric: str, value: float, low: float, high: float) -> bool:
        return metric == "loss" and value > 1.5 * low

    def exchange(self, x: Any, state: Any, ctx: Any, work: Any) -> Any:
        ops = work.ops
        index = ops.index_range(len(x), like=x)[:: 2 if ctx.phase else 1]
        work.counters["triggers"] = ctx.triggers
        total = yield AllReduce(ops.take(x, index))
        return Reduced(total=Sparse(index, total), trigger=ops.max_abs(x) > 100)


def run(net: Loopback, steps: int, size: float = 1.0) -> list[int]:
    """How many values come through in each step."""
    return [
        np.count_nonzero(net.allreduce([np.full(8, size, np.float32)] * net.world_size, "w")[0]) for _ in range(steps)
    ]


def test_phases_count_from_when_the_method_came_on() -> None:
    assert run(Loopback(Phased(), world_size=2, min_elements=1), 4) == [8, 8, 4, 4]
    late = Program(((0, get("none")), (3, Phased())))
    assert run(Loopback(Plan(late, min_elements=1), world_size=2), 7) == [8, 8, 8, 8, 8, 4, 4]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trigger_on_one_rank_acts_on_all_in_the_next_step(rank: int) -> None:
    net = Loopback(Phased(), world_size=2, min_elements=1)
    assert run(net, 4) == [8, 8, 4, 4]
    net.ranks[rank].trigger_requested = True
    assert run(net, 4) == [4, 8, 8, 4]
    assert [rank.states["w"].triggers for rank in net.ranks] == [1, 1]


def test_a_metric_may_trigger() -> None:
    net = Loopback(Phased(), world_size=2, min_elements=1)
    run(net, 3)
    for loss in (2.0, 1.0, 1.4, 1.2):  # never half as much again as the least
        net.observe(loss=loss, learning_rate=0.1)
        assert run(net, 1) == [4]
    net.observe(loss=1.6)
    assert run(net, 2) == [4, 8]
    net.observe(loss=2.0)  # the first since the trigger: the measure of what follows
    net.observe(loss=2.5)
    assert run(net, 2) == [8, 4]
    net.observe(loss=float("nan"))
    assert run(net, 2) == [4, 8]


def test_a_method_may_trigger_and_a_bad_step_keeps_the_request() -> None:
    net = Loopback(Phased(), world_size=2, min_elements=1)
    run(net, 3)
    run(net, 1, size=200.0)  # its request goes out with the next status
    assert np.isnan(net.allreduce([np.full(8, np.nan, np.float32)] * 2, "w")[0]).all()  # undone: as if not been
    assert run(net, 4) == [4, 8, 8, 4]


def test_triggers_are_saved_and_restored() -> None:
    nets = [Trial(Phased(), 2), Trial(Phased(), 2)]
    run(nets[0], 3)
    nets[0].observe(loss=1.0)
    nets[0].trigger()
    run(nets[0], 2)
    nets[0].observe(loss=2.0)
    nets[1].restore(nets[0].saved(), [TensorSpec("w", (8,))])
    for net in nets:
        net.observe(loss=2.5)
        assert run(net, 3) == [8, 4, 4]
        net.observe(loss=3.5)
        assert run(net, 2) == [4, 8]
    assert nets[0].saved()[0]["restarts"] == nets[1].saved()[0]["restarts"] == {"w": [2, 2, 9]}
