"""Schedules: values by steps or epochs, and a density that follows the learning rate."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hvdcompress import load
from hvdcompress.plan import PlanError


def densities(plan: dict[str, Any]) -> list[tuple[int, float]]:
    return [(start, round(method.density, 6)) for start, method in load(plan).program.stages]  # type: ignore[attr-defined]


def diminishing(**given: Any) -> dict[str, Any]:
    return {"method": "topk", "density": 0.01, "schedule": {"density": {"diminishing": given}}}


def test_diminishing_theta_is_the_root_of_l_times_the_learning_rate() -> None:
    """θ_t = sqrt(L·η_t), density = 1 − θ_t."""
    rates = {0: 0.1, 300: 0.05, 450: 0.001}
    found = densities(diminishing(lipschitz=7.2, learning_rate={"steps": rates}))
    assert found == [(step, round(1 - math.sqrt(7.2 * rate), 6)) for step, rate in rates.items()]
    assert [density for _, density in found] == sorted(density for _, density in found)


def test_diminishing_never_sends_less_than_the_density() -> None:
    assert densities(diminishing(lipschitz=50, learning_rate={"steps": {0: 0.1, 10: 0.0001}})) == [
        (0, 0.01), (10, round(1 - math.sqrt(0.005), 6))
    ]  # fmt: skip


def test_diminishing_by_epochs() -> None:
    plan = {**diminishing(lipschitz=1, learning_rate={"epochs": {0: 0.25, 2: 0.04}}), "steps_per_epoch": 10}
    assert densities(plan) == [(0, 0.5), (20, 0.8)]


@pytest.mark.parametrize(
    "given,words",
    [
        ({"lipschitz": 1}, "learning_rate: is missing"),
        ({"learning_rate": {"steps": {0: 0.1}}}, "lipschitz: is missing"),
        ({"lipschitz": -1, "learning_rate": {"steps": {0: 0.1}}}, "lipschitz: -1 must be a positive number"),
        ({"lipschitz": True, "learning_rate": {"steps": {0: 0.1}}}, "lipschitz: True must be"),
        ({"lipschitz": 1, "learning_rate": {"steps": {0: "x"}}}, "steps.0: 'x' must be a positive number"),
        ({"lipschitz": 1, "learning_rate": {"epochs": {0: 0.1}}}, "steps_per_epoch"),
        ({"lipschitz": 1, "learning_rate": {"stepz": {0: 0.1}}}, "unknown key.*did you mean 'steps'"),
        ({"lipshitz": 1, "learning_rate": {"steps": {0: 0.1}}}, "unknown key.*did you mean 'lipschitz'"),
    ],
)
def test_bad_diminishing_schedules_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        load(diminishing(**given))


def test_only_density_diminishes() -> None:
    plan = {"method": "scalecom", "schedule": {"beta": {"diminishing": {"lipschitz": 1}}}}
    with pytest.raises(PlanError, match="schedule.beta.diminishing: unknown key"):
        load(plan)


def test_stages_of_one_method_are_one_for_its_age() -> None:
    """A changed hyper-parameter does not restart a method's phases; another method does."""
    program = load({**diminishing(lipschitz=1, learning_rate={"steps": {5: 0.1}}), "warmup": {"steps": 3}}).program
    assert [program.since(step) for step in (0, 2, 3, 4, 5, 100)] == [0, 0, 3, 3, 3, 3]
