"""The variable HVDCOMPRESS_LOG: with ``debug``, the log has one line per round."""

from __future__ import annotations

import logging

import pytest

from hvdcompress.engine.telemetry import log
from hvdcompress.loopback import Loopback
from tests.unit.engine.helpers import gradients


def test_debug_writes_a_line_per_round(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(log.VARIABLE, "debug")
    net = Loopback("scalecom", world_size=2, density=0.05)
    monkeypatch.setenv(log.VARIABLE, "")
    quiet = Loopback("scalecom", world_size=2, density=0.05)
    with caplog.at_level(logging.DEBUG, "hvdcompress"):
        for each in (net, quiet):
            each.allreduce(gradients({"w": (40, 50)}))
    assert len(caplog.messages) == 4, "two rounds on two ranks, and none of the other Compressor"
    start = "rank 1: tensor 'w', method scalecom, round 1, AllReduce, 400 bytes, "
    assert any(line.startswith(start) and line.endswith(" ms") for line in caplog.messages), caplog.messages


def test_an_unknown_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log.VARIABLE, "verbose")
    with pytest.raises(ValueError, match=r"HVDCOMPRESS_LOG.*debug"):
        Loopback("topk", world_size=2)
