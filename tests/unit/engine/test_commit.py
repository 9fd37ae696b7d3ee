"""The commit of a step: all new states are kept, or none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdcompress.engine.exchange import Exchange
from tests.unit.engine.helpers import state_dicts, train, trained

SETTINGS = {"world_size": 1, "min_elements": 1, "bucket_elements": 0}


def test_a_commit_that_fails_halfway_changes_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    net = trained(steps=2, **SETTINGS)
    before = state_dicts(net)

    def new_state(self: Exchange, *given: Any, original: Any = Exchange.new_state) -> Any:
        return 1 / 0 if self.name == "c" else original(self, *given)

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Exchange, "new_state", new_state)
        train(net, [2])
    np.testing.assert_equal(state_dicts(net), before)
    train(net, [2])
    np.testing.assert_equal(state_dicts(net), state_dicts(trained(steps=3, **SETTINGS)))
