"""The exchange of one bucket in one step: its stages, and how gradients are added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hvdcompress.engine.commit import Stage, commit_step
from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.lockstep import perform
from hvdcompress.engine.state import RankState
from hvdcompress.engine.transport import Group
from hvdcompress.method import TensorSpec
from hvdcompress.ops import fast
from hvdcompress.plan import IN_ORDER, Bucket, plan_of
from hvdcompress.testing import numbers
from tests.unit.engine.helpers import SHAPES, Shapes

WORLD = 2
TOPK = {"method": "topk", "density": 0.1, "min_elements": 1, "bucket_elements": 10**7}


def make_ranks(
    plan: dict[str, Any], shapes: Shapes = SHAPES, world_size: int = WORLD
) -> tuple[list[RankState], Bucket]:
    """Return the state of each rank, and the bucket of all tensors."""
    made = plan_of(plan)
    (bucket,) = made.buckets([TensorSpec(name, shape) for name, shape in shapes.items()], IN_ORDER)
    return [RankState(made, rank, world_size) for rank in range(world_size)], bucket


def begin(local: RankState, bucket: Bucket) -> Exchange:
    """Return an exchange of a bucket that has no gradients yet."""
    group = Group(local.rank, local.world_size)
    return Exchange(local, group, bucket, np.zeros(1, np.float32), fast)


def fill(exchange: Exchange, *seed: int) -> list[np.ndarray]:
    """Add all gradients of a bucket, start the exchange, and return the arrays for the results."""
    members = exchange.bucket.members
    given = [numbers((member.size,), number, *seed) for number, member in enumerate(members)]
    outs = [np.empty_like(gradient) for gradient in given]
    exchange.add(range(len(members)), given, outs)
    exchange.start()
    return outs


def finish(exchanges: Sequence[Exchange], factor: float = 1.0) -> None:
    """Run started exchanges of all ranks until their results are written."""
    while exchanges[0].stage is Stage.RUNNING:
        collectives: list[Any] = [exchange.collective for exchange in exchanges]
        for exchange, result in zip(exchanges, perform(collectives), strict=True):
            exchange.resume(result)
    for exchange in exchanges:
        exchange.deliver(factor)


@pytest.fixture
def exchange() -> Exchange:
    """An exchange of a single rank, in stage FILLING."""
    (local,), bucket = make_ranks(TOPK, world_size=1)
    return begin(local, bucket)


#: what moves an exchange of a single rank to its next stage
ADVANCE: list[Callable[[Exchange], Any]] = [
    lambda exchange: fill(exchange),
    lambda exchange: exchange.resume([exchange.collective.x]),  # type: ignore[union-attr]
    lambda exchange: exchange.deliver(0.5),
    lambda exchange: exchange.close(),
]
CALLS: dict[str, tuple[Callable[[Exchange], Any], set[Stage]]] = {
    "add": (lambda exchange: exchange.add([0], [np.zeros(2000, np.float32)]), {Stage.FILLING}),
    "start": (lambda exchange: exchange.start(), set()),  # it needs all gradients, too
    "resume": (ADVANCE[1], {Stage.RUNNING}),
    "deliver": (lambda exchange: exchange.deliver(1.0), {Stage.REDUCED}),
    "new_state": (lambda exchange: exchange.new_state(), {Stage.DELIVERED}),
    "close": (lambda exchange: exchange.close(), {Stage.DELIVERED}),
    "abandon": (lambda exchange: exchange.abandon(), set(Stage)),
}


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_the_wrong_stage_is_refused_and_changes_nothing(exchange: Exchange, call: str, stage: Stage) -> None:
    for advance in ADVANCE[: list(Stage).index(stage)]:
        advance(exchange)
    assert exchange.stage is stage
    function, allowed = CALLS[call]
    if stage in allowed:
        function(exchange)
    else:
        with pytest.raises((RuntimeError, AttributeError)):  # without a collective there is nothing to resume
            function(exchange)
        assert exchange.stage is stage


def test_gradients_that_are_missing_or_repeated_or_of_another_size_are_errors(exchange: Exchange) -> None:
    exchange.add([1], [np.zeros(9, np.float32)])
    with pytest.raises(RuntimeError, match="'a', 'c', 'd'"):
        exchange.start()
    with pytest.raises(ValueError, match="tensor 'b'"):
        exchange.add([1], [np.zeros(9, np.float32)])
    with pytest.raises(ValueError, match="tensor 'd' has 51 elements"):
        exchange.add([3], [np.zeros(9, np.float32)])


plans = pytest.mark.parametrize(
    "plan,at_once",
    [
        (TOPK, False),
        ({"method": "signsgd", "min_elements": 1}, False),  # runs on each tensor
        ({"method": "qsgd", "min_elements": 1, "bucket_elements": 10**7}, False),  # without feedback
        ({"method": "none"}, True),
    ],
    ids=["topk", "signsgd", "qsgd", "none"],
)


@plans
def test_results_and_state_do_not_depend_on_the_order_of_gradients(plan: dict[str, Any], at_once: bool) -> None:
    found = []
    for order in ([[0, 1, 2, 3]], [[3], [1], [0], [2]], [[2, 0], [3, 1]]):
        ranks, bucket = make_ranks(plan)
        for step in range(3):
            exchanges = [begin(local, bucket) for local in ranks]
            for rank, exchange in enumerate(exchanges):
                assert exchange.at_once is at_once
                given = [numbers((member.size,), number, rank, step) for number, member in enumerate(bucket.members)]
                for indices in order:
                    exchange.add(indices, [given[index] for index in indices])
                exchange.start()
            finish(exchanges, 1 / WORLD)
            for local, exchange in zip(ranks, exchanges, strict=True):
                commit_step(local, [exchange])
        found.append([[exchange.outs for exchange in exchanges], [local.state_dict()["state"] for local in ranks]])
    np.testing.assert_equal(found[1:], found[:1] * 2)


@plans
def test_a_method_gets_zeros_instead_of_a_gradient_that_is_not_finite(plan: dict[str, Any], at_once: bool) -> None:
    (local,), bucket = make_ranks(plan, world_size=1)
    exchange = begin(local, bucket)
    given = [np.ones(member.size, np.float32) for member in bucket.members]
    given[2][7] = np.nan
    exchange.add(range(4), given)
    assert exchange.finite is False
    exchange.start()
    finish([exchange])
    assert all(np.isfinite(out).all() for out in exchange.outs)


def test_the_collective_that_a_rank_waits_for_is_described(exchange: Exchange) -> None:
    fill(exchange)
    assert exchange.describe_wait() == "tensor 'a+3' (method topk, round 0)"
    assert exchange.describe_wait(3) == "tensor 'a+3' (method topk, round 0, and 2 more)"
