"""fft: the top share of the frequencies, as range floats, summed before one inverse (Wang et al., HPDC 2020)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdcompress
from hvdcompress import testing
from hvdcompress.loopback import Loopback
from hvdcompress.method import Context, TensorSpec, Workspace
from hvdcompress.ops import numpy as reference
from hvdcompress.ops.numpy import spectra
from hvdcompress.testing import Trial, check_method, numbers
from tests.oracles.fft import Oracle, lengths, weights


def run_beside_oracle(
    world_size: int = 3,
    n: int = 57,
    density: float = 0.2,
    block: int = 16,
    values: str = "fp32",
    feedback: str = "none",
) -> None:
    """Compare the library with the oracle, up to rounding."""
    options = {"density": density, "block": block, "values": values, "feedback": feedback}
    net = Loopback("fft", world_size=world_size, ops=reference, min_elements=1, **options)
    bits = int(values[10:]) if values.startswith("rangefloat") else 0
    oracle = Oracle(world_size, n, density, block, feedback == "plain", bits)
    for step in range(12):
        gradients = [numbers((n,), rank, step, kind="smooth" if step % 2 else "normal") for rank in range(world_size)]
        total = oracle.step(gradients)
        out = net.allreduce(gradients, "w", op="sum")[0]
        np.testing.assert_allclose(out, total, atol=2e-5 * world_size, rtol=0)
        for rank in range(world_size):
            np.testing.assert_allclose(net.residual("w", rank), oracle.memory[rank], atol=2e-5, rtol=0)


@pytest.mark.parametrize("feedback", ["none", "plain"])
@pytest.mark.parametrize(
    "world_size,n,density,block",
    [(1, 64, 0.15, 16), (2, 57, 0.2, 16), (3, 1, 0.5, 4), (4, 97, 0.3, 0), (2, 101, 1.0, 32), (5, 50, 0.01, 64)],
)
def test_beside_an_independent_oracle(world_size: int, n: int, density: float, block: int, feedback: str) -> None:
    run_beside_oracle(world_size, n, density, block, feedback=feedback)


@pytest.mark.parametrize("values", ["rangefloat10", "rangefloat8"])
def test_range_floats_beside_the_oracle(values: str) -> None:
    run_beside_oracle(2, 200, 0.15, 64, values=values)
    run_beside_oracle(2, 61, 0.3, 0, values=values)


# -- what shows that it is faithful ----------------------------------------------------------------------------


@pytest.mark.parametrize("block", [0, 1, 2, 16, 4096])
@pytest.mark.parametrize("n", [1, 2, 3, 17, 97, 100, 1009, 5000])
def test_nothing_dropped_and_no_quantizer_is_the_identity(n: int, block: int) -> None:
    g = numbers((n,), 3)
    out = Loopback("fft", world_size=1, density=1.0, values="fp32", block=block, min_elements=1).allreduce([g])[0]
    np.testing.assert_allclose(out, g, atol=4e-6, rtol=0)


@given(st.integers(1, 90), st.sampled_from([0, 2, 8, 32]), st.floats(0.01, 1.0), st.integers(0, 99))
def test_dropped_energy_is_error_energy(n: int, block: int, density: float, key: int) -> None:
    """Parseval, with DC and Nyquist counted once and the other bins twice."""
    g = numbers((n,), key)
    net = Loopback("fft", world_size=1, density=density, values="fp32", block=block, min_elements=1)
    error = net.allreduce([g])[0].astype(np.float64) - g
    oracle = Oracle(1, n, density, block)
    dropped = oracle.spectrum(g.astype(np.float64)) - oracle.kept(g.astype(np.float64))
    weight = np.concatenate([weights(length) for length in lengths(n, block)])
    assert np.isclose(np.square(error).sum(), (weight * np.abs(dropped) ** 2).sum(), rtol=1e-4, atol=1e-8)


def test_gaussian_data_are_better_served_in_the_time_domain() -> None:
    """θ = 0.85 on white noise: 0.753, against 0.668 for top-k."""
    g = np.random.default_rng(0).normal(size=1 << 17).astype(np.float32)
    assert error_of("fft", g, values="fp32") == pytest.approx(0.753, abs=0.002)
    assert error_of("fft", g) == pytest.approx(0.753, abs=0.002)
    assert error_of("topk", g) == pytest.approx(0.668, abs=0.004)


def test_smooth_data_are_far_better_served_by_frequencies() -> None:
    """Noise with the bandwidth of 15 % of the bins: an error of about 0.016 (0.757 for top-k)."""
    noise = np.random.default_rng(0).normal(size=1 << 17)
    bell = np.exp(-0.5 * (np.arange(-60, 61) / 8) ** 2)
    g = np.convolve(noise, bell / bell.sum(), "same").astype(np.float32)
    assert error_of("fft", g, values="fp32") == pytest.approx(0.016, abs=0.003)
    assert error_of("topk", g) > 0.65
    t = np.arange(1 << 17)
    waves = (np.sin(t / 60) + np.sin(t / 97 + 1)).astype(np.float32)
    assert error_of("fft", waves, values="fp32") < 0.016
    assert error_of("topk", waves) == pytest.approx(0.757, abs=0.05)


def error_of(id: str, g: np.ndarray, **options: object) -> float:
    net = Loopback(id, world_size=1, density=0.15, feedback="none", **options)
    return float(np.linalg.norm(net.allreduce([g])[0] - g) / np.linalg.norm(g))


def inverses_of_a_step(expected: dict[str, int]) -> None:
    """Count the inverse FFTs of 4 ranks in one step, and compare with the result of each rank alone."""
    gradients = [numbers((200,), rank) for rank in range(4)]
    alone = [Loopback("fft", world_size=1, min_elements=1, values="fp32").allreduce([g])[0] for g in gradients]
    calls, irfft = [], spectra.irfft
    for feedback, number in expected.items():
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spectra, "irfft", lambda *rest: (calls.append(1), irfft(*rest))[1])
            net = Loopback("fft", world_size=4, ops=reference, min_elements=1, feedback=feedback, values="fp32")
            out = net.allreduce(gradients, op="sum")[0]
        assert len(calls) == number
        np.testing.assert_allclose(out, np.sum(alone, axis=0), atol=1e-5)


def test_spectra_are_summed_before_one_inverse() -> None:
    inverses_of_a_step({"none": 4, "plain": 8})  # one per rank; with feedback, another for the rank's own share


@pytest.mark.parametrize("n", [1, 2, 97, 4096, 5000])
@pytest.mark.parametrize("values", ["fp32", "fp16", "rangefloat8", "rangefloat10"])
def test_zeros_come_back_as_zeros(n: int, values: str) -> None:
    net = Loopback("fft", world_size=2, values=values, feedback="plain", min_elements=1)
    for _ in range(2):
        assert not net.allreduce([np.zeros(n, np.float32)] * 2, "w")[0].any()
        assert not net.residual("w", 0).any()


def test_a_wave_is_sent_in_a_single_bin() -> None:
    t = np.arange(4096)
    g = np.cos(2 * np.pi * 300 * t / 4096 + 0.7).astype(np.float32)
    out = Loopback("fft", world_size=1, density=1 / 2049, values="fp32").allreduce([g])[0]
    np.testing.assert_allclose(out, g, atol=1e-5)


def test_the_last_blocks_bins_compare_by_their_energy() -> None:
    """With a quarter-length block of noise at the end, its bins get exactly their share of the entries."""
    g = np.random.default_rng(4).normal(size=4096 + 1024).astype(np.float32)
    trial = Trial(hvdcompress.get("fft", density=0.15), 1)
    trial.allreduce([g], "w")
    method, spec = hvdcompress.get("fft", density=0.15), TensorSpec("w", (5120,))
    ctx = Context(0, 1, 0, spec)
    index = method.decode(np.frombuffer(trial.log[0].sent[0], np.uint8), ctx, Workspace(reference)).index
    assert np.mean(index >= 2049) == pytest.approx(0.2, abs=0.03)


# -- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n,block", [(1 << 20, 4096), (5000, 4096), (1009, 0), (100, 16), (1, 4096)])
@pytest.mark.parametrize("density,bits", [(0.15, 10), (0.15, 8), (0.5, 10), (0.01, 12), (1.0, 16)])
def test_bytes_by_the_formula(n: int, block: int, density: float, bits: int) -> None:
    bins = sum(length // 2 + 1 for length in lengths(n, block))
    k = max(1, int(bins * density + 1e-9))

    def up4(num_bits: int) -> int:
        return -(-num_bits // 32) * 4

    low = (bins // k).bit_length() - 1
    index = min(up4(k * low) + up4(k + (bins >> low) + 1), up4(bins), 4 * k)
    expected = 24 + index + up4(8 * (9 + -(-2 * k * bits // 8)))
    net = Trial(hvdcompress.get("fft", density=density, block=block, values=f"rangefloat{bits}"), 2)
    net.allreduce([numbers((n,), rank) for rank in range(2)])
    assert net.ledger.bytes_sent(0) == expected == len(net.log[0].sent[0])
    assert expected <= 24 + up4(bins) + 9 + 3 + -(-2 * k * bits // 8), "never more than 2(1 − θ)BN + B + header bits"


def test_rate_of_the_paper() -> None:
    """θ = 0.85, N = 10: 16x with the paper's bitmap, 17x with Elias-Fano indices."""
    bins, n = 2049 << 8, 1 << 20
    assert 32 * n / (2 * 0.15 * bins * 10 + bins) == pytest.approx(16.0, abs=0.02)
    sent = hvdcompress.get("fft", density=0.15).num_bytes(TensorSpec("w", (n,)), 2)
    assert 4 * n / sent == pytest.approx(17.3, abs=0.1)


def test_a_gather_pays_on_bytes_only_above_a_rate_of_half_the_workers() -> None:
    for world_size, pays in ((8, True), (32, True), (40, False)):
        net = Loopback("fft", world_size=world_size, density=0.15, block=256)
        net.allreduce([numbers((4096,), rank) for rank in range(world_size)])
        ring = 2 * (world_size - 1) / world_size * 4 * 4096
        assert (net.ledger.bytes_on_wire(0) < ring) == pays
        assert (4 * 4096 / net.ledger.bytes_sent(0) > world_size / 2) == pays


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


def test_filters_are_collocated_in_both_frameworks() -> None:
    """Gradients that vary slowly in the order ((h·W + w)·D + d)·F + f need few bins. TensorFlow stores them so."""
    f, d, h, w = 32, 6, 3, 5
    slow = np.cumsum(np.random.default_rng(2).normal(size=h * w * d * f)).astype(np.float32).reshape(h, w, d, f)
    torchs = np.ascontiguousarray(slow.transpose(3, 2, 0, 1))
    options = {"world_size": 1, "density": 0.1, "values": "fp32", "block": 256}
    out, plain = (Loopback("fft", order=o, **options).allreduce([torchs])[0] for o in ("filters", "stored"))
    expected = Loopback("fft", **options).allreduce([slow.ravel()])[0].reshape(slow.shape)
    assert (out == expected.transpose(3, 2, 0, 1)).all()
    assert np.linalg.norm(out - torchs) < 0.5 * np.linalg.norm(plain - torchs)
    ops, method = reference, hvdcompress.get("fft", order="filters", values="fp32", density=0.1)
    payloads = []
    for g, layout in ((torchs, "oihw"), (slow, "hwio")):
        ctx = Context(0, 1, 0, TensorSpec("w", g.shape, layout=layout))
        work = Workspace(ops)
        payloads.append(method.encode(g.ravel(), {}, ctx, work).tobytes())
        total = method.invert([method.decode(np.frombuffer(payloads[-1], np.uint8), ctx, work)], 1e38, ctx, work)
        assert np.linalg.norm(total - g.ravel()) < 0.5 * np.linalg.norm(g)
    assert payloads[0] == payloads[1]


def test_feedback_in_another_order_keeps_what_was_not_sent() -> None:
    g = numbers((8, 3, 5, 5), 1)
    net = Loopback("fft", world_size=1, order="filters", feedback="plain", density=0.1, min_elements=1)
    out = net.allreduce([g], "w")[0]
    np.testing.assert_allclose(out + net.residual("w", 0), g, atol=1e-6)
    assert 0.3 < np.linalg.norm(out) / np.linalg.norm(g) < 0.9


@pytest.mark.parametrize("wrong", [{"block": 3}, {"block": -4}, {"density": 0}, {"recovery": 0.5}, {"tolerance": -1}])
def test_wrong_settings_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        hvdcompress.get("fft", **wrong)


@pytest.mark.parametrize("ops", ["numpy", "torch"])
def test_magnitudes_up_to_1e37(ops: str) -> None:
    backend = testing.backends().get(ops) or pytest.skip(f"no {ops}")
    for n, block in ((4096, 4096), (997, 0), (5000, 4096)):
        for kind in ("huge", "constant"):
            g = numbers((n,), 2, kind=kind)  # type: ignore[arg-type]
            g = np.float32(1e37) * (g / np.abs(g).max())
            for values in ("fp32", "rangefloat10"):
                method = hvdcompress.get("fft", density=1.0, values=values, block=block, feedback="plain")
                net = Trial(method, 2, ops=backend)
                for _ in range(2):
                    out = net.allreduce([g, g], "w", op="sum")[0]
                    assert np.isfinite(out).all() and np.isfinite(net.residual("w", 0)).all()
                if values == "fp32" and kind == "huge":
                    assert np.abs(out - 2 * g).max() < 1e33


def test_conservation_with_feedback() -> None:
    """Σ sent + residual = Σ gradients, although the sum and each share are inverted separately."""
    for options in ({"block": 16}, {"values": "fp32"}, {"values": "rangefloat6", "block": 0}, {"half": True}):
        method = hvdcompress.get("fft", feedback="plain", density=0.1, **options)
        check_method(method, world_sizes=(1, 4), sizes=(1, 60, 97), steps=6, checks=[testing.check_conservation])


# -- recovery ----------------------------------------------------------------------------------------------------------


def kept_in_each_step(net: Trial, losses: list[float]) -> list[int]:
    kept = []
    for step, loss in enumerate(losses):
        net.allreduce([numbers((1000,), rank, step) for rank in range(net.world_size)], "w")
        kept.append(int.from_bytes(net.log[-1].sent[0][16:20], "little"))  # the header's entries
        net.observe(loss=loss)
    return kept


def test_density_grows_when_the_loss_gets_worse() -> None:
    """B = 501, k = ⌊501·0.1·2^triggers⌋: ranks agree on a loss in the step after it, and it acts one step later."""
    net = Trial(hvdcompress.get("fft", density=0.1, recovery=2.0, tolerance=0.2), 3)
    losses = [3.0, 2.0, 2.3, 2.5, 2.0, 2.0, 9.0, 3.0, 3.0, 9.0, 3.0, 30.0, 3.0, 3.0]
    assert kept_in_each_step(net, losses) == [50] * 5 + [100] * 3 + [200] * 3 + [400] * 2 + [501]


def test_no_recovery_unless_asked_for() -> None:
    assert kept_in_each_step(Trial(hvdcompress.get("fft", density=0.1), 2), [1, 9, 90, 900]) == [50] * 4


def test_what_calls_for_recovery() -> None:
    method = hvdcompress.get("fft", recovery=1.5)
    assert method.wants_trigger("loss", 1.11, 1.0, 1.11) and not method.wants_trigger("loss", 1.09, 1.0, 1.09)
    assert not method.wants_trigger("learning_rate", 2.0, 1.0, 2.0)
    assert method.wants_trigger("loss", -0.8, -1.0, -0.8) and not method.wants_trigger("loss", -1.0, -1.0, -0.95)
    assert method.wants_trigger("loss", float("inf"), 1.0, float("inf"))
    spec = TensorSpec("w", (1000,))
    assert [method.num_kept(spec, t) for t in (0, 1, 5, 10**9)] == [75, 112, 501, 501]


def test_recovered_density_survives_a_resume() -> None:
    method = hvdcompress.get("fft", density=0.1, recovery=2.0)
    net, other = Trial(method, 2), Trial(method, 2)
    kept_in_each_step(net, [1.0, 9.0, 9.0])
    other.restore(net.saved(), [TensorSpec("w", (1000,))])
    assert kept_in_each_step(net, [9.0]) == kept_in_each_step(other, [9.0]) == [100]


# -- large tensors -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("block", [4096, 0])
def test_more_than_2_to_the_24_elements(block: int) -> None:
    """Waves at the end of the tensor and at the highest frequencies, with indices beyond float32's integers."""
    n = 2**24 + (5002 if block else 1024)  # a short last block; a number without large factors
    g = np.zeros(n, np.float32)
    if block:
        g[-5002:] = np.where(np.arange(5002) % 2, -1, 1)  # Nyquist, in the last blocks
    else:
        g += np.where(np.arange(n) % 2, -1, 1).astype(np.float32)
    net = Loopback("fft", world_size=1, density=1e-4, block=block, values="fp32")
    np.testing.assert_allclose(net.allreduce([g])[0], g, atol=0.06 if block else 1e-4)


@pytest.mark.parametrize("feedback", ["none", "plain"])
def test_joined_tensors_are_transformed_as_one(feedback: str) -> None:
    options = {"world_size": 2, "density": 0.2, "feedback": feedback, "block": 64, "min_elements": 1}
    joined, alone = Loopback("fft", bucket_elements=10_000, **options), Loopback("fft", **options)
    for step in range(2):
        parts = [{name: numbers((n,), rank, step, n) for name, n in (("a", 150), ("b", 333))} for rank in range(2)]
        outs = joined.allreduce_many(parts)
        whole = alone.allreduce([np.concatenate([part["a"], part["b"]]) for part in parts], "whole")
        for out, expected in zip(outs, whole, strict=True):
            assert np.concatenate([out["a"], out["b"]]).tolist() == expected.tolist()
