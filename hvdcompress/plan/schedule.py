"""Changes during training: the plan keys ``warmup`` and ``schedule``.

``schedule`` sets hyper-parameters to new values at certain steps or epochs::

    schedule:
      density: {epochs: {0: 0.015625, 6: 0.004, 8: 0.001}}

The density can also follow the learning rate η, given by steps or epochs, as in FFT sparsification (Wang et al. 2020,
arXiv 1811.08596: training converges if the omitted share diminishes as θ_t = sqrt(L·η_t)). The density is then 1 − θ_t,
but at least the density of the method::

    schedule:
      density:
        diminishing: {lipschitz: 7.2, learning_rate: {steps: {0: 0.1, 300: 0.05, 450: 0.01}}}
"""

from __future__ import annotations

import math
from typing import Any

from hvdcompress.method import Method
from hvdcompress.plan.document import Document
from hvdcompress.registry import FieldError, get_method

UNITS = ("steps", "epochs")
#: Hyper-parameters that no schedule can change, because the state depends on them; ``Method.unschedulable`` adds more
FIXED = {"feedback", "values"}


def duration(given: Document, steps_per_epoch: int | None) -> int:
    """Convert a duration to steps.

    Args:
        given: {steps: N} or {epochs: E}.
        steps_per_epoch: number of steps per epoch; None if the plan does not give it.

    Raises:
        PlanError: ``given`` has neither form, or ``steps_per_epoch`` is missing.
    """
    given.known_keys(UNITS)
    if len(given.value) != 1:
        raise given.error(None, "needs exactly one of steps and epochs, such as {epochs: 5}")
    unit, amount = next(iter(given.value.items()))
    return _to_steps(given, unit, amount, steps_per_epoch)


def changes(body: Document, given: Any, method: Method, steps_per_epoch: int | None) -> dict[int, dict[str, Any]]:
    """Parse the ``schedule`` of a plan or a rule.

    Args:
        body: the keys of the plan or rule.
        given: the value of ``schedule``; None if absent.
        method: the method whose hyper-parameters change.
        steps_per_epoch: number of steps per epoch; None if the plan does not give it.

    Returns:
        {first step: {hyper-parameter: value}}, ascending.

    Raises:
        PlanError: a key is unknown, a value does not fit its hyper-parameter, or the hyper-parameter cannot change.
    """
    found: dict[int, dict[str, Any]] = {}
    if given is None:
        return found
    schedule = body.child("schedule", given)
    schedule.known_keys(tuple(method.hyperparameters()))
    for name in schedule.value:
        entry = schedule.child(name)
        entry.known_keys((*UNITS, "diminishing") if name == "density" else UNITS)
        points = _points(entry, steps_per_epoch)
        if "diminishing" in entry.value:
            points += _diminishing(entry.child("diminishing"), method, steps_per_epoch)
        for step, value, where, key in points:
            try:
                valid = get_method(method.id, **{**method.hyperparameters(), name: value})
            except FieldError as error:
                raise where.error(key, str(error)) from None
            found.setdefault(step, {})[name] = getattr(valid, name)
    fixed = (FIXED | set(method.unschedulable)) & set(schedule.value)
    if fixed:
        raise schedule.error(
            fixed.pop(), "cannot change during training, because the state depends on it; remove it from the schedule"
        )
    return dict(sorted(found.items()))


Point = tuple[int, Any, Document, Any]  # step, value, and the mapping and key that gave them, for error messages


def _points(entry: Document, steps_per_epoch: int | None) -> list[Point]:
    """Parse {steps|epochs: {start: value}}."""
    tables = {unit: entry.child(unit) for unit in UNITS if unit in entry.value}
    return [
        (_to_steps(entry, unit, start, steps_per_epoch), value, table, start)
        for unit, table in tables.items()
        for start, value in table.value.items()
    ]


def _diminishing(given: Document, method: Method, steps_per_epoch: int | None) -> list[Point]:
    """Parse ``diminishing``: densities 1 − sqrt(L·η_t), but at least the density of the method."""
    given.known_keys(("lipschitz", "learning_rate"))
    for key in ("lipschitz", "learning_rate"):
        if key not in given.value:
            raise given.error(
                key,
                "is missing: diminishing needs lipschitz and learning_rate, for θ_t = sqrt(lipschitz · learning_rate)",
            )
    lipschitz = _positive(given, "lipschitz", given.value["lipschitz"])
    rates = given.child("learning_rate")
    rates.known_keys(UNITS)
    least = method.hyperparameters()["density"]
    found: list[Point] = []
    for step, rate, where, key in _points(rates, steps_per_epoch):
        theta = math.sqrt(lipschitz * _positive(where, key, rate))
        found.append((step, max(least, 1.0 - theta), where, key))
    return found


def _positive(where: Document, key: Any, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise where.error(key, f"{value!r} must be a positive number")
    return float(value)


def _to_steps(where: Document, unit: str, amount: Any, steps_per_epoch: int | None) -> int:
    whole = unit == "steps"
    if isinstance(amount, bool) or not isinstance(amount, int if whole else (int, float)) or amount < 0:
        raise where.error(unit, f"{amount!r} must be a {'whole ' if whole else ''}number, 0 or more")
    if unit == "epochs" and steps_per_epoch is None:
        raise where.error(unit, "is given in epochs, which needs steps_per_epoch in the plan")
    return int(amount) if whole else round(amount * (steps_per_epoch or 1))
