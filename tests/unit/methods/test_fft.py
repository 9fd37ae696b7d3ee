"""fft: the top share of the frequencies, as range floats, summed before one inverse (Wang et al., HPDC 2020)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hvdcompress
from hvdcompress import testing
from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec, Workspace
from hvdcompress.ops.numpy import ops as reference
from hvdcompress.testing import Trial, check_method, numbers
from tests.oracles.fft import Oracle
from tests.unit.methods.comparing import assert_matches_oracle


@pytest.mark.parametrize(
    "world_size,n,density,block,values,feedback",
    [
        (1, 64, 0.15, 16, "fp32", "plain"),
        (2, 57, 0.2, 16, "fp32", "none"),
        (3, 1, 0.5, 4, "fp32", "plain"),
        (4, 97, 0.3, 0, "fp32", "plain"),
        (2, 101, 1.0, 32, "fp32", "none"),
        (5, 50, 0.01, 64, "fp32", "plain"),
        (2, 200, 0.15, 64, "rangefloat10", "none"),
        (2, 61, 0.3, 0, "rangefloat8", "none"),
    ],
)
def test_matches_the_oracle(world_size: int, n: int, density: float, block: int, values: str, feedback: str) -> None:
    options = {"density": density, "block": block, "values": values, "feedback": feedback}
    net = Loopback("fft", world_size=world_size, ops=reference, min_elements=1, **options)
    bits = int(values[10:]) if values.startswith("rangefloat") else 0
    oracle = Oracle(world_size, n, density, block, feedback == "plain", bits)
    assert_matches_oracle(net, oracle, (n,), steps=8, kinds=("normal", "smooth"), tolerance=5e-6)


def error_of(id: str, g: np.ndarray, **options: object) -> float:
    net = Loopback(id, world_size=1, density=0.15, feedback="none", **options)
    return float(np.linalg.norm(net.allreduce([g])[0] - g) / np.linalg.norm(g))


# -- options ---------------------------------------------------------------------------------------------------------


def test_half_rounds_gradients_to_fp16_first() -> None:
    g = 10 * numbers((500,), 1)
    g[7] = 1e6
    rounded = np.clip(g, -65504, 65504).astype(np.float16).astype(np.float32)
    options = {"density": 0.3, "min_elements": 1}
    net = Loopback("fft", world_size=1, half=True, **options)
    out = net.allreduce([g])[0]
    assert out.tolist() == Loopback("fft", world_size=1, **options).allreduce([rounded])[0].tolist()
    assert net.ledger.counters(0) == {"saturated": 1}
    assert g[7] == 1e6


def test_order_filters_sends_the_same_payload_in_both_frameworks() -> None:
    """Gradients that vary slowly in the order ((h·W + w)·D + d)·F + f need few bins. TensorFlow stores them so."""
    f, d, h, w = 32, 6, 3, 5
    keras = np.cumsum(np.random.default_rng(2).normal(size=h * w * d * f)).astype(np.float32).reshape(h, w, d, f)
    torch = np.ascontiguousarray(keras.transpose(3, 2, 0, 1))
    method = hvdcompress.get_method("fft", order="filters", values="fp32", density=0.1)
    payloads = []
    for g, layout in ((torch, "oihw"), (keras, "hwio")):
        ctx = Context(0, 1, 0, TensorSpec("w", g.shape, layout=layout))
        work = Workspace(reference)
        payloads.append(method.encode(g.ravel(), {}, ctx, work).tobytes())
        total = method.invert([method.decode(np.frombuffer(payloads[-1], np.uint8), ctx, work)], 1e38, ctx, work)
        assert np.linalg.norm(total - g.ravel()) < 0.3 * np.linalg.norm(g)
    assert payloads[0] == payloads[1]
    errors = [error_of("fft", torch, values="fp32", block=256, order=order) for order in ("filters", "stored")]
    assert errors[0] < 0.5 * errors[1]


def test_feedback_with_order_filters_keeps_the_rest() -> None:
    g = numbers((8, 3, 5, 5), 1)
    net = Loopback("fft", world_size=1, order="filters", feedback="plain", density=0.1, min_elements=1)
    out = net.allreduce([g], "w")[0]
    np.testing.assert_allclose(out + net.residual("w", 0), g, atol=1e-6)
    assert 0.3 < np.linalg.norm(out) / np.linalg.norm(g) < 0.9


@pytest.mark.parametrize("ops", ["numpy", "torch"])
@pytest.mark.parametrize("n,block,values", [(5000, 4096, "fp32"), (997, 0, "rangefloat10")])
@pytest.mark.parametrize("kind", ["huge", "constant"])
def test_magnitudes_up_to_1e37(kind: Any, n: int, block: int, values: str, ops: str) -> None:
    backend = testing.backends().get(ops) or pytest.skip(f"no {ops}")
    g = numbers((n,), 2, kind=kind)
    g = np.float32(1e37) * (g / np.abs(g).max())
    method = hvdcompress.get_method("fft", density=1.0, values=values, block=block, feedback="plain")
    net = Trial(method, 2, ops=backend)
    for _ in range(2):
        out = net.allreduce([g, g], "w", op="sum")[0]
        assert np.isfinite(out).all() and np.isfinite(net.residual("w", 0)).all()
    if values == "fp32" and kind == "huge":
        assert np.abs(out - 2 * g).max() < 1e33


@pytest.mark.parametrize("options", [{"values": "rangefloat6", "block": 0}, {"half": True}])
def test_conservation_with_feedback(options: dict[str, Any]) -> None:
    """Σ sent + residual = Σ gradients, although the sum and each share are inverted separately."""
    method = hvdcompress.get_method("fft", feedback="plain", density=0.1, **options)
    check_method(method, world_sizes=(4,), sizes=(60, 97), checks=[testing.check_conservation])


# -- recovery ----------------------------------------------------------------------------------------------------------


def entries_in_each_step(net: Trial, losses: list[float]) -> list[int]:
    entries = []
    for step, loss in enumerate(losses):
        net.allreduce([numbers((1000,), rank, step) for rank in range(net.world_size)], "w")
        entries.append(int.from_bytes(net.log[-1].sent[0][16:20], "little"))  # as the header says
        net.report_metrics(loss=loss)
    return entries


def test_density_grows_when_the_loss_gets_worse() -> None:
    """B = 501, k = ⌊501·0.1·2^triggers⌋: ranks agree on a loss in the step after it, and it acts one step later."""
    net = Trial(hvdcompress.get_method("fft", density=0.1, recovery=2.0, tolerance=0.2), 3)
    losses = [3.0, 2.0, 2.3, 2.5, 2.0, 2.0, 9.0, 3.0, 3.0, 9.0, 3.0, 30.0, 3.0, 3.0]
    assert entries_in_each_step(net, losses) == [50] * 5 + [100] * 3 + [200] * 3 + [400] * 2 + [501]


def test_losses_that_trigger_recovery() -> None:
    method = hvdcompress.get_method("fft", recovery=1.5)
    assert method.wants_trigger("loss", 1.11, 1.0, 1.11) and not method.wants_trigger("loss", 1.09, 1.0, 1.09)
    assert not method.wants_trigger("learning_rate", 2.0, 1.0, 2.0)
    assert method.wants_trigger("loss", -0.8, -1.0, -0.8) and not method.wants_trigger("loss", -1.0, -1.0, -0.95)
    assert method.wants_trigger("loss", float("inf"), 1.0, float("inf"))
    assert not hvdcompress.get_method("fft").wants_trigger("loss", 900.0, 1.0, 900.0)
    spec = TensorSpec("w", (1000,))
    assert [method.num_kept(spec, t) for t in (0, 1, 5, 10**9)] == [75, 112, 501, 501]


def test_recovered_density_survives_a_resume() -> None:
    method = hvdcompress.get_method("fft", density=0.1, recovery=2.0)
    net, other = Trial(method, 2), Trial(method, 2)
    entries_in_each_step(net, [1.0, 9.0, 9.0])
    other.restore(net.saved(), [TensorSpec("w", (1000,))])
    assert entries_in_each_step(net, [9.0]) == entries_in_each_step(other, [9.0]) == [100]


# -- large tensors -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("block", [4096, 0])
def test_more_than_2_to_the_24_elements(block: int) -> None:
    """The highest frequency at the end of the tensor, or in the whole tensor: indices beyond float32's integers."""
    waves = 5002 if block else 2**24 + 1024  # a short last block; a number without large factors
    g = np.zeros(2**24 + (5002 if block else 1024), np.float32)
    g[-waves:] = np.where(np.arange(waves) % 2, -1, 1)
    net = Loopback("fft", world_size=1, density=1e-4, block=block, values="fp32")
    np.testing.assert_allclose(net.allreduce([g])[0], g, atol=0.06 if block else 1e-4)
