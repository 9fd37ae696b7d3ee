"""One bucket in one step: its stages, how gradients come in, and what is left of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hvdcompress.engine.commit import Outcome, commit_step
from hvdcompress.engine.exchange import Exchange, ExchangeError, Stage
from hvdcompress.engine.intake import TILE, Tiles, Whole
from hvdcompress.engine.rehearsal import carry_out
from hvdcompress.engine.setup import Setup
from hvdcompress.engine.state import RankState
from hvdcompress.engine.transport import Group
from hvdcompress.method import TensorSpec
from hvdcompress.ops import fast
from hvdcompress.plan import IN_ORDER, Bucket, plan_of
from hvdcompress.testing import numbers

SHAPES = {"a": (40, 50), "b": (9,), "c": (300,), "d": (17, 3)}
WORLD = 2
#: the plan, and the intake that its bucket has
PLANS: dict[str, tuple[dict[str, Any], type]] = {
    "topk": ({"method": "topk", "density": 0.1, "min_elements": 1, "bucket_elements": 10**7}, Tiles),
    "on each tensor": ({"method": "signsgd", "min_elements": 1}, Tiles),
    "without feedback": ({"method": "qsgd", "min_elements": 1, "bucket_elements": 10**7}, Tiles),
    "small and dense": ({"method": "none"}, Whole),
}


def ranks_of(plan: dict[str, Any], shapes: dict[str, tuple[int, ...]] = SHAPES) -> tuple[list[RankState], Bucket]:
    made = plan_of(plan)
    specs = [TensorSpec(name, shape) for name, shape in shapes.items()]
    (bucket,) = made.buckets(specs, IN_ORDER)
    return [RankState(made, rank, WORLD) for rank in range(WORLD)], bucket


def begun(local: RankState, bucket: Bucket) -> Exchange:
    return Exchange(Setup(local, Group(local.rank, WORLD), bucket, np.zeros(1, np.float32), fast))


def gradients(bucket: Bucket, rank: int, step: int = 0) -> list[np.ndarray]:
    return [numbers((member.size,), number, rank, step) for number, member in enumerate(bucket.members)]


def to_the_end(exchanges: Sequence[Exchange]) -> None:
    """Start exchanges whose gradients are there, and run them until their results are written."""
    for exchange in exchanges:
        exchange.start()
    while exchanges[0].stage is Stage.RUNNING:
        collectives: list[Any] = [exchange.collective for exchange in exchanges]
        for exchange, result in zip(exchanges, carry_out(collectives), strict=True):
            exchange.resume(result)
    for exchange in exchanges:
        exchange.deliver(1.0 / WORLD)


# -- stages -----------------------------------------------------------------------------------------------


def at(stage: Stage) -> Exchange:
    """An exchange of rank 0 in this stage."""
    ranks, bucket = ranks_of(PLANS["topk"][0])
    exchanges = [begun(local, bucket) for local in ranks]
    if stage is Stage.FILLING:
        return exchanges[0]
    for exchange in exchanges:
        exchange.add(range(len(bucket.members)), gradients(bucket, exchange.setup.group.rank))
        exchange.start()
    if stage is Stage.RUNNING:
        return exchanges[0]
    collectives: list[Any] = [exchange.collective for exchange in exchanges]
    exchanges[0].resume(carry_out(collectives)[0])
    if stage is Stage.REDUCED:
        return exchanges[0]
    exchanges[0].deliver(0.5)
    if stage is Stage.CLOSED:
        exchanges[0].close()
    return exchanges[0]


CALLS: dict[str, tuple[Callable[[Exchange], Any], set[Stage]]] = {
    "add": (lambda one: one.add([0], [np.zeros(2000, np.float32)]), {Stage.FILLING}),
    "start": (lambda one: one.start(), set()),  # the gradients have to be there, too
    "resume": (lambda one: one.resume([one.collective.x] * WORLD), {Stage.RUNNING}),  # type: ignore[union-attr]
    "deliver": (lambda one: one.deliver(1.0), {Stage.REDUCED, Stage.DELIVERED}),
    "new_state": (lambda one: one.new_state(), {Stage.DELIVERED}),
    "close": (lambda one: one.close(), {Stage.DELIVERED}),
    "abandon": (lambda one: one.abandon(), set(Stage)),
}


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_the_wrong_stage_is_refused_and_changes_nothing(call: str, stage: Stage) -> None:
    exchange, (function, allowed) = at(stage), CALLS[call]
    assert exchange.stage is stage
    if stage in allowed:
        function(exchange)
        return
    with pytest.raises((RuntimeError, AttributeError)):  # without a collective there is nothing to answer
        function(exchange)
    assert exchange.stage is stage


def test_a_start_without_all_gradients_names_those_that_are_missing() -> None:
    ranks, bucket = ranks_of(PLANS["topk"][0])
    exchange = begun(ranks[0], bucket)
    exchange.add([1], [np.zeros(9, np.float32)])
    with pytest.raises(RuntimeError, match="'a', 'c', 'd'"):
        exchange.start()


def test_a_second_gradient_and_one_of_another_size_are_refused() -> None:
    ranks, bucket = ranks_of(PLANS["topk"][0])
    exchange = begun(ranks[0], bucket)
    exchange.add([1], [np.zeros(9, np.float32)])
    with pytest.raises(ValueError, match="tensor 'b'"):
        exchange.add([1], [np.zeros(9, np.float32)])
    with pytest.raises(ValueError, match="tensor 'd' has 51 elements"):
        exchange.add([3], [np.zeros(9, np.float32)])


# -- gradients come in ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLANS)
def test_the_order_of_gradients_does_not_matter(kind: str) -> None:
    """One by one in any order, or all at once: the same payloads, results and state, with all intakes."""
    plan, intake = PLANS[kind]
    found = []
    for order in ([[0, 1, 2, 3]], [[3], [1], [0], [2]], [[2, 0], [3, 1]]):
        ranks, bucket = ranks_of(plan)
        for step in range(3):
            exchanges, outs = [begun(local, bucket) for local in ranks], []
            for rank, exchange in enumerate(exchanges):
                assert isinstance(exchange._intake, intake)
                given = gradients(bucket, rank, step)
                outs.append([np.empty_like(each) for each in given])
                for indices in order:
                    assert not exchange.is_full
                    some = [given[index] for index in indices]
                    exchange.add(indices, some, [outs[rank][index] for index in indices])
            to_the_end(exchanges)
            for local, exchange in zip(ranks, exchanges, strict=True):
                commit_step(local, [exchange], [], Outcome())
            assert all((one == other).all() for one, other in zip(*outs, strict=True))
        found.append([outs[0], [local.state_dict()["state"] for local in ranks]])
    for other in found[1:]:
        np.testing.assert_equal(other, found[0])


def test_gradients_are_taken_in_by_the_million() -> None:
    """While they are in the cache, also before the last one has come, and not one by one."""
    shapes = {name: (TILE // 2,) for name in "abcde"}
    ranks, bucket = ranks_of(PLANS["topk"][0], shapes)
    exchange, taken = begun(ranks[0], bucket), []
    take = exchange._intake._process
    exchange._intake._process = lambda indices, *rest: taken.append(indices) or take(indices, *rest)  # type: ignore
    for index in (4, 2, 0, 1, 3):
        exchange.add([index], [np.ones(TILE // 2, np.float32)])
    assert taken == [[4, 2], [0, 1], [3]]


@pytest.mark.parametrize("kind", PLANS)
def test_a_method_never_sees_what_is_not_finite(kind: str) -> None:
    """The gradient takes part as zeros, the exchange says so, and the step has no effect."""
    ranks, bucket = ranks_of(PLANS[kind][0])
    before = [local.state_dict() for local in ranks]
    exchanges, outs = [begun(local, bucket) for local in ranks], []
    for rank, exchange in enumerate(exchanges):
        given = gradients(bucket, rank)
        given[2][7] = np.nan if rank else given[2][7]
        outs.append([np.zeros_like(each) for each in given])
        exchange.add(range(4), given, outs[rank])
        assert exchange.finite is (rank == 0)
    to_the_end(exchanges)
    for exchange in exchanges:
        assert all(np.isfinite(out).all() for out in exchange.outs)
    for local, exchange in zip(ranks, exchanges, strict=True):
        commit_step(local, [exchange], [], Outcome(finite=False))
    assert all(np.isnan(out).all() for each in outs for out in each)
    for local, was in zip(ranks, before, strict=True):
        assert not any(local.steps()) and was["metrics"] == local.state_dict()["metrics"]
        assert all(not array.any() for slots in local.state_dict()["state"].values() for array in slots.values())


def test_missing_gradients_count_as_zeros() -> None:
    ranks, bucket = ranks_of(PLANS["topk"][0])
    exchanges = [begun(local, bucket) for local in ranks]
    whole = gradients(bucket, 1)
    exchanges[0].add([0], [np.zeros(2000, np.float32)])
    exchanges[0].fill_missing()
    exchanges[1].add(range(4), [each.copy() for each in whole])
    to_the_end(exchanges)
    for local, exchange in zip(ranks, exchanges, strict=True):
        commit_step(local, [exchange], [], Outcome())
    residual = np.concatenate([ranks[1].residual(name) for name in SHAPES])  # type: ignore[arg-type]
    np.testing.assert_allclose(2 * np.concatenate(exchanges[0].outs) + residual, np.concatenate(whole), atol=1e-6)


# -- commit -----------------------------------------------------------------------------------------------


def test_a_commit_that_fails_halfway_leaves_all_states_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two buckets, the second cannot make its new state: the first does not keep its own either."""
    plan = plan_of("topk", density=0.1, min_elements=1, bucket_elements=0)
    local = RankState(plan, 0, 1)
    buckets = plan.buckets([TensorSpec("a", (40,)), TensorSpec("b", (50,))])

    def exchanged(step: int) -> list[Exchange]:
        found = []
        for bucket in buckets:
            exchange = Exchange(Setup(local, Group(0, 1), bucket, np.zeros(1, np.float32), fast))
            exchange.add([0], [numbers((bucket.spec.size,), step)])
            exchange.start()
            while exchange.stage is Stage.RUNNING:
                exchange.resume(carry_out([exchange.collective])[0])  # type: ignore[list-item]
            exchange.deliver(1.0)
            found.append(exchange)
        return found

    commit_step(local, exchanged(0), [], Outcome())
    before, states = local.state_dict(), local.states
    local.begin_round()
    exchanges = exchanged(1)
    monkeypatch.setattr(exchanges[1], "new_state", lambda unused: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        commit_step(local, exchanges, [], Outcome())
    assert local.states is states
    np.testing.assert_equal(local.state_dict(), before)
    commit_step(local, exchanged(1), [], Outcome())
    twin = local
    local = RankState(plan, 0, 1)
    for step in range(2):
        local.begin_round()
        commit_step(local, exchanged(step), [], Outcome())
    np.testing.assert_equal(local.state_dict(), twin.state_dict())


def test_an_error_of_the_method_names_tensor_round_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, bucket = ranks_of(PLANS["topk"][0])
    method = type(bucket.program.main)
    monkeypatch.setattr(method, "decode", lambda *_: 1 / 0)
    exchange = begun(ranks[1], bucket)
    exchange.add(range(4), gradients(bucket, 1))
    exchange.start()
    with pytest.raises(ExchangeError, match=r"tensor 'a\+3' \(method topk, round 0, rank 1\): ZeroDivisionError"):
        exchange.resume([exchange.collective.x] * WORLD)  # type: ignore[union-attr]


@pytest.mark.parametrize("method,linear", [("randomk", True), ("none", True)])
def test_a_payload_that_a_stock_all_reduce_carries(method: str, linear: bool) -> None:
    """Averaged or summed, the result is the average; of a method that is not linear, the sum is restored first."""
    results = {}
    for factor in (1.0 / WORLD, 1.0):
        ranks, bucket = ranks_of({"method": method, "min_elements": 1}, {"w": (60,)})
        exchanges = [begun(local, bucket) for local in ranks]
        for rank, exchange in enumerate(exchanges):
            assert exchange.setup.method.linear is linear
            exchange.add([0], gradients(bucket, rank), [np.empty(60, np.float32)])
            exchange.start()
            assert exchange.setup.next_step.carried_elements() == len(exchange.collective.x)  # type: ignore[union-attr]
        total = sum(exchange.collective.x for exchange in exchanges)  # type: ignore[union-attr, misc]
        for exchange in exchanges:
            exchange.deliver(exchange.resume_carried(total * np.float32(factor), factor))
        results[factor] = exchanges[0].outs[0]
    np.testing.assert_allclose(results[1.0], WORLD * results[0.5], rtol=1e-6)
    assert np.count_nonzero(results[1.0])
    if method == "none":
        np.testing.assert_allclose(results[1.0], sum(gradients(bucket, rank)[0] for rank in range(WORLD)), rtol=1e-6)


def test_a_payload_of_a_method_that_is_not_linear_is_a_sum_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, bucket = ranks_of({"method": "none"}, {"w": (5,)})
    monkeypatch.setattr(type(bucket.program.main), "linear", False)
    exchange = begun(ranks[0], bucket)
    exchange.add([0], [np.ones(5, np.float32)], [np.empty(5, np.float32)])
    exchange.start()
    left = exchange.resume_carried(np.full(5, 1.5, np.float32), 0.5)
    assert left == 0.5 and exchange.reduced[0].total.tolist() == [3.0] * 5  # type: ignore[union-attr]
    exchange.deliver(left)
    assert exchange.outs[0].tolist() == [1.5] * 5


def test_what_is_waited_for_in_words() -> None:
    exchange = at(Stage.RUNNING)
    assert exchange.describe_wait() == "tensor 'a+3' (method topk, round 0)"
    assert exchange.describe_wait(3) == "tensor 'a+3' (method topk, round 0, and 2 more)"


def test_observers_are_told_of_work_before_and_after_the_collectives() -> None:
    from hvdcompress.engine.telemetry.observer import Observer

    class Log(Observer):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def encoded(self, rank: int, name: str, seconds: float) -> None:
            self.seen.append("encoded")

        def completed(self, rank: int, name: str, what: Any) -> None:
            self.seen.append("completed")

        def decoded(self, rank: int, name: str, seconds: float) -> None:
            self.seen.append("decoded")

    ranks, bucket = ranks_of(PLANS["topk"][0])
    log = Log()
    ranks[0].observers.append(log)
    exchanges = [begun(local, bucket) for local in ranks]
    for rank, exchange in enumerate(exchanges):
        exchange.add(range(len(bucket.members)), gradients(bucket, rank))
    to_the_end(exchanges)
    completed = log.seen.index("completed")
    assert set(log.seen[:completed]) == {"encoded"}
    assert set(log.seen[completed:]) == {"completed", "decoded"}


def test_tensors_that_no_rank_uses_keep_their_residuals() -> None:
    ranks, bucket = ranks_of({**PLANS["topk"][0], "min_elements": 1})
    for step in range(2):
        exchanges = [begun(local, bucket) for local in ranks]
        for rank, exchange in enumerate(exchanges):
            exchange.add(range(len(bucket.members)), gradients(bucket, rank, step))
        to_the_end(exchanges)
        before = [local.states[bucket.spec.name].slots["residual"].copy() if step else None for local in ranks]
        for local, exchange in zip(ranks, exchanges, strict=True):
            commit_step(local, [exchange], [], Outcome(True, False, {"c"} if step else set()))
    (start, stop) = bucket.spans[[member.name for member in bucket.members].index("c")]
    for local, kept in zip(ranks, before, strict=True):
        now = local.states[bucket.spec.name].slots["residual"]
        assert kept is not None
        np.testing.assert_array_equal(now[start:stop], kept[start:stop])
        assert (now[:start] != kept[:start]).any() and (now[stop:] != kept[stop:]).any()


@pytest.mark.parametrize(
    ("plan", "dtype", "passes"),
    [
        ({"method": "none"}, "float32", True),
        ({"method": "none"}, "float16", False),
        ({"method": "none", "feedback": "plain"}, "float32", False),
        ({"method": "fp16"}, "float32", False),
    ],
)
def test_what_a_stock_all_reduce_does_alone(plan: dict[str, Any], dtype: str, passes: bool) -> None:
    made = plan_of(plan, min_elements=1)
    (bucket,) = made.buckets([TensorSpec("a", (40, 50), dtype)])
    assert RankState(made, 0, WORLD).next_step(bucket).passes_through is passes
