"""One rank's states: rounds, swap and discard, triggers, claims, second buffers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hvdcompress.engine.bucket_state import BucketState, Memory
from hvdcompress.engine.state import RankState
from hvdcompress.method import TensorSpec
from hvdcompress.ops import fast
from hvdcompress.plan import Bucket, plan_of

PLAN = plan_of("topk", density=0.1, min_elements=1, bucket_elements=0)
LIKE = np.zeros(1, np.float32)


def bucket(name: str, size: int = 20) -> Bucket:
    (found,) = PLAN.buckets([TensorSpec(name, (size,))])
    return found


def next_of(local: RankState, name: str) -> dict[str, BucketState]:
    """The state of a tensor one step on, with a residual that tells the step."""
    one = bucket(name)
    local.note_begun(one)
    state = local.state_of(local.next_step(one), LIKE, fast)
    return {name: replace(state, step=state.step + 1, slots={"residual": np.full(20, state.step + 1, np.float32)})}


def steps(local: RankState) -> dict[str, int]:
    return {name: state.step for name, state in local.states.items()}


def local_of(**settings: Any) -> RankState:
    return RankState(plan_of("topk", density=0.1, min_elements=1, bucket_elements=0, **settings), 0, 2)


def test_a_discarded_round_is_swapped_back_whole() -> None:
    local = local_of()
    for _ in range(2):
        local.begin_round()
        local.swap({**next_of(local, "a"), **next_of(local, "b")})
    assert steps(local) == {"a": 2, "b": 2}
    local.discard()
    assert steps(local) == {"a": 1, "b": 1} and local.states["a"].slots["residual"][0] == 1
    with pytest.raises(RuntimeError, match="no step to discard"):
        local.discard()


def test_an_exchange_that_began_in_an_earlier_round_is_not_taken_back() -> None:
    """A tensor of TensorFlow may end its exchange when another one has begun the next step."""
    local = local_of()
    local.begin_round()
    late, began = next_of(local, "a"), local.round
    local.begin_round()
    local.swap(next_of(local, "b"), local.round)
    local.swap(late, began)
    local.discard()
    assert steps(local) == {"a": 1}


def test_the_second_exchange_of_a_tensor_begins_a_round_of_its_own() -> None:
    """Where nobody says when a step begins, as under FSDP2."""
    local = local_of()
    for name in ("a", "b", "a", "b"):
        local.swap(next_of(local, name))
    local.discard()
    assert steps(local) == {"a": 1, "b": 1}


def test_after_the_optimizers_step_nothing_can_be_discarded() -> None:
    local = local_of()
    local.swap(next_of(local, "a"))
    local.end_round()
    with pytest.raises(RuntimeError, match="no step to discard"):
        local.discard()


def test_what_ranks_agreed_on_survives_discard() -> None:
    local = local_of()
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


def test_a_loaded_state_is_claimed_once_and_discard_goes_back_to_it() -> None:
    first = local_of()
    first.begin_round()
    first.swap({**next_of(first, "a"), **next_of(first, "b")})
    second = local_of()
    second.load_state_dict(first.state_dict())
    assert not second.states and second.steps() == {"a": 1, "b": 1} and second.ages() == {"a": (1,), "b": (1,)}
    second.begin_round()
    second.swap(next_of(second, "a"))
    assert steps(second) == {"a": 2}
    second.discard()
    assert steps(second) == {"a": 1} and second.residual("a")[0] == 1  # type: ignore[index]
    assert second.state_dict()["steps"] == {"a": 1, "b": 1}


def test_a_tensor_of_another_shape_is_refused() -> None:
    local = local_of()
    local.swap(next_of(local, "a"))
    other = bucket("a", 30)
    with pytest.raises(ValueError, match=r"'a' had shape \(20,\) before and has \(30,\) now"):
        local.state_of(local.next_step(other), LIKE, fast)


def test_forgotten_and_released_states_have_no_memory() -> None:
    local = local_of()
    local.swap({**next_of(local, "a"), **next_of(local, "b")})
    for name in "ab":
        local.memory_of(name).second_buffer("residual", local.states[name].slots["residual"], "float32", fast)
    assert local.num_state_bytes() == 4 * 20 * 4, "each buffer once, though the memory holds the current one, too"
    local.forget(["a"])
    assert steps(local) == {"b": 1} and list(local.memory) == ["b"]
    local.release()
    assert not local.states and not local.memory and local.replaced and not local.num_state_bytes()


def test_second_buffers_take_turns() -> None:
    memory, current = Memory(), np.zeros(5, np.float32)
    second = memory.second_buffer("residual", current, "float32", fast)
    assert second is not current and memory.second_buffer("residual", second, "float32", fast) is current
    assert memory.second_buffer("residual", current, "float32", fast) is second, "discard() goes back and forth"
    loaded = np.ones(5, np.float32)
    assert memory.second_buffer("residual", loaded, "float32", fast) is not loaded
    longer = np.zeros(6, np.float32)
    assert len(memory.second_buffer("residual", longer, "float32", fast)) == 6


def test_a_paused_rank_sends_all_and_stays_where_it_is() -> None:
    local = local_of(warmup={"steps": 1})
    one = bucket("a")
    assert local.next_step(one).method.id == "topk"
    local.paused = True
    planned = local.next_step(one)
    assert planned.method.id == "none" and planned.phase == 0 and planned.carried_elements() == 20
