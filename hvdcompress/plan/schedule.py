"""Changes during training, in a plan: the keys ``warmup`` and ``schedule``.

``schedule`` gives hyper-parameters new values from certain steps or epochs on::

    schedule:
      density: {epochs: {0: 0.015625, 6: 0.004, 8: 0.001}}

The density may also follow the learning rate η, given by steps or epochs, as in FFT sparsification (Wang et al. 2020,
arXiv 1811.08596: training converges if the dropped share diminishes as θ_t = sqrt(L·η_t)). Then the density is 1 − θ_t,
but at least the method's own::

    schedule:
      density:
        diminishing: {lipschitz: 7.2, learning_rate: {steps: {0: 0.1, 300: 0.05, 450: 0.01}}}
"""

from __future__ import annotations

import math
from typing import Any

from hvdcompress.method import Method
from hvdcompress.plan.document import Document
from hvdcompress.registry import FieldError, get

UNITS = ("steps", "epochs")
#: Hyper-parameters that no schedule may change, because existing state depends on them; a method's ``fixed`` adds more.
FIXED = {"feedback", "values"}


def duration(given: Document, steps_per_epoch: int | None) -> int:
    """Convert a duration to steps.

    Args:
        given: {steps: N} or {epochs: E}.
        steps_per_epoch: the plan's, or None if it gives none.

    Raises:
        PlanError: ``given`` is neither, or ``steps_per_epoch`` is missing.
    """
    given.known_keys(UNITS)
    if len(given.value) != 1:
        raise given.error(None, "needs either steps or epochs, such as {epochs: 5}")
    unit, amount = next(iter(given.value.items()))
    return _to_steps(given, unit, amount, steps_per_epoch)


def changes(body: Document, given: Any, method: Method, steps_per_epoch: int | None) -> dict[int, dict[str, Any]]:
    """Read a plan's ``schedule``.

    Args:
        body: the plan's or the rule's keys.
        given: the value under ``schedule``; None if there is none.
        method: the method that it changes.
        steps_per_epoch: the plan's, or None if it gives none.

    Returns:
        {first step: {hyper-parameter: value}}, ascending.

    Raises:
        PlanError: a key is unknown, a value does not fit its hyper-parameter, or the hyper-parameter must not change.
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
                valid = get(method.id, **{**method.hyperparameters(), name: value})
            except FieldError as error:
                raise where.error(key, str(error)) from None
            found.setdefault(step, {})[name] = getattr(valid, name)
    fixed = (FIXED | set(method.unschedulable)) & set(schedule.value)
    if fixed:
        raise schedule.error(
            fixed.pop(), "cannot change during training, as existing state depends on it; remove it from the schedule"
        )
    return dict(sorted(found.items()))


Point = tuple[int, Any, Document, Any]  # step, value; and the mapping and key where it was written, for errors


def _points(entry: Document, steps_per_epoch: int | None) -> list[Point]:
    """Read {steps|epochs: {start: value}}."""
    found: list[Point] = []
    for unit in UNITS:
        if unit in entry.value:
            table = entry.child(unit)
            for start, value in table.value.items():
                found.append((_to_steps(entry, unit, start, steps_per_epoch), value, table, start))
    return found


def _diminishing(given: Document, method: Method, steps_per_epoch: int | None) -> list[Point]:
    """Read ``diminishing``: densities 1 − sqrt(L·η_t), but at least the method's own density."""
    given.known_keys(("lipschitz", "learning_rate"))
    for key in ("lipschitz", "learning_rate"):
        if key not in given.value:
            raise given.error(
                key, "is missing; diminishing needs lipschitz and learning_rate: θ_t = sqrt(lipschitz · learning_rate)"
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
        raise where.error(unit, "is given in epochs; add steps_per_epoch to the plan")
    return int(amount) if whole else round(amount * (steps_per_epoch or 1))
