"""GradiVeQ's claims: spectra of known slices, methods during a dense training, rings, and verdicts by rule."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("torch")

from experiments.papers.claims import Kind  # noqa: E402
from experiments.papers.gradiveq import claims, measures, rings  # noqa: E402
from experiments.papers.simulate import wire_ratio  # noqa: E402
from experiments.ring.algorithm import simulate  # noqa: E402
from hvdcompress.loopback import Loopback  # noqa: E402
from hvdcompress.method import Context, TensorSpec  # noqa: E402

SPEC = TensorSpec("w", (16, 8, 3, 3))
SEEDS = (0, 1)


def stack_of(rank: int, steps: int = 30) -> np.ndarray:
    """Gradients whose filters lie in so many dimensions."""
    rng = np.random.default_rng(rank)
    base = rng.standard_normal((rank, 72))
    return (rng.standard_normal((steps, 16, rank)) @ base).reshape(steps, 16, 8, 3, 3).astype(np.float32)


def test_slices_of_few_dimensions_leave_nothing():
    found = measures.spectrum(stack_of(5), SPEC, "oihw", 72)
    assert found["size"] == 72 and found["samples"] == 480
    assert found["error"] < 1e-6 and found["control"] > 0.5  # shuffled, they need all dimensions


def test_the_error_is_that_of_the_best_basis():
    """Eckart and Young: what is left is the energy of the smaller singular values."""
    samples = measures.slices(stack_of(40), SPEC, "oihw", 72)
    values = np.linalg.svd(samples, compute_uv=False)
    wanted = np.sqrt((values[9:] ** 2).sum() / (values**2).sum())
    assert measures.spectrum(stack_of(40), SPEC, "oihw", 72)["error"] == pytest.approx(wanted, rel=1e-6)
    each = measures.oracle(stack_of(40), SPEC, "oihw")  # slices of 576: rank 72
    assert len(each) == 30 and max(each) < wanted


def test_methods_see_what_the_ranks_exchange():
    pytest.importorskip("sklearn")
    task = {"task": "digits", "steps": 14, "batch_size": 4, "learning_rate": 0.02, "warmup_steps": 1}
    lengths = {"dense_steps": 3, "compressed_steps": 4}
    entries = {
        "dense": {"method": "none"},
        "whole": {"method": "gradiveq", **lengths, "min_rate": 1.0, "slice_elements": 16, "lam": 0.0},
        "8x": {"method": "gradiveq", **lengths, "lam": 0.0},
    }
    found = measures.watched(task, 2, 0, ["2.weight"], [0, 5], **lengths, every=2, sizes=[0, 64], entries=entries)
    assert json.dumps(found)
    rows = {(row["start"], row["entry"]): row for row in found if row["kind"] == "errors"}
    for start in (0, 5):  # windows that overlap
        assert rows[start, "dense"]["errors"] == [0, 0] and rows[start, "dense"]["ages"] == [0, 2]
        assert max(rows[start, "whole"]["errors"]) < 1e-5  # as many components as a slice has elements
        assert 0 < rows[start, "oracle oihw"]["errors"][0] < rows[start, "8x"]["errors"][0] < 1
        assert rows[start, "dense"]["wire"] == 1 and rows[start, "8x"]["wire"] == pytest.approx(8, rel=0.01)
    assert {row["size"] for row in found if row["kind"] == "spectrum"} == {64}  # of 576 there are too few


def test_the_ratio_on_the_wire_is_that_of_rings():
    for method, settings, ratio in (("none", {}, 1), ("fp16", {}, 2), ("qsgd", {"bits": 8, "route": "scatter"}, 4)):
        net = Loopback(method, world_size=3, min_elements=1, **settings)
        net.allreduce([np.ones(30_000, np.float32)] * 3, name="w")
        assert wire_ratio(net) == pytest.approx(ratio, rel=0.02), method


def test_rings_send_what_their_ratios_say():
    spec = TensorSpec("w", (64, 64, 3, 3))
    xs = [np.random.default_rng(rank).standard_normal(spec.size).astype(np.float32) for rank in range(2)]
    for ratio, elements, values in ((1, 0, "fp32"), (8, 0, "qsgd4"), (8, 8.0, "fp32"), (16, 4.0, "qsgd8")):
        codecs = [rings.codec_of(elements, values, Context(rank, 2, 0, spec)) for rank in range(2)]
        assert 4 * spec.size / simulate(xs, codecs)[0].payload == pytest.approx(ratio, rel=0.04)


# -- verdicts ------------------------------------------------------------------------------------


def spectra(error: float) -> list[dict]:
    common = {"kind": "spectrum", "start": 0, "size": 64, "default": True, "convolution": True, "samples": 99}
    return [
        {**common, "net": net, "seed": seed, "tensor": "w", "order": order, "error": error, "control": 0.9}
        for net in ("a", "b")
        for seed in SEEDS
        for order in measures.ORDERS
    ]


def test_slices_must_be_correlated_in_every_seed():
    rows = pd.DataFrame(spectra(0.2))
    assert claims.correlated(rows).outcome.kind is Kind.HOLDS
    rows.loc[0, "error"] = 0.4
    outcome = claims.correlated(rows).outcome
    assert (outcome.met, outcome.of) == (3, 4) and outcome.because.startswith("in order hwio, slices of 64: everywhere")


def test_a_basis_is_compared_with_the_oracle_of_its_order():
    errors = {"default": 0.55, "paper": 0.9, "oracle oihw": 0.5, "oracle hwio": 0.5}
    rows = spectra(0.2) + [
        {
            "kind": "errors",
            "net": net,
            "seed": s,
            "start": 5,
            "tensor": "w",
            "entry": e,
            "ages": [0, 8],
            "errors": [x, x],
        }
        for net in ("a", "b")
        for s in SEEDS
        for e, x in errors.items()
    ]
    verdict = claims.carries(pd.DataFrame(rows))
    assert verdict.outcome.because == "a, dense from step 5 on, default; b, dense from step 5 on, default"
    assert "1.10 (1.10 to 1.10) for a with default settings" in verdict.number
    assert "1.80 (1.80 to 1.80) for b with paper settings" in verdict.number


def test_training_names_the_highest_ratio_that_loses_nothing():
    found = {
        "none": (90, 1),
        "default": (89.5, 3),
        "paper": (88, 3),
        "16x": (89.2, 6),
        "8x": (89.9, 5.5),
        "y": (85, 9),
    }
    rows = pd.DataFrame(
        {"net": net, "method": method, "seed": seed, "value": value - (method == "16x") * worse, "wire": wire}
        for net, worse in (("a", 0), ("b", 4))
        for method, (value, wire) in found.items()
        for seed in SEEDS
    )
    rows.loc[(rows["net"] == "b") & (rows["method"] == "8x"), "value"] = np.nan  # diverged
    verdict = claims.training(rows)
    assert verdict.outcome.because == "a, default; b, default" and "a with “16x”, 6.00x" in verdict.number
    assert verdict.number.endswith("none for b.")


def test_a_cycle_counts_dense_steps_and_the_fit():
    names = ["dense", *(name for mixes in claims.MIXES.values() for name in mixes)]
    rows = pd.DataFrame(
        {"net": net, "link": "x", "seed": seed, "ring": name, "seconds": 1.0 if name == "dense" else 0.1, "fit": 10.0}
        for net in claims.RINGS
        for seed in SEEDS
        for name in names
    ).assign(sent=100)
    speed = claims.cycles(rows).groupby("scheme")["speed-up"].mean()
    assert speed["8x"] == pytest.approx(500 / (100 + 10 + 40)) and speed["compressed steps alone"] == pytest.approx(10)
    verdict = claims.aggregation(rows)
    assert (verdict.outcome.met, verdict.outcome.of) == (4, 6) and "8.33x" in verdict.number
    watched = pd.DataFrame(
        {
            "net": "a",
            "seed": s,
            "tensor": "w",
            "entry": name,
            "errors": [0.2 if "," in name else 0.3] * 3,
            "wire": ratio,
        }
        for ratio, mixes in claims.MIXES.items()
        for name in mixes
        for s in SEEDS
    )
    assert claims.together(watched, rows).outcome.kind is Kind.FAILS  # equal times are not shorter
    rows.loc[rows["ring"] == "gradiveq 4x, qsgd8", "seconds"] = 0.05
    outcome = claims.together(watched, rows).outcome
    assert (outcome.met, outcome.of) == (2, 6) and outcome.because == "16x, ResNet-32, x; 16x, VGG layer, x"
