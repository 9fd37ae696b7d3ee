"""The fallback to uncompressed steps: what is compared, when it is decided, and what is saved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hvdcompress.engine.bucket_state import BucketState
from hvdcompress.engine.fallback import SCHEDULE, Fallback, Verdict
from hvdcompress.engine.state import RankState
from hvdcompress.method import TensorSpec
from hvdcompress.ops import fast
from hvdcompress.plan import plan_of

ALL = sum(count for _, count in SCHEDULE)


def play(compressed: float, dense: float, steps: int = ALL + 5) -> tuple[list[Fallback], list[bool]]:
    """Play steps of these lengths on two ranks, the last of which takes half as long again.

    Returns:
        The fallback of each rank, and whether each step was uncompressed.
    """
    ranks = [Fallback(on=True) for _ in range(2)]
    kinds: list[bool] = []
    now = np.zeros(2)
    for _ in range(steps):
        assert len({rank.uncompressed for rank in ranks}) == len({rank.verdict for rank in ranks}) == 1
        kinds.append(ranks[0].uncompressed)
        votes = [[] if kinds[-1] else rank.votes() for rank in ranks]
        most = [max(each) for each in zip(*votes, strict=True)]
        ends = now + (dense if kinds[-1] else compressed) * np.array([1.0, 1.5])
        for rank, began, ended in zip(ranks, now, ends, strict=True):
            rank.decide(most)
            rank.note(began, ended)
        now = ends
    return ranks, kinds


@pytest.mark.parametrize(
    ("compressed", "dense", "kept", "num_uncompressed"),
    [
        (0.1, 3.0, True, 1),  # a single uncompressed step of seconds is enough
        (0.1, 0.2, True, 5),
        (0.2, 0.1, False, None),
        (0.1, 0.11, True, 9),
        (0.1, 0.1, False, None),  # compression must save time
        (0.098, 0.1, False, None),
    ],
)
def test_the_faster_kind_of_step_wins(
    compressed: float, dense: float, kept: bool, num_uncompressed: int | None
) -> None:
    ranks, kinds = play(compressed, dense)
    assert {rank.verdict for rank in ranks} == {Verdict.COMPRESS if kept else Verdict.FLUSH}
    assert kinds[0] is False and num_uncompressed in (None, sum(kinds))
    assert ranks[0].seconds == pytest.approx((1.5 * compressed, 1.5 * dense)), "the slowest rank counts"
    assert ("kept" if kept else "given up") in str(ranks[0])


def test_the_first_steps_do_not_count() -> None:
    fallback, now = Fallback(on=True), 0.0
    for seconds in [9.0] * 4 + [0.1] * 8:
        fallback.note(now, now + seconds / 2)
        now += seconds
    assert fallback.votes() == pytest.approx([0.1, 0.0, 0.05, 0.05])


def test_an_evaluation_between_steps_decides_nothing() -> None:
    """The median ignores one long step. A single uncompressed step is judged by its exchange."""
    fallback = play(0.1, 0.1, 11)[0][0]
    now = 100.0  # an evaluation after the uncompressed step
    fallback.note(now, now + 0.1)
    fallback.decide(fallback.votes())
    assert fallback.verdict is Verdict.OPEN


def test_steps_of_a_warm_up_or_a_pause_do_not_count() -> None:
    plan = plan_of("topk", density=0.1, min_elements=1, warmup={"steps": 3}, fallback=True)
    (bucket,) = plan.buckets([TensorSpec("w", (40, 50))])
    local = RankState(plan, 0, 2)
    state = BucketState.zeros(bucket, np.zeros(1, np.float32), fast)
    for step in range(5):
        local.put([replace(state, step=min(step, 3))])
        local.paused = step == 4
        local.note_step(step, step + 1.0)
    assert local.fallback._steps == 1


def test_a_decision_is_saved_and_loaded() -> None:
    decided = play(0.2, 0.1)[0][0]
    other = Fallback.restored(True, decided.state())
    assert (other.verdict, other.seconds, other.uncompressed) == (Verdict.FLUSH, decided.seconds, False)
    assert Fallback.restored(True, None).verdict is Verdict.OPEN  # saved by an earlier version
