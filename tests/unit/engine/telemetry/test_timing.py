"""Mean times of recent steps."""

from __future__ import annotations

import pytest

from hvdcompress.engine.fallback import Verdict
from hvdcompress.engine.state import RankState
from hvdcompress.engine.telemetry.ledger import FEWEST, RECENT, Ledger
from hvdcompress.engine.telemetry.observer import Sent
from hvdcompress.plan import plan_of


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(2, 0)


def play(ledger: Ledger, lengths: list[float], counts: bool = True) -> None:
    """Note steps of these lengths: half of each is blocked, a tenth is codec time and a fifth is waiting."""
    now = 0.0
    for seconds in [*lengths, 0.0]:
        ledger.begun(0, "w", 4000)
        ledger.sent(0, "w", Sent("AllReduce", None, 40))
        ledger.encoded(0, "w", 0.1 * seconds)
        ledger.waited(0, 0.2 * seconds)
        ledger.note_step(now, 0.5 * seconds, counts=counts)
        now += seconds


def test_the_mean_covers_the_middle_half_of_the_steps(ledger: Ledger) -> None:
    play(ledger, [9.0, 0.1, 0.1, 0.2, 0.2, 0.01, 7.0, 0.1])  # 9 s for compilation, 7 s for an evaluation
    mean = ledger.mean_step()
    assert mean is not None
    assert mean == pytest.approx((0.15, 0.075, 0.015, 0.03, 40.0, 4000.0))
    assert mean.computing == pytest.approx(0.075) and mean.other == pytest.approx(0.03) and mean.overlap == 0


def test_few_steps_have_no_mean_and_old_steps_are_forgotten(ledger: Ledger) -> None:
    play(ledger, [1.0] * (FEWEST - 1))
    assert ledger.mean_step() is None
    play(ledger, [2.0] * RECENT)
    assert ledger.mean_step() == pytest.approx((2.0, 1.0, 0.2, 0.4, 40.0, 4000.0))


def test_steps_that_do_not_count_and_a_reset_of_the_ledger(ledger: Ledger) -> None:
    play(ledger, [1.0] * 8, counts=False)
    assert ledger.mean_step() is None
    ledger.reset()
    play(ledger, [1.0] * 8)
    mean = ledger.mean_step()
    assert mean is not None and mean.codec == pytest.approx(0.1)


@pytest.mark.parametrize("verdict", Verdict)
@pytest.mark.parametrize("paused", [True, False])
def test_uncompressed_steps_do_not_count(paused: bool, verdict: Verdict) -> None:
    local = RankState(plan_of("topk", fallback=True), 0, 2)
    local.paused = paused
    local.fallback.verdict = verdict
    for step in range(FEWEST + 1):
        local.begin_round()
        local.note_step(step, step + 0.5, 0.25)
    assert (local.ledger.mean_step() is None) == (paused or verdict in (Verdict.FLUSH, Verdict.DENSE))
