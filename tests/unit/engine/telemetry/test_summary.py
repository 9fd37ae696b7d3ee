"""The table of a rank's work."""

from __future__ import annotations

import pytest

from hvdcompress.engine.telemetry.reports import with_prefix
from hvdcompress.loopback import Loopback
from tests.unit.engine.helpers import trained


def test_the_table_has_80_columns_and_the_totals_of_the_ledger() -> None:
    net = trained("gaussiank", density=0.0123456, values="rangefloat16m7", warmup={"steps": 2})
    net.ledger._tensors[0, "a"].seconds = 123456.7
    net.ledger.begun(0, "a", 10**15)
    lines = net.summary().splitlines()
    assert all(len(line) <= 80 for line in lines), lines
    assert len({len(line) for line in lines[:-1]}) == 1, "columns are aligned"
    total = lines[-2].split()
    assert lines[0].split() == ["method", "tensors", "gradients", "sent", "ratio", "residual", "codec"]
    assert total[:2] == ["total", "4"] and f"{net.ledger.compression_ratio(0):.4g}" in total
    assert "rank 0 of 2, 3 steps" in lines[-1]


def test_the_table_before_the_first_step() -> None:
    assert Loopback("topk", world_size=2).summary().splitlines()[1].split()[:2] == ["total", "-"]


def test_a_warm_up_shows_the_method_that_follows() -> None:
    assert "none > topk density" in trained("topk", steps=1, warmup={"steps": 2}).summary()


@pytest.mark.parametrize(
    "amount,text", [(0, "0 "), (999, "999 "), (1_000, "1.00 k"), (25_600_000, "25.6 M"), (987_654_321, "988 M")]
)
def test_amounts_have_three_digits(amount: float, text: str) -> None:
    assert with_prefix(amount) == text
