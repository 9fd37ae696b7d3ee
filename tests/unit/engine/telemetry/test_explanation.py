"""The explanation of a step's time: its parts, and which of them matters."""

from __future__ import annotations

import pytest

from hvdcompress.engine.telemetry.ledger import StepTime
from hvdcompress.engine.telemetry.reports import conclusion, explanation, seconds_on

STEP = StepTime(whole=0.1, blocked=0.06, codec=0.03, waiting=0.02, on_wire=1e6, dense=1e8)


@pytest.mark.parametrize(
    ("change", "link", "expected"),
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
def test_the_conclusion_names_the_largest_part(change: dict[str, float], link: float | None, expected: str) -> None:
    assert expected in conclusion(STEP._replace(**change), link)


@pytest.mark.parametrize("gbits", [None, 0.1, 1, 100])
@pytest.mark.parametrize("step", [STEP, STEP._replace(codec=0.9, waiting=0.99), StepTime(*[999.0] * 4, 1e11, 1e11)])
def test_lines_have_80_columns(step: StepTime, gbits: float | None) -> None:
    lines = explanation(step, "uncompressed steps: not measured", gbits).splitlines()
    assert all(len(line) <= 80 for line in lines), lines


def test_the_parts_of_a_step_are_listed() -> None:
    assert seconds_on(10.0, 1.25e9) == pytest.approx(1.0)
    text = explanation(STEP, "uncompressed steps: not measured", 1)
    assert "a compressed step takes 100.0 ms: 40.0 ms computing, 60.0 ms blocked" in text
    assert "exchange: 30.0 ms codec, 20.0 ms waiting, 10.0 ms other work" in text
    assert "link: 1.00 MB per step, 8.0 ms at 1 Gbit/s; uncompressed 100 MB, 800.0 ms" in text
    assert "20.0 ms of them overlap" in explanation(STEP._replace(codec=0.06), "", None)
    assert "50.0 MB per second of waiting" in explanation(STEP, "", None)
