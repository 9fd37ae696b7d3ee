"""Compression is given up where it does not pay: what is compared, when it is decided, and what is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hvdcompress.engine.bucket_state import BucketState
from hvdcompress.engine.compressor import Compressor
from hvdcompress.engine.fallback import SCHEDULE, Fallback, Verdict
from hvdcompress.engine.state import RankState
from hvdcompress.engine.telemetry import log
from hvdcompress.method import TensorSpec
from hvdcompress.ops import fast
from hvdcompress.plan import PlanError, load, plan_of

ALL = sum(count for _, count in SCHEDULE)


def play(compressed: float, dense: float, steps: int = ALL + 5, ranks: int = 2) -> tuple[list[Fallback], list[bool]]:
    """Go through steps of these lengths; the last rank is slower by half. Return the ranks and the steps' kinds."""
    group = [Fallback(on=True) for _ in range(ranks)]
    kinds: list[bool] = []
    now = [0.0] * ranks
    for _ in range(steps):
        assert len({each.uncompressed for each in group}) == len({each.verdict for each in group}) == 1
        kinds.append(group[0].uncompressed)
        votes = [[] if kinds[-1] else each.votes() for each in group]
        assert len({len(each) for each in votes}) == 1
        voted = [max(each) for each in zip(*votes, strict=True)]
        for number, each in enumerate(group):
            each.end_step()
            each.decide(voted)
            seconds = (dense if kinds[-1] else compressed) * (1.5 if number == ranks - 1 else 1.0)
            each.note(now[number], now[number] + seconds)
            now[number] += seconds
    return group, kinds


@pytest.mark.parametrize(
    ("compressed", "dense", "kept", "uncompressed"),
    [
        (0.1, 3.0, True, 1),  # one uncompressed step of seconds is enough
        (0.1, 0.2, True, 5),
        (0.2, 0.1, False, None),
        (0.1, 0.11, True, 9),
        (0.1, 0.1, False, None),  # it must be worth it
        (0.098, 0.1, False, None),
    ],
)
def test_the_faster_kind_wins(compressed, dense, kept, uncompressed):
    group, kinds = play(compressed, dense)
    assert {each.verdict for each in group} == {Verdict.COMPRESS if kept else Verdict.DENSE}
    assert kinds[0] is False and kinds[-1] is not kept
    if uncompressed is not None:
        assert sum(kinds) == uncompressed
    assert group[0].seconds == pytest.approx((1.5 * compressed, 1.5 * dense))
    assert ("kept" if kept else "given up") in str(group[0])


def test_before_giving_up_one_step_brings_the_residuals():
    fallback = play(0.2, 0.1, 19)[0][0]
    fallback.decide([0.2, 0.1, 0.2, 0.1])
    assert fallback.verdict is Verdict.FLUSH and not fallback.uncompressed
    assert fallback.end_step() and fallback.verdict is Verdict.DENSE
    assert not fallback.end_step()


def test_what_takes_long_at_first_does_not_count():
    fallback, now = Fallback(on=True), 0.0
    for number in range(12):
        seconds = 9.0 if number < 4 else 0.1
        fallback.note(now, now + seconds / 2)
        now += seconds
    assert fallback.votes() == pytest.approx([0.1, 0.0, 0.05, 0.05])


def test_an_evaluation_between_steps_decides_nothing():
    """A whole step that takes long once is not the median; a single uncompressed step is judged by its exchange."""
    group, _ = play(0.1, 0.1, 11)
    now = 100.0  # an evaluation after the uncompressed step
    group[0].note(now, now + 0.1)
    group[0].decide(group[0].votes())
    assert group[0].verdict is Verdict.OPEN


def test_it_is_off_unless_the_plan_asks():
    fallback = Fallback()
    for _ in range(ALL):
        fallback.note(1.0, 2.0)
        assert not fallback.uncompressed and fallback.votes() == []


def test_steps_of_a_warm_up_and_of_a_pause_do_not_count():
    plan = plan_of("topk", density=0.1, min_elements=1, warmup={"steps": 3}, fallback=True)
    (bucket,) = plan.buckets([TensorSpec("w", (40, 50))])
    local = RankState(plan, 0, 2)
    state = BucketState.zeros(bucket, np.zeros(1, np.float32), fast)
    for step in range(3):
        local.put([replace(state, step=step)])
        local.note_step(step, step + 1.0)
    assert local.fallback._steps == 0
    local.put([replace(state, step=3)])
    local.note_step(3.0, 4.0)
    local.paused = True
    local.note_step(4.0, 5.0)
    assert local.fallback._steps == 1


def test_a_decision_is_saved_and_loaded():
    decided = play(0.2, 0.1)[0][0]
    other = Fallback(on=True)
    other.load(decided.state())
    assert (other.verdict, other.seconds, other.uncompressed) == (Verdict.DENSE, decided.seconds, True)
    other.load(None)  # of an earlier version
    assert other.verdict is Verdict.OPEN


def test_auto_is_a_plan():
    plan = plan_of("auto", min_elements=10)
    method = plan.program.main
    assert (method.id, method.density, method.values, plan.fallback) == ("topk", 0.01, "qsgd4", True)
    assert plan_of("auto", density=0.002).program.main.density == 0.002
    assert load(plan.to_dict()) == plan and plan.without_beta1
    assert not plan_of("auto", without_beta1=False).without_beta1
    assert not plan_of("acpsgd").fallback and "fallback" not in plan_of("acpsgd").to_dict()
    with pytest.raises(PlanError, match="fallback"):
        load({"method": "topk", "fallback": 1})


class _NoSteps(Compressor):
    """A driver that has no end of a step."""

    no_fallback_reason = "gradients come alone"

    def residual(self, name: str) -> None: ...

    def load_state_dict(self, saved: Mapping[str, Any]) -> None: ...

    def _waits_for(self) -> None: ...


def test_a_driver_that_cannot_compare_says_so(caplog: pytest.LogCaptureFixture) -> None:
    log.warn_once.cache_clear()
    compressor = _NoSteps(plan_of("auto"), rank=0, world_size=2)
    assert not compressor.local.fallback.on
    assert "fallback is ignored, and compression is always kept: gradients come alone" in caplog.text
