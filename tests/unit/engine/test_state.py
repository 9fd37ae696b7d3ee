"""The state of one rank: rounds, swap and discard, pauses, triggers, and buffers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hvdcompress.engine.bucket_state import BucketState
from hvdcompress.engine.commit import Part
from hvdcompress.engine.state import RankState
from hvdcompress.loopback import Loopback
from hvdcompress.method import TensorSpec
from hvdcompress.ops import fast
from hvdcompress.plan import Bucket, plan_of
from tests.unit.engine.helpers import SHAPES, gradients, state_dicts, train

PLAN = plan_of("topk", density=0.1, min_elements=1, bucket_elements=0)
LIKE = np.zeros(1, np.float32)


def bucket(name: str) -> Bucket:
    (found,) = PLAN.buckets([TensorSpec(name, (20,))])
    return found


@pytest.fixture
def local() -> RankState:
    return RankState(PLAN, 0, 2)


def next_of(local: RankState, *names: str) -> dict[str, BucketState]:
    """Return the state of tensors one step later, with the number of the step as residual."""
    found = {}
    for name in names:
        state = Part(local, bucket(name), LIKE, fast).state
        residual = np.full(20, state.step + 1, np.float32)
        found[name] = replace(state, step=state.step + 1, slots={"residual": residual})
    return found


def steps(local: RankState) -> dict[str, int]:
    return {name: state.step for name, state in local.states.items()}


# -- discard ------------------------------------------------------------------------------------------------------


def test_discard_restores_the_whole_round(local: RankState) -> None:
    for _ in range(2):
        local.begin_round()
        local.swap(next_of(local, "a", "b"))
    local.discard()
    assert steps(local) == {"a": 1, "b": 1} and local.states["a"].slots["residual"][0] == 1
    with pytest.raises(RuntimeError, match="no step to discard"):
        local.discard()


def test_discard_keeps_an_exchange_that_began_in_an_earlier_round(local: RankState) -> None:
    """In TensorFlow, the exchange of one tensor may end after another tensor has begun the next step."""
    local.begin_round()
    late, begun_in = next_of(local, "a"), local.round
    local.begin_round()
    local.swap(next_of(local, "b"), local.round)
    local.swap(late, begun_in)
    local.discard()
    assert steps(local) == {"a": 1}


def test_the_second_exchange_of_a_tensor_begins_a_round(local: RankState) -> None:
    """Under FSDP2 nothing tells when a step begins."""
    for name in ("a", "b", "a", "b"):
        local.swap(next_of(local, name))
    local.discard()
    assert steps(local) == {"a": 1, "b": 1}


def test_nothing_can_be_discarded_after_the_step_of_the_optimizer(local: RankState) -> None:
    local.swap(next_of(local, "a"))
    local.end_round()
    with pytest.raises(RuntimeError, match="no step to discard"):
        local.discard()


def test_a_trigger_survives_discard(local: RankState) -> None:
    for _ in range(2):
        local.begin_round()
        local.swap(next_of(local, "a"))
    local.trigger_requests.add("a")
    local.restart(["a"])
    local.discard()
    assert local.states["a"].step == 1 and local.states["a"].triggers == 1 and not local.trigger_requests
    assert local.next_step(bucket("a")).restart == (1, 1), "it takes effect in the next step"
    local.restart(["a", "unknown"])
    assert local.states["a"].triggers == 2


def test_a_loaded_state_is_claimed_by_its_tensor_and_restored_by_discard(local: RankState) -> None:
    local.swap(next_of(local, "a", "b"))
    other = RankState(PLAN, 0, 2)
    other.load_state_dict(local.state_dict())
    with pytest.raises(RuntimeError, match="no step to discard"):
        other.discard()
    assert not other.states and other.steps() == {"a": 1, "b": 1} and other.ages() == {"a": (1,), "b": (1,)}
    other.begin_round()
    other.swap(next_of(other, "a"))
    assert steps(other) == {"a": 2}
    other.discard()
    assert steps(other) == {"a": 1} and other.residual("a")[0] == 1
    assert other.state_dict()["steps"] == {"a": 1, "b": 1}


# -- tensors and buffers ------------------------------------------------------------------------------------------


def test_forgotten_and_released_states_take_no_memory(local: RankState) -> None:
    local.swap(next_of(local, "a", "b"))
    for name in "ab":
        local.memory[name].second_buffer("residual", local.states[name].slots["residual"], "float32", fast)
    local.forget(["a"])
    assert steps(local) == {"b": 1} and list(local.memory) == ["b"]
    local.release()
    assert not local.states and not local.memory and local.replaced


@pytest.mark.parametrize(
    ("plan", "dtype", "passes"),
    [
        ({"method": "none"}, "float32", True),
        ({"method": "none"}, "float16", False),
        ({"method": "none", "feedback": "plain"}, "float32", False),
        ({"method": "fp16"}, "float32", False),
    ],
)
def test_uncompressed_float32_tensors_pass_through(plan: dict[str, Any], dtype: str, passes: bool) -> None:
    made = plan_of(plan, min_elements=1)
    (one,) = made.buckets([TensorSpec("a", (40, 50), dtype)])
    assert RankState(made, 0, 2).next_step(one).passes_through is passes


# -- steps that are discarded, and steps during a pause -----------------------------------------------------------


@pytest.mark.parametrize(
    "method,settings",
    [
        ("topk", {}),  # 30 steps, because the ages of its elements are renewed every 27 steps
        ("topk", {"bucket_elements": 100_000}),
        ("topk", {"warmup": {"steps": 3}}),
        ("topk", {"schedule": {"density": {"steps": {0: 0.3, 3: 0.1}}}}),
        ("powersgd", {}),
        ("dgc", {}),
        ("gradiveq", {}),
        ("qsgd", {"bucket_elements": 100_000}),
    ],
    ids=str,
)
def test_discarded_and_paused_steps_leave_no_trace(method: str, settings: dict[str, Any]) -> None:
    net, twin = (Loopback(method, 2, min_elements=20, **settings) for _ in range(2))
    for step in range(30 if not settings else 8):
        if step % 4 == 0:
            before = state_dicts(net)
            train(net, [1000 + step])
            net.discard()
            if step:  # the first step makes the tensors known
                np.testing.assert_equal(state_dicts(net), before)
            given = gradients(SHAPES, 2000 + step)
            with net.paused():
                result = net.allreduce(given)[0]
            for name in SHAPES:
                np.testing.assert_allclose(result[name], (given[0][name] + given[1][name]) / 2, atol=1e-6)
        np.testing.assert_equal(train(net, [step]), train(twin, [step]))
    np.testing.assert_equal(state_dicts(net), state_dicts(twin))
