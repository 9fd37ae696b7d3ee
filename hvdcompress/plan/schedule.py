"""What changes in the course of training, in a plan: ``warmup`` and ``schedule``.

Any hyper-parameter may be given values from certain steps or epochs on::

    schedule:
      density: {epochs: {0: 0.015625, 6: 0.004, 8: 0.001}}

The density of a sparsifier may also follow the learning rate, as FFT sparsification has it (Wang et al. 2020,
arXiv 1811.08596: training converges if the share θ that is dropped diminishes as θ_t = sqrt(L·η_t)). The
learning rates are given by steps or epochs; density is 1 − θ, at least the method's own one::

    schedule:
      density:
        diminishing: {lipschitz: 7.2, learning_rate: {steps: {0: 0.1, 300: 0.05, 450: 0.01}}}

Both become stages: a few methods with the steps from which on they hold, the same on every rank.
"""

from __future__ import annotations

import math
from typing import Any

from hvdcompress.method import Method
from hvdcompress.plan.document import Document
from hvdcompress.registry import FieldError, get

UNITS = ("steps", "epochs")
#: What a change would make of the state that there is, nobody can say; a method names more in ``fixed``.
FIXED = {"feedback", "values"}


def duration(given: Document, steps_per_epoch: int | None) -> int:
    """{steps: N} or {epochs: E} -> a number of steps.

    Raises:
        PlanError: it is neither.
    """
    given.known_keys(UNITS)
    if len(given.value) != 1:
        raise given.error(None, "give either steps or epochs")
    unit, amount = next(iter(given.value.items()))
    return _to_steps(given, unit, amount, steps_per_epoch)


def changes(body: Document, given: Any, method: Method, steps_per_epoch: int | None) -> dict[int, dict[str, Any]]:
    """A plan's ``schedule`` -> {first step: {hyper-parameter: value}}, ascending.

    Raises:
        PlanError: an unknown key, a value that the method refuses, or a hyper-parameter that must not change.
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
    fixed = (FIXED | set(method.fixed)) & set(schedule.value)
    if fixed:
        raise schedule.error(fixed.pop(), "cannot change during training")
    return dict(sorted(found.items()))


Point = tuple[int, Any, Document, Any]  # step, value, and where it was written, for errors


def _points(entry: Document, steps_per_epoch: int | None) -> list[Point]:
    """{steps|epochs: {start: value}} -> points."""
    found: list[Point] = []
    for unit in UNITS:
        if unit in entry.value:
            table = entry.child(unit)
            for start, value in table.value.items():
                found.append((_to_steps(entry, unit, start, steps_per_epoch), value, table, start))
    return found


def _diminishing(given: Document, method: Method, steps_per_epoch: int | None) -> list[Point]:
    """θ_t = sqrt(L·η_t): points whose values are densities 1 − θ_t, but never below the method's own density."""
    given.known_keys(("lipschitz", "learning_rate"))
    for key in ("lipschitz", "learning_rate"):
        if key not in given.value:
            raise given.error(key, "is missing: θ_t = sqrt(lipschitz · learning_rate)")
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
        raise where.error(unit, "this plan speaks of epochs, so it must also give steps_per_epoch")
    return int(amount) if whole else round(amount * (steps_per_epoch or 1))
