"""Why is it not faster: the means of recent steps, the lines that show them, and the sentence that answers."""

from __future__ import annotations

import pytest

from hvdcompress.engine.fallback import Verdict
from hvdcompress.engine.state import RankState
from hvdcompress.engine.telemetry.explanation import conclusion, explanation, seconds_on
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.observer import Sent
from hvdcompress.engine.telemetry.timing import FEWEST, RECENT, StepTime, StepTimes
from hvdcompress.plan import plan_of

STEP = StepTime(whole=0.1, blocked=0.06, codec=0.03, waiting=0.02, on_wire=1e6, dense=1e8)


def play(times: StepTimes, ledger: Ledger, lengths: list[float], counts: bool = True) -> None:
    """Go through steps of these lengths, half of which is blocked: a tenth in the codec, a fifth waiting."""
    now = 0.0
    for seconds in [*lengths, 0.0]:
        ledger.begun(0, "w", 4000)
        ledger.sent(0, "w", Sent("AllReduce", None, 40))
        ledger.encoded(0, "w", 0.1 * seconds)
        ledger.waited(0, 0.2 * seconds)
        times.note(now, 0.5 * seconds, counts=counts)
        now += seconds


def test_the_mean_is_of_the_middle_half_and_its_parts_belong_together() -> None:
    ledger = Ledger(2, 0)
    times = StepTimes(ledger, 0)
    play(times, ledger, [9.0, 0.1, 0.1, 0.2, 0.2, 0.01, 7.0, 0.1])  # kernels are compiled, and an evaluation
    mean = times.mean()
    assert mean is not None
    assert mean == pytest.approx((0.15, 0.075, 0.015, 0.03, 40.0, 4000.0))
    assert mean.computing == pytest.approx(0.075) and mean.other == pytest.approx(0.03) and mean.overlap == 0


def test_few_steps_have_no_mean_and_old_ones_are_forgotten() -> None:
    ledger = Ledger(2, 0)
    times = StepTimes(ledger, 0)
    play(times, ledger, [1.0] * (FEWEST - 1))
    assert times.mean() is None
    play(times, ledger, [2.0] * RECENT)
    assert times.mean() == pytest.approx((2.0, 1.0, 0.2, 0.4, 40.0, 4000.0))


def test_steps_of_other_kinds_and_a_reset_ledger_do_not_count() -> None:
    ledger = Ledger(2, 0)
    times = StepTimes(ledger, 0)
    play(times, ledger, [1.0] * 8, counts=False)
    assert times.mean() is None
    ledger.reset()
    play(times, ledger, [1.0] * 8)
    mean = times.mean()
    assert mean is not None and mean.codec == pytest.approx(0.1)


def test_steps_of_a_pause_do_not_count() -> None:
    local = RankState(plan_of("topk"), 0, 2)
    for paused in (True, False):
        local.paused = paused
        for step in range(FEWEST + 1):
            local.note_step(step, step + 0.5, 0.25)
        assert (local.times.mean() is None) == paused


@pytest.mark.parametrize(
    ("change", "link", "said"),
    [
        ({"blocked": 0.009}, None, "The exchange blocks 9.0 ms of 100.0 ms"),
        ({}, None, "The codec takes 30.0 ms of 60.0 ms of an exchange"),
        ({"codec": 0.01, "waiting": 0.01}, None, "neither codec nor waiting takes 40.0 ms of 60.0 ms"),
        ({"waiting": 0.05}, None, "Waiting takes 50.0 ms of 80.0 ms of an exchange, for the link or for slower ranks"),
        ({"waiting": 0.05}, 0.03, "the link alone takes 30.0 ms: send less"),
        ({"waiting": 0.05}, 0.01, "of which the link alone takes 10.0 ms: the rest is for slower ranks"),
        ({"waiting": 2.5}, 0.01, "Waiting takes 2.5 s of 2.5 s"),
    ],
)
def test_the_largest_part_is_the_answer(change: dict[str, float], link: float | None, said: str) -> None:
    assert said in conclusion(STEP._replace(**change), link)


def test_the_lines_are_within_80_columns() -> None:
    assert seconds_on(10.0, 1.25e9) == pytest.approx(1.0)
    for step in (STEP, STEP._replace(codec=0.9, waiting=0.99), StepTime(*[999.0] * 4, 9.99e10, 9.99e10)):
        for gbits in (None, 0.1, 1, 100):
            lines = explanation(step, "uncompressed steps: not measured", gbits).splitlines()
            assert all(len(line) <= 80 for line in lines), lines
    told = explanation(STEP, "uncompressed steps: not measured", 1)
    assert "a compressed step takes 100.0 ms: 40.0 ms computing, 60.0 ms blocked" in told
    assert "exchange: 30.0 ms codec, 20.0 ms waiting, 10.0 ms other work" in told
    assert "link: 1.00 MB per step, 8.0 ms at 1 Gbit/s; uncompressed 100 MB, 800.0 ms" in told
    assert "20.0 ms of them overlap" in explanation(STEP._replace(codec=0.06), "", None)
    assert "50.0 MB per second of waiting" in explanation(STEP, "", None)


@pytest.mark.parametrize("verdict", Verdict)
def test_steps_after_compression_was_given_up_do_not_count(verdict: Verdict) -> None:
    local = RankState(plan_of("topk", fallback=True), 0, 2)
    local.fallback.verdict = verdict
    for step in range(FEWEST + 1):
        local.begin_round()
        local.note_step(step, step + 0.5)
    assert (local.times.mean() is None) == (verdict is Verdict.DENSE)
