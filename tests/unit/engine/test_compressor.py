"""The base class of all Compressors: warnings when one is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hvdcompress.engine.compressor import Compressor
from hvdcompress.engine.telemetry import log
from hvdcompress.plan import plan_of


class WithoutSteps(Compressor):
    """A driver that does not know where a step ends."""

    _no_fallback_reason = "gradients come alone"

    def residual(self, name: str) -> None: ...

    def load_state_dict(self, saved: Mapping[str, Any]) -> None: ...

    def _waits_for(self) -> None: ...


@pytest.mark.parametrize(
    "world_size,words",
    [
        (1, "there is only one rank, so nothing is sent"),
        (2, "fallback is ignored, and compression is always kept: gradients come alone"),
    ],
)
def test_warnings(world_size: int, words: str, caplog: pytest.LogCaptureFixture) -> None:
    log.warn_once.cache_clear()
    compressor = WithoutSteps(plan_of("auto"), rank=0, world_size=world_size)
    assert not compressor.rank_state.fallback.on
    assert words in caplog.text
