"""topk: the k largest |gradient + residual| of each rank (Aji & Heafield 2017; Stich et al. 2018)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdcompress
from hvdcompress.engine.exchange import ExchangeError
from hvdcompress.loopback import Loopback
from hvdcompress.parts import wire
from hvdcompress.testing import Trial, numbers
from tests.oracles.topk import Oracle


def run_beside_oracle(world_size: int = 3, n: int = 57, density: float = 0.07, steps: int = 25) -> None:
    """Compare library and oracle: results up to rounding, residuals exactly."""
    net, oracle = (
        Loopback("topk", world_size=world_size, density=density, min_elements=1),
        Oracle(world_size, n, density),
    )
    for step in range(steps):
        gradients = [
            numbers((n,), rank, step, kind="heavy" if step % 4 == 3 else "normal") for rank in range(world_size)
        ]
        total = oracle.step(gradients)
        out = net.allreduce(gradients, "w", op="sum")[0]
        np.testing.assert_allclose(out, total, rtol=1e-5, atol=1e-5)
        for rank in range(world_size):
            np.testing.assert_array_equal(net.residual("w", rank), oracle.memory[rank])


@pytest.mark.parametrize(
    "world_size,n,density", [(1, 40, 0.1), (2, 57, 0.07), (3, 1, 0.5), (4, 33, 1.0), (5, 101, 0.29)]
)
def test_beside_an_independent_oracle(world_size: int, n: int, density: float) -> None:
    run_beside_oracle(world_size, n, density)


def test_k_is_floor_of_what_was_written() -> None:
    """k = min(n, max(1, floor(n·density))): 0.29·100 is 29, although it is 28.999999999999996 in floating point."""
    for n, density, k in [
        (100, 0.29, 29),
        (1000, 0.001, 1),
        (10, 0.01, 1),
        (7, 1.0, 7),
        (199, 0.01, 1),
        (200, 0.01, 2),
    ]:
        net = Loopback("topk", world_size=1, density=density, min_elements=1)
        out = net.allreduce([np.arange(1, n + 1, dtype=np.float32)])[0]
        assert np.count_nonzero(out) == k, (n, density)


@given(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0]), min_size=1, max_size=30), st.integers(1, 10))
def test_among_equal_magnitudes_the_lowest_index_is_sent(values: list[float], tenths: int) -> None:
    x = np.array(values, np.float32)
    oracle = Oracle(1, len(x), tenths / 10)
    net = Loopback("topk", world_size=1, density=tenths / 10, min_elements=1)
    np.testing.assert_array_equal(net.allreduce([x], "w")[0], oracle.step([x]))
    np.testing.assert_array_equal(net.residual("w", 0), oracle.memory[0])


def test_entries_of_different_ranks_on_one_place_add_up() -> None:
    net = Loopback("topk", world_size=3, density=0.25, min_elements=1)
    out = net.allreduce([np.float32([1, 9, 0, 0]), np.float32([2, 8, 0, 0]), np.float32([0, 0, 0, 7])], op="sum")
    assert out[0].tolist() == [0, 17, 0, 7]


def test_gradient_build_up_shows_on_the_wire_only() -> None:
    """The payload does not grow with the number of ranks; the bytes on the wire do, as every payload is forwarded."""
    sent, carried = [], []
    for world_size in (2, 4, 8):
        net = Loopback("topk", world_size=world_size, density=0.01)
        net.allreduce([numbers((5000,), rank) for rank in range(world_size)])
        sent.append(net.ledger.bytes_sent(0))
        carried.append(net.ledger.bytes_on_wire(0))
    assert len(set(sent)) == 1
    assert carried == [sent[0] * (world_size - 1) for world_size in (2, 4, 8)]


@pytest.mark.parametrize("values,width", [("fp32", 4), ("fp16", 2), ("bf16", 2)])
@pytest.mark.parametrize("n,density", [(100_000, 0.001), (100_000, 0.01), (4096, 0.3), (4096, 1.0), (10, 0.1)])
def test_bytes_by_the_formula(n: int, density: float, values: str, width: int) -> None:
    """24 + the shortest of int32, bitmap and Elias-Fano indices + k values, each rounded up to 4."""
    k = max(1, int(n * density + 1e-9))
    low = int(np.log2(n // k)) if n // k > 1 else 0

    def up4(num_bytes: float) -> int:
        return int(-(-num_bytes // 4) * 4)

    elias_fano = up4(-(-k * low // 8)) + up4(-(-(k + (n >> low) + 1) // 8))
    expected = 24 + min(elias_fano, up4(-(-n // 8)), 4 * k) + up4(width * k)
    net = Trial(hvdcompress.get("topk", density=density, values=values), 2)
    net.allreduce([numbers((n,), rank) for rank in range(2)])
    assert net.ledger.bytes_sent(0) == expected == len(net.log[0].sent[0])
    if density <= 0.01:
        assert elias_fano * 8 <= k * (2.6 + np.log2(n / k)) + 64, "indices cost about 2 + log2(n/k) bits each"


@pytest.mark.parametrize("values", ["fp16", "bf16"])
def test_rounding_of_narrow_values_stays_in_the_residual(values: str) -> None:
    net = Loopback("topk", world_size=1, density=1.0, values=values, min_elements=1)
    g = numbers((50,), 4)
    out = net.allreduce([g], "w")[0]
    assert 0 < np.abs(out - g).max() < 0.02
    np.testing.assert_allclose(out + net.residual("w", 0), g, rtol=1e-6, atol=1e-7)


def test_a_value_beyond_fp16_saturates_is_counted_and_returns_to_the_residual() -> None:
    net = Loopback("topk", world_size=1, density=0.5, values="fp16", min_elements=1)
    out = net.allreduce([np.float32([1e9, -3, 0, 2])], "w")[0]
    assert out.tolist() == [65504, -3, 0, 0]
    assert net.residual("w", 0).tolist() == [np.float32(1e9) - np.float32(65504), 0, 0, 2]
    assert net.ledger.counters(0) == {"saturated": 1}


def test_lowpass_feedback_keeps_its_share_at_sent_places() -> None:
    net = Loopback("topk", world_size=1, density=0.25, feedback="lowpass", beta=0.25, min_elements=1)
    net.allreduce([np.float32([8, 4, 2, 1])], "w")
    assert net.residual("w", 0).tolist() == [0, 1, 0.5, 0.25]
    net.allreduce([np.float32([0, 8, 0, 0])], "w")  # sends element 1, whose residual was 1; 3/4 of it stay
    assert net.residual("w", 0).tolist() == [0, 0.75, 0.5, 0.25]


def test_payload_of_another_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    method = type(hvdcompress.get("topk"))
    encode = method.encode
    monkeypatch.setattr(method, "encode", lambda self, x, *rest: encode(self, x, *rest)[:-4])
    with pytest.raises(ExchangeError, match=r"tensor 'w' \(method topk, round 0, rank 0\): WireError"):
        Loopback("topk", world_size=2, min_elements=1).allreduce([np.ones(50, np.float32)] * 2, "w")
    assert issubclass(wire.WireError, ValueError)
