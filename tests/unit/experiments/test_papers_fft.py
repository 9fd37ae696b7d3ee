"""FFT's claims: its measures on data for which they are known, and verdicts by rule."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("torch")

from experiments import nets  # noqa: E402
from experiments.cost_model.fitted import Fitted  # noqa: E402
from experiments.papers import simulate  # noqa: E402
from experiments.papers.claims import Kind  # noqa: E402
from experiments.papers.fft import claims, measures  # noqa: E402
from hvdcompress.method import TensorSpec  # noqa: E402
from hvdcompress.plan import load  # noqa: E402

SPEC = TensorSpec("w", (40, 500))
SEEDS = (0, 1)
TINY = {"task": "digits", "net": "fnn3", "steps": 6, "batch_size": 8, "learning_rate": 0.05, "warmup_steps": 1}


@pytest.mark.parametrize(
    "settings", [{"method": "topk", "values": "rangefloat10"}, {"method": "topk"}, {"method": "fft"}]
)
def test_a_matched_density_is_the_largest(settings):
    most = 5000
    places = SPEC.size // 2 + 1 if settings["method"] == "fft" else SPEC.size
    found = measures.matched(settings, SPEC, most, 2)
    k = math.floor(found["density"] * places)
    more = {**settings, "density": measures.density(k + 1, places)}
    assert measures.num_bytes(found, SPEC, 2) <= most < measures.num_bytes(more, SPEC, 2)


def test_bytes_are_equal_and_errors_are_those_of_the_methods():
    networks = measures.rivals_of(SPEC, 2)
    random = np.random.default_rng(0)
    heavy = [random.standard_t(2, SPEC.shape).astype(np.float32) for _ in range(2)]
    found = {row["rival"]: row for row in measures.exchanges(networks, heavy)}
    assert found.keys() == {*measures.RIVALS, measures.EQUAL}
    for rival in measures.RIVALS:
        assert found[rival]["fft_bytes"] == pytest.approx(found[rival]["other_bytes"], rel=0.01), rival
    kept = [np.where(np.abs(g) >= np.sort(np.abs(g), axis=None)[-3000], g, 0) for g in heavy]  # 15 % of 20 000
    mean = np.mean(heavy, axis=0)
    wanted = np.linalg.norm(np.mean(kept, axis=0) - mean) / np.linalg.norm(mean)
    equal = found[measures.EQUAL]
    assert equal["other"] == pytest.approx(wanted, rel=1e-5)
    assert equal["other"] < equal["fft"] and equal["kurtosis"] > 6
    waves = np.sin(np.arange(SPEC.size, dtype=np.float32).reshape(SPEC.shape) / 50)
    smooth = {row["rival"]: row for row in measures.exchanges(networks, [waves, 2 * waves])}
    equal = smooth[measures.EQUAL]
    assert equal["fft"] < 0.05 < equal["other"] and equal["correlation"] > 0.99
    assert all(row["fft"] < row["other"] for row in smooth.values())


def test_a_diminishing_share_follows_the_learning_rate():
    task = simulate.training("fnn3", 240)
    program = load(claims.diminishing(task, 0.9)).program
    densities = [method.density for _, method in program.stages]
    assert densities[0] == pytest.approx(0.1) and densities == sorted(densities) and densities[-1] > 0.9
    halfway, peak = (0.5 * (1 + math.cos(math.pi * step / 240)) for step in (120, 24))  # 24 steps of warm-up
    assert dict(program.stages)[120].density == pytest.approx(1 - 0.9 * math.sqrt(halfway / peak))


@pytest.fixture
def small_net(monkeypatch):
    monkeypatch.setattr(nets, "NETS", {"small": lambda: {"a": (64, 64), "b": (64, 96)}})
    monkeypatch.setattr(claims, "NET", "small")


def test_the_model_adds_what_codecs_take(small_net):
    rows = pd.DataFrame([{"method": "fft", "seed": 0, "seconds": 2.0, "further": 0.5}])
    fitted = Fitted.open("horovod")
    own, faster = (claims.predict(rows, fitted, "1gbit", times).set_index("method")["seconds"] for times in (1, 1e12))
    assert own["fft"] - faster["fft"] == pytest.approx(5.0 * fitted.constants["codec"])  # 2 + 6 further ranks
    assert own["dense"] == faster["dense"] < own["fft"]


def test_codecs_are_timed_and_judged(small_net):
    rows = [
        {"method": label, "seed": seed, **measures.codecs("small", "a", method, seed, runs=1)}
        for label, method in claims.EXCHANGED.items()
        for seed in SEEDS
    ]
    assert all(row["seconds"] > 0 for row in rows)
    verdict = claims.alexnet(pd.DataFrame(rows))
    assert verdict.outcome.of == 30 and verdict.number.startswith("Predicted: 8 ranks at 10 Gbit/s; with this core")


def test_a_tiny_training_is_watched_and_judged():
    pytest.importorskip("sklearn")
    found = measures.watched(TINY, 2, 0, samples=3)
    assert json.dumps(found) and {row["step"] for row in found} == {1, 3, 5}
    rows = pd.DataFrame([{"net": "fnn3", "seed": seed, **row} for seed in SEEDS for row in found])
    assert rows["layers"].dropna().unique() == ["fully connected"]
    first = claims.errors(rows)
    assert first.outcome.of == 6 and first.number.startswith("Share of the 3 cells")
    third = claims.numbers(rows)
    assert third.outcome.of == 30 and "16 bits" not in third.outcome.because
    told = third.tables["‖decoded − x‖/‖x‖ over all tensors of a step"].set_index("format")
    assert told["raw"]["rangefloat16"] < told["raw"]["fp16"] < told["raw"]["bf16"] < told["raw"]["rangefloat8"]
    record = claims.PAPER.claims[0].record(first)
    assert json.dumps(record) and json.dumps(claims.PAPER.claims[2].record(third))


def test_training_with_a_falling_share_must_converge():
    pytest.importorskip("sklearn")
    values = {"none": 90, "constant 0.85": 89, "constant 0.99": 80, "diminishing from 0.85": 89.5}
    values |= {
        "diminishing from 0.99": 88.5,
        "0.99, then 0.5": 89.2,
        "0.99, recovery": 85,
        "constant 0.99, feedback": 88,
    }
    found = simulate.accuracy(TINY, {"method": "none"}, 2, 0)
    rows = pd.DataFrame(
        {**found, "net": net, "method": plan, "seed": seed, "value": value}
        for net in ("a", "b")
        for plan, value in values.items()
        for seed in SEEDS
    )
    verdict = claims.training(rows)
    assert verdict.outcome.kind is Kind.CONDITIONS and (verdict.outcome.met, verdict.outcome.of) == (6, 8)
    assert "diminishing from 0.99 -1.50 (-1.50 to -1.50)" in verdict.number and "regains 92 %" in verdict.number
    rows.loc[rows["method"] == "constant 0.99", "value"] = (
        math.nan
    )  # diverged: worse than dense, but nothing is regained
    assert claims.training(rows).outcome.met == 4
