"""ScaleCom's claims: what is measured is what it says, and verdicts follow the rules."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from experiments.papers.claims import Kind

claims = pytest.importorskip("experiments.papers.scalecom.claims")
settings, measures = claims.settings, claims.settings.measures


def test_distance_is_the_mean_over_pairs():
    same, across, against = np.array([1.0, 0]), np.array([0, 3.0]), np.array([-2.0, 0])
    assert measures.distance([same, 5 * same]) == pytest.approx(0)
    assert measures.distance([same, across]) == pytest.approx(1)
    assert measures.distance([same, across, against]) == pytest.approx((1 + 2 + 1) / 3)


def test_contraction_by_hand():
    mean, reduced = np.array([3.0, 2, 1, 0.5, 0, 0, 0, 0]), np.zeros(8)
    reduced[[0, 2]] = [3, 1]  # of the two best positions, 0 and 1, one is missed
    found = measures.contraction(mean, reduced, density=0.25)
    total = 9 + 4 + 1 + 0.25
    assert (found["kept"], found["best"], found["missed"]) == (10, 13, 0.5)
    assert found["left"] == pytest.approx(1 - 10 / total)
    assert found["bound"] == pytest.approx(0.5 + 0.5 * (1 - 13 / total))
    assert measures.contraction(mean, np.zeros(8), 0.25) is None
    assert measures.contraction(np.zeros(8), reduced, 0.25) is None


def test_traffic_is_flat_and_top_k_builds_up():
    methods = {"exact": settings.scalecom("exact", 1.0, density=0.01), "topk": {"method": "topk", "density": 0.01}}
    frame = pd.DataFrame(
        {"method": name, "seed": 0, **row}
        for name, method in methods.items()
        for row in measures.traffic(method, [2, 4, 8], 0, 4000)
    )
    flat, grows = (frame[frame["method"] == name] for name in methods)
    assert flat["sent"].nunique() == 1 and set(flat["union"]) == {0.01}
    assert grows["wire"].iloc[-1] > 6 * grows["wire"].iloc[0] and grows["union"].iloc[-1] > 3 * grows["union"].iloc[0]
    assert claims.flat(frame).outcome.kind is Kind.HOLDS
    frame.loc[frame["method"] == "exact", "wire"] *= 2
    assert claims.flat(frame).outcome.kind is Kind.FAILS


def test_residuals_are_compared_in_a_real_training():
    pytest.importorskip("sklearn")
    task = {"task": "noisy_digits", "steps": 6, "batch_size": 4, "learning_rate": 0.05, "warmup_steps": 1}
    frame = pd.DataFrame()
    for beta in (1.0, 0.1):
        rows = measures.likeness(task, settings.scalecom("exact", beta, density=0.05), ranks=2, seed=0, samples=3)
        assert [row["step"] for row in rows] == [1, 3, 5]
        assert all(0 < row["distance"] < 1.5 and 0 < row["share"] <= 1 for row in rows)
        labels = {"net": "digits_net", "rate": 0.2, "select": "exact", "β": beta, "seed": 0}
        frame = pd.concat([frame, pd.DataFrame(rows).assign(**labels)], ignore_index=True)
    for test in (claims.alike, claims.filtered, claims.lemma):
        assert test(frame).number
    assert claims.lemma(frame).outcome.kind is Kind.HOLDS


def test_a_training_that_diverged_is_worse_than_any_other():
    values = {(1, "none"): 80.0, (1, "β 1"): 70.0, (1, "β 0.1"): 75.0, (4, "none"): math.nan, (4, "β 1"): math.nan,
              (4, "β 0.1"): 79.5}  # fmt: skip
    frame = pd.DataFrame(
        {"workers": 16, "factor": factor, "method": method, "seed": seed, "value": value}
        for (factor, method), value in values.items()
        for seed in (0, 1)
    )
    verdict = claims.large_batch(frame)
    assert verdict.outcome.kind is Kind.HOLDS and "β 1 diverged in 2 of 2 seeds" in verdict.number
    frame.loc[(frame["method"] == "β 0.1") & (frame["factor"] == 4) & (frame["seed"] == 1), "value"] = 78.9
    assert claims.large_batch(frame).outcome.because == "16 workers: β 0.1 above β 1 at x4"


def test_losses_are_in_the_tasks_own_unit_and_small_ratios_are_not_judged():
    task, text = "FNN-3, Fashion-MNIST", settings.TEXT
    methods = {("none", ""): 0.0, ("exact, β 1", "48x"): 0.04, ("exact, β 1", "over 100x"): 0.6,
               ("chunk, β 0.1", "48x"): 0.4, ("chunk, β 0.1", "over 100x"): 0.6}  # fmt: skip
    frame = pd.DataFrame(
        {"task": name, "at": at, "method": method, "seed": 0, "ratio": 45.0, "value": 80 + sign * loss}
        for name, sign in ((task, -1), (text, 1))
        for (method, at), loss in methods.items()
    )  # fmt: skip
    verdict = claims.no_loss(frame)
    assert (
        verdict.outcome.because == f"{task} at 48x, exact, β 1; {task} at 48x, chunk, β 0.1; {text} at 48x, exact, β 1"
    )
    assert "much of which stays dense, is not judged" in verdict.notes
