"""ScaleCom's claims: what is measured is what it says, and verdicts follow the rules."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.reproduce.claims import Kind, Result, Scale

scalecom = pytest.importorskip("experiments.reproduce.scalecom")
measures, settings = scalecom.measures, scalecom.settings


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
    world_sizes = [2, 4, 8]
    flat = measures.traffic(settings.scalecom("exact", 1.0, density=0.01), world_sizes, 0, 4000)
    grows = measures.traffic({"method": "topk", "density": 0.01}, world_sizes, 0, 4000)
    assert len(set(flat["sent"])) == 1 and flat["union"] == [0.01] * 3
    assert grows["wire"][-1] > 6 * grows["wire"][0] and grows["union"][-1] > 3 * grows["union"][0]
    both = [Result(unit, found) for unit, found in zip(traffic_units(world_sizes), (flat, grows), strict=True)]
    assert scalecom.flat(both).verdict.kind is Kind.HOLDS


def traffic_units(world_sizes):
    units = [unit for unit in settings.travelling(Scale(seeds=(0,))) if "chunk" not in unit.name]
    for unit in units:
        unit.settings.update(world_sizes=world_sizes, n=4000)
    return units


def test_residuals_are_compared_in_a_real_training():
    task = {"task": "noisy_digits", "steps": 6, "batch_size": 4, "learning_rate": 0.05, "warmup_steps": 1}
    found = measures.likeness(task, settings.scalecom("exact", 1.0, density=0.05), ranks=2, seed=0, samples=3)
    rows = found["rows"]
    assert [row["step"] for row in rows] == [1, 3, 5] and not found["diverged"]
    for row in rows:
        assert 0 < row["distance"] < 1.5 and 0 < row["share"] <= 1
        for part in row["tensors"].values():
            assert 0 <= part["missed"] <= 1 and part["kept"] <= part["best"] * (1 + 1e-9)
    assert len(found["quantiles"]) == 2 and found["quantiles"][0] == sorted(found["quantiles"][0])
