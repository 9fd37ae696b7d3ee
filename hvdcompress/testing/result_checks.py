"""Checks of the reduced gradients: shapes, sums, finite values, and that no part of a gradient is lost."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from typing import Any

import numpy as np

from hvdcompress import registry
from hvdcompress.engine.lockstep import to_numpy
from hvdcompress.method import Method
from hvdcompress.parts import feedback
from hvdcompress.plan import load_plan, plan_of
from hvdcompress.testing.trial import Array, Case, Kind, equal, require


def check_value(case: Case) -> None:
    """Check that a method is a frozen, hashable value: equal to one with the same fields, and unchanged by a plan.

    Each field must have a type annotation: without one, a dataclass ignores the field, and its default applies forever.
    """
    method = case.method
    for cls in type(method).__mro__[: type(method).__mro__.index(Method)]:
        for name in _without_annotation(cls):
            raise AssertionError(
                f"{cls.__name__}.{name} has no type annotation, so it is not a hyper-parameter and a plan cannot set "
                f"it. Write `{name}: <type> = {vars(cls)[name]!r}`, or `{name}: ClassVar[<type>]` for a constant"
            )
    settings = method.hyperparameters()
    twin = type(method)(**settings)
    require({method, twin} == {method}, f"another {method} with the same fields is not equal, or has another hash")
    for name in settings:
        with suppress(AttributeError):
            setattr(method, name, settings[name])
            raise AssertionError(f"field {name!r} can be assigned; methods must be frozen")
    for text in ("id", "paper", "sends"):
        require(getattr(method, text), f"the method's {text!r} is empty")
    default = next(f.default for f in fields(method) if f.name == "feedback")
    require(
        not method.needs_feedback or default != "none",
        'needs_feedback is True, but feedback is off by default: define `feedback: FeedbackName = "plain"`',
    )
    require(json.loads(json.dumps(settings)) == settings, f"the hyper-parameters do not survive JSON: {settings}")
    if registry.classes().get(method.id) is type(method):
        plan = plan_of(method)
        again = load_plan(json.loads(json.dumps(plan.to_dict())))
        require(plan.program.main == method, f"the plan made from {method} contains {plan.program.main}")
        require(again == plan, "load_plan(plan.to_dict()) differs from the plan")


def _without_annotation(cls: type) -> list[str]:
    """Return the names of a class's values that should be fields, but lack the annotation that makes them fields."""
    inherited = {name for base in cls.__mro__[1:] for name in inspect.get_annotations(base)}
    # A subclass sets class variables of Method without repeating their types, but must repeat those of fields
    annotated = {*inspect.get_annotations(cls), *(inherited - {field.name for field in fields(Method)})}
    return [
        name
        for name, value in vars(cls).items()
        if name not in annotated and not name.startswith("_") and not callable(value) and not hasattr(value, "__get__")
    ]


def check_shapes(case: Case) -> None:
    """Check that results have the gradient's shape and dtype, inputs stay unchanged, and no memory is shared."""
    net = case.trial()
    shapes: list[tuple[int, ...]] = [(n,) for n in case.sizes] + [(), (3, 5, 7), (0, 4)]
    for number, shape in enumerate(shapes):
        for dtype in ("float32", "float64", "float16"):
            given = [g.astype(dtype) for g in case.gradients(shape, number)]
            before = [g.copy() for g in given]
            # A method that writes to the gradient raises if that is read-only. PyTorch has no such arrays: the tensor
            # is a copy then, and a view in the other step
            for writeable in (False, True):
                for g in given:
                    g.flags.writeable = writeable
                outs = net.allreduce(given, f"{dtype}.{number}")
                for rank, out in enumerate(outs):
                    where = f"shape {shape}, {dtype}, rank {rank}"
                    require(
                        out.shape == shape and out.dtype == dtype,
                        f"{where}: the result is {out.shape} {out.dtype}",
                    )
                    require(np.isfinite(out).all(), f"{where}: the result is not finite")
                    require(equal(given[rank], before[rank]), f"{where}: the input was changed")
                    require(not np.shares_memory(out, given[rank]), f"{where}: the result shares memory with the input")
                    require(
                        not any(np.shares_memory(out, other) for other in outs[:rank]),
                        f"{where}: results of different ranks share memory",
                    )


def check_layout(case: Case) -> None:
    """Check that the memory layout of a gradient (F-ordered, strided) does not change the result."""
    given = case.gradients((4, 6), 99)
    plain = case.trial().allreduce(given, "w")
    layouts: dict[str, Callable[[Array], Array]] = {
        "F-ordered": np.asfortranarray,
        "strided": lambda g: np.repeat(g, 2, axis=1)[:, ::2],
    }
    for name, layout in layouts.items():
        other = case.trial().allreduce([layout(g) for g in given], "w")
        require(all(map(np.array_equal, plain, other)), f"a gradient that is {name} in memory gives a different result")


def check_results(case: Case) -> None:
    """Check that results are bitwise equal on all ranks, average = sum / ranks, and no result is overwritten later."""
    summing = case.trial()
    averaging = case.trial()
    for n in case.sizes:
        earlier: list[tuple[Array, Array]] = []
        for step in range(case.steps):
            given = case.gradients(n, step, "heavy" if step % 2 else "normal")
            total = summing.allreduce(given, str(n), op="sum")
            mean = averaging.allreduce(given, str(n))
            require(
                all(equal(mean[0], other) for other in mean),
                f"n = {n}, step {step}: the ranks got different results",
            )
            spread = 1e-5 * float(np.sum(np.abs(given), axis=0).max(initial=0.0))
            require(
                np.allclose(mean[0] * np.float32(case.world_size), total[0], rtol=1e-5, atol=spread),
                f"n = {n}, step {step}: the average times the number of ranks is not the sum",
            )
            require(
                all(equal(*pair) for pair in earlier),
                f"n = {n}, step {step}: an earlier result was overwritten",
            )
            earlier.append((mean[-1], mean[-1].copy()))


def check_finite(case: Case) -> None:
    """Check that finite gradients give finite results: zeros, constants, denormals, 1e-12 to 1e12, up to 1e37."""
    kinds: tuple[Kind, ...] = ("zero", "constant", "denormal", "mixed", "huge", "sparse", "shifted")
    for n in [n for n in case.sizes if n <= 100][-3:]:
        for kind in kinds:
            # An element of an unbiased result may be n times the gradient's, and the largest float32 is 3.4e38
            shrink = np.float32(1 / max(n, 1)) if case.unbiased else np.float32(1)
            net = case.trial()
            for step in range(2):
                given = [g * shrink for g in case.gradients(n, step, kind)]
                outs = net.allreduce(given, "w")
                where = f"{kind} gradients, n = {n}, step {step}"
                require(all(np.isfinite(out).all() for out in outs), f"{where}: the result is not finite")
                require(
                    all(np.isfinite(net.residual("w", rank)).all() for rank in range(case.world_size)),
                    f"{where}: a residual is not finite",
                )
                require(
                    kind != "zero" or not any(out.any() for out in outs),
                    f"{where}: the result is not zero: {outs[0][outs[0] != 0][:3]}",
                )


def check_conservation(case: Case) -> None:
    """Check that nothing is lost: Σ sent = Σ gradients − Σ (residual_T − residual_0)/β, over steps and ranks.

    β is 1 for plain feedback. With momentum, the sum is over velocities instead of gradients. A method without feedback
    passes.
    """
    if case.method.feedback == "none":
        return
    beta = feedback.beta(case.method)
    for n in case.sizes:
        net = case.trial()
        shape = case.shape(n)
        sent = np.zeros(shape)
        given = np.zeros(shape)
        velocity: Any = np.zeros(shape)
        largest = 0.0
        for step in range(case.steps + case.world_size):
            gradients = case.gradients(n, step, "heavy" if step % 3 == 2 else "normal")
            total = net.allreduce(gradients, "w", op="sum")[0].astype(np.float64)
            sent = sent + total
            given = given + np.sum(gradients, axis=0, dtype=np.float64) + case.method.momentum * velocity
            residuals = np.sum([net.residual("w", rank) for rank in range(case.world_size)], axis=0, dtype=np.float64)
            slots = [rank.states["w"].slots.get(feedback.VELOCITY) for rank in net.ranks]
            # With other feedback, the slot is the method's own. A tensor that the method does not suit has none
            if case.method.feedback == "momentum" and slots[0] is not None:
                velocity = sum(to_numpy(x).astype(np.float64).reshape(shape) for x in slots)
            given_now = np.abs(gradients).reshape(case.world_size, -1).max(axis=1, initial=0).sum()
            largest = max(largest, given_now, np.abs(total).max(initial=0))
            gap = np.abs(sent - (given - residuals / beta)).max(initial=0.0)
            allowed = case.rounding * (step + 1) * (largest + np.abs(residuals).max(initial=0) / beta)
            require(
                gap <= allowed,
                f"n = {n}, step {step}: sent + residual is not the sum of the gradients: the difference is {gap:.3g}, "
                f"and rounding explains only {allowed:.3g}; `own` of all ranks must add up to `total`",
            )


def check_unbiased(case: Case) -> None:
    """Check that the mean over steps is the gradient, within six standard errors, if the method is unbiased."""
    if not case.unbiased:
        return
    n = 24
    steps = 300
    net = case.trial()
    given = case.gradients(n)
    outs = np.array([net.allreduce(given, "w")[0] for _ in range(steps)], np.float64)
    error = np.abs(outs.mean(axis=0) - np.mean(given, axis=0, dtype=np.float64))
    allowed = 6 * outs.std(axis=0) / math.sqrt(steps) + case.rounding
    worst = int((error - allowed).argmax())
    require(
        error[worst] <= allowed[worst],
        f"biased: the mean of element {worst} is off by {error[worst]:.3g}, allowed is {allowed[worst]:.3g}",
    )
