"""topk: the k largest |gradient + residual| of each rank (Aji & Heafield 2017; Stich et al. 2018)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdcompress
from hvdcompress.engine.exchange import ExchangeError
from hvdcompress.loopback import Loopback
from tests.oracles.topk import Oracle
from tests.unit.methods.comparing import assert_matches_oracle


@pytest.mark.parametrize(
    "world_size,n,density", [(1, 40, 0.1), (2, 57, 0.07), (3, 1, 0.5), (4, 33, 1.0), (5, 101, 0.29)]
)
def test_matches_the_oracle(world_size: int, n: int, density: float) -> None:
    net = Loopback("topk", world_size=world_size, density=density, min_elements=1)
    oracle = Oracle(world_size, n, density)
    assert_matches_oracle(net, oracle, (n,), kinds=("normal", "normal", "heavy"), exact_residuals=True)


@given(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0]), min_size=1, max_size=30), st.integers(1, 10))
def test_among_equal_magnitudes_the_lowest_index_is_sent(values: list[float], tenths: int) -> None:
    x = np.array(values, np.float32)
    oracle = Oracle(1, len(x), tenths / 10)
    net = Loopback("topk", world_size=1, density=tenths / 10, min_elements=1)
    np.testing.assert_array_equal(net.allreduce([x], "w")[0], oracle.step([x]))
    np.testing.assert_array_equal(net.residual("w", 0), oracle.memory[0])


def test_value_beyond_fp16_saturates_is_counted_and_returns_to_the_residual() -> None:
    net = Loopback("topk", world_size=1, density=0.5, values="fp16", min_elements=1)
    out = net.allreduce([np.float32([1e9, -3, 0, 2])], "w")[0]
    assert out.tolist() == [65504, -3, 0, 0]
    assert net.residual("w", 0).tolist() == [np.float32(1e9) - np.float32(65504), 0, 0, 2]
    assert net.ledger.counters(0) == {"saturated": 1}


def test_lowpass_feedback_keeps_its_share_of_sent_elements() -> None:
    net = Loopback("topk", world_size=1, density=0.25, feedback="lowpass", beta=0.25, min_elements=1)
    net.allreduce([np.float32([8, 4, 2, 1])], "w")
    assert net.residual("w", 0).tolist() == [0, 1, 0.5, 0.25]
    net.allreduce([np.float32([0, 8, 0, 0])], "w")  # sends element 1, whose residual was 1; 3/4 of it stay
    assert net.residual("w", 0).tolist() == [0, 0.75, 0.5, 0.25]


def test_payload_of_a_wrong_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    method = type(hvdcompress.get_method("topk"))
    encode = method.encode
    monkeypatch.setattr(method, "encode", lambda self, x, *rest: encode(self, x, *rest)[:-4])
    with pytest.raises(ExchangeError, match=r"tensor 'w' \(method topk, round 0, rank 0\): WireError"):
        Loopback("topk", world_size=2, min_elements=1).allreduce([np.ones(50, np.float32)] * 2, "w")
