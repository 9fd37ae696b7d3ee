"""The claims of FFT's paper: its measures on data for which they are known, and its page from tiny trainings."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from experiments import nets  # noqa: E402
from experiments.reproduce import fft, fft_exchange, fft_measures, fft_reports, run, simulate  # noqa: E402
from experiments.reproduce.claims import Scale, Unit  # noqa: E402
from hvdcompress.method import TensorSpec  # noqa: E402
from hvdcompress.plan import load  # noqa: E402

SPEC = TensorSpec("w", (40, 500))
SEEDS = (0, 1)


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"method": "topk", "values": "rangefloat10"}, {"method": "topk"}, {"method": "fft"}]
)
def test_a_matched_density_is_the_largest(settings):
    most = 5000
    places = SPEC.size // 2 + 1 if settings["method"] == "fft" else SPEC.size
    found = fft_measures.matched(settings, SPEC, most, 2)
    k = math.floor(found["density"] * places)
    more = {**settings, "density": fft_measures.density(k + 1, places)}
    assert fft_measures.num_bytes(found, SPEC, 2) <= most < fft_measures.num_bytes(more, SPEC, 2)


def test_bytes_are_equal_and_errors_are_those_of_the_methods():
    watch = fft_measures.Watch(2, [0.85])
    random = np.random.default_rng(0)
    heavy = [random.standard_t(2, SPEC.shape).astype(np.float32) for _ in range(2)]
    found = watch.tensor("heavy", heavy)
    for rival, each in found["rivals"].items():
        ours, theirs = each["bytes"]
        assert ours == pytest.approx(theirs, rel=0.01), rival
    kept = [np.where(np.abs(g) >= np.sort(np.abs(g), axis=None)[-3000], g, 0) for g in heavy]  # 15 % of 20 000
    wanted = fft_measures.relative(np.mean(kept, axis=0), np.mean(heavy, axis=0))
    assert found["thetas"]["0.85"]["topk"] == pytest.approx(wanted, rel=1e-5)
    assert found["thetas"]["0.85"]["topk"] < found["thetas"]["0.85"]["fft"] and found["kurtosis"] > 6
    waves = np.sin(np.arange(SPEC.size, dtype=np.float32).reshape(SPEC.shape) / 50)
    smooth = watch.tensor("smooth", [waves, 2 * waves])
    assert smooth["thetas"]["0.85"]["fft"] < 0.05 < smooth["thetas"]["0.85"]["topk"] and smooth["correlation"] > 0.99
    assert all(each["fft"] < each["rival"] for each in smooth["rivals"].values())


# -- θ by schedule -------------------------------------------------------------------------------


def test_a_diminishing_share_follows_the_learning_rate():
    task = fft.task("fashion_mnist", "fnn3", 240, Scale(), learning_rate=0.05)
    program = load(fft.diminishing(task, 0.9)).program
    densities = [method.density for _, method in program.stages]
    assert densities[0] == pytest.approx(0.1) and densities == sorted(densities) and densities[-1] > 0.9
    halfway, peak = (0.5 * (1 + math.cos(math.pi * step / 240)) for step in (120, 24))  # 24 steps of warm-up
    assert dict(program.stages)[120].density == pytest.approx(1 - 0.9 * math.sqrt(halfway / peak))


# -- AlexNet's exchange --------------------------------------------------------------------------


@pytest.fixture
def small_net(monkeypatch):
    monkeypatch.setattr(nets, "NETS", {"small": lambda: {"a": (64, 64), "b": (64, 96)}})


def test_the_model_adds_what_codecs_take(small_net):
    timed = {"fft": (fft.EXCHANGED["fft"], {"seconds": 2.0, "further": 0.5})}

    def seconds(world_size, faster):
        return fft_exchange.exchanges("small", timed, ["1gbit"], world_size, faster)["1gbit"]

    factor = fft_exchange.fitted().constants.codec
    assert seconds(8, 1)["fft"] - seconds(8, 1e12)["fft"] == pytest.approx(5.0 * factor)  # 2 + 6 further ranks
    assert seconds(8, 1)["none"] == seconds(8, 50)["none"] < seconds(8, 1)["fft"]


# -- the page ------------------------------------------------------------------------------------


def tiny_units():
    task = {"task": "digits", "net": "fnn3", "steps": 6, "batch_size": 8, "learning_rate": 0.05, "warmup_steps": 1}
    watched = [
        Unit(
            f"watch {seed}",
            fft_measures.watched,
            {"task": task, "ranks": 2, "seed": seed, "samples": 3, "thetas": list(fft.THETAS)},
        )
        for seed in SEEDS
    ]
    trained = [
        Unit(f"train {name} {seed}", simulate.accuracy, {"task": task, "method": plan, "ranks": 2, "seed": seed})
        for name, plan in fft.schedules(task).items()
        for seed in SEEDS
    ]
    timed = [
        Unit(
            f"codecs {seed}",
            fft_exchange.codecs,
            {"net": "small", "small": "a", "methods": fft.EXCHANGED, "seed": seed, "runs": 1},
        )
        for seed in SEEDS
    ] + [
        Unit(f"primitives {seed}", fft_exchange.primitives, {"n": 8192, "density": 0.15, "seed": seed, "rounds": 1})
        for seed in SEEDS
    ]
    return {"F1": watched, "F2": trained, "F3": watched, "F4": timed}


def test_the_page_of_tiny_trainings(tmp_path, small_net, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(fft_reports, "NET", "small")
    units = tiny_units()
    claims = [dataclasses.replace(claim, units=lambda _, id=claim.id: units[id]) for claim in fft.PAPER.claims]
    paper = dataclasses.replace(fft.PAPER, claims=claims)
    run.reproduce(paper, tmp_path, Scale(seeds=SEEDS), 1, Console(file=io.StringIO()), "tiny")
    text = (tmp_path / "fft.md").read_text()
    assert all(f"## {claim.id}: {claim.says}" in text for claim in claims)
    assert "fnn3, fully connected" in text and "| fnn3 | diminishing from 0.99 |" in text and "nan" not in text
    data = json.loads((tmp_path / "fft.json").read_text())["claims"]
    assert [claim["id"] for claim in data] == ["F1", "F2", "F3", "F4"]
    assert data[3]["number"].startswith("Predicted: ") and "stalls" not in data[1]["verdict"]
    assert all(f"| 16 | {name} |" in text for name in ("bf16", "rangefloat16", "fp16"))
    assert "16 bits" not in data[2]["verdict"] and "*Published:* on 8 GPUs 2.26 times" in text
    drawn = {file.name for file in tmp_path.glob("*.svg")}
    assert {f"fft-{name}.svg" for name in ("ratios", "theta", "causes", "losses-fnn3", "alexnet", "primitives")} < drawn
    assert all(f"({name})" in text for name in drawn)
