"""Schedules: warm-up, values by steps or epochs, and a density that follows the learning rate."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hvdcompress import get_method, load_plan
from hvdcompress.method import TensorSpec
from hvdcompress.plan import PlanError


@pytest.mark.parametrize(
    "settings,stages",
    [
        ({"schedule": {"density": {"steps": {0: 0.1, 20: 0.01}}}}, [(0, "topk", 0.1), (20, "topk", 0.01)]),
        (
            {"steps_per_epoch": 10, "schedule": {"density": {"epochs": {0: 0.1, 2: 0.01}}}},
            [(0, "topk", 0.1), (20, "topk", 0.01)],
        ),
        (  # before its first point, the plain value holds
            {"density": 0.3, "schedule": {"density": {"steps": {4: 0.1}}}},
            [(0, "topk", 0.3), (4, "topk", 0.1)],
        ),
        (  # a schedule goes on during a warm-up
            {
                "warmup": {"epochs": 1.5},
                "steps_per_epoch": 10,
                "schedule": {"density": {"epochs": {0: 0.4, 1: 0.2, 2: 0.1}}},
            },
            [(0, "none", None), (15, "topk", 0.2), (20, "topk", 0.1)],
        ),
        ({"warmup": {"steps": 0}}, [(0, "topk", 0.01)]),
        (  # a rule may have no warm-up
            {"warmup": {"steps": 5}, "rules": [{"match": {"name": "w"}, "warmup": None, "density": 0.5}]},
            [(0, "topk", 0.5)],
        ),
    ],
)
def test_stages(settings: dict[str, Any], stages: list[tuple[int, str, float | None]]) -> None:
    program = load_plan({"method": "topk", **settings}).program_of(TensorSpec("w", (9,)))
    assert [(start, method.id, getattr(method, "density", None)) for start, method in program.periods] == stages
    for start, id, _ in stages:
        assert program.at(start).id == program.at(start + 1).id == id


def test_two_scheduled_settings_keep_the_value_of_each_other() -> None:
    schedule = {"density": {"steps": {0: 0.5, 10: 0.1}}, "beta": {"steps": {5: 0.25}}}
    stages = load_plan({"method": "scalecom", "schedule": schedule}).program.periods
    values = [(start, method.density, method.beta) for start, method in stages]  # type: ignore[attr-defined]
    assert values == [(0, 0.5, get_method("scalecom").beta), (5, 0.5, 0.25), (10, 0.1, 0.25)]  # type: ignore[attr-defined]


# -- diminishing --------------------------------------------------------------------------------------------------


def diminishing(**given: Any) -> dict[str, Any]:
    return {"method": "topk", "density": 0.01, "schedule": {"density": {"diminishing": given}}}


@pytest.mark.parametrize(
    "lipschitz,learning_rate,densities",
    [
        (7.2, {"steps": {0: 0.1, 300: 0.05, 450: 0.001}}, {0: 0.1, 300: 0.05, 450: 0.001}),
        (1, {"epochs": {0: 0.25, 2: 0.04}}, {0: 0.25, 20: 0.04}),
        (50, {"steps": {0: 0.1, 10: 0.0001}}, {0: 0.99**2 / 50, 10: 0.0001}),  # never below the plan's density
    ],
)
def test_the_density_is_one_minus_the_root_of_l_times_the_learning_rate(
    lipschitz: float, learning_rate: dict[str, Any], densities: dict[int, float]
) -> None:
    """θ_t = sqrt(L·η_t), density = 1 − θ_t. ``densities``: {step: learning rate that gives the density}."""
    plan = {**diminishing(lipschitz=lipschitz, learning_rate=learning_rate), "steps_per_epoch": 10}
    found = {start: method.density for start, method in load_plan(plan).program.periods}  # type: ignore[attr-defined]
    assert found == pytest.approx({step: 1 - math.sqrt(lipschitz * rate) for step, rate in densities.items()})


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
def test_malformed_diminishing_schedules_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        load_plan(diminishing(**given))


def test_only_the_density_can_diminish() -> None:
    plan = {"method": "scalecom", "schedule": {"beta": {"diminishing": {"lipschitz": 1}}}}
    with pytest.raises(PlanError, match=r"schedule\.beta\.diminishing: unknown key"):
        load_plan(plan)


def test_the_age_of_a_method_counts_from_its_first_stage() -> None:
    """A changed setting does not restart the phases of a method; another method does."""
    program = load_plan({**diminishing(lipschitz=1, learning_rate={"steps": {5: 0.1}}), "warmup": {"steps": 3}}).program
    assert [program.since(step) for step in (0, 2, 3, 4, 5, 100)] == [0, 0, 3, 3, 3, 3]
