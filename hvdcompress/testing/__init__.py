"""The conformance suite: checks that every compression method must pass. Use it for your own methods, too.

    from hvdcompress.testing import check_method
    check_method(MyMethod(density=0.01))              # raises AssertionError if a check fails

Each of :data:`CHECKS` runs the method with several numbers of ranks in a :class:`Trial`, a loopback network that
records every collective. No test framework is needed, and the checks also work under ``python -O``. The method need not
be registered; if it is, its round trip through a plan is checked, too.

>>> import hvdcompress
>>> check_method(hvdcompress.get_method("topk", density=0.1), world_sizes=(2,), sizes=(1, 50))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

from hvdcompress.method import Method
from hvdcompress.testing.exchange_checks import (
    check_bytes,
    check_collectives,
    check_deterministic,
    check_loss_scale,
    check_nonfinite,
    check_resume,
    check_state,
    check_wire,
)
from hvdcompress.testing.result_checks import (
    check_conservation,
    check_finite,
    check_layout,
    check_results,
    check_shapes,
    check_unbiased,
    check_value,
)
from hvdcompress.testing.trial import Case, Collective, Settings, Trial, backends, numbers, plan_for, variants

__all__ = [
    "CHECKS",
    "Case",
    "Collective",
    "Settings",
    "Trial",
    "backends",
    "check_bytes",
    "check_collectives",
    "check_conservation",
    "check_deterministic",
    "check_finite",
    "check_layout",
    "check_loss_scale",
    "check_method",
    "check_nonfinite",
    "check_results",
    "check_resume",
    "check_shapes",
    "check_state",
    "check_unbiased",
    "check_value",
    "check_wire",
    "numbers",
    "plan_for",
    "variants",
]


Check = Callable[[Case], None]
CHECKS: tuple[Check, ...] = (
    check_value, check_shapes, check_layout, check_results, check_finite, check_conservation, check_unbiased,
    check_bytes, check_collectives, check_deterministic, check_nonfinite, check_resume, check_loss_scale,
    check_state, check_wire,
)  # fmt: skip
"""Every check, in the order in which :func:`check_method` runs them."""

#: Relative errors to allow by number format. The all-reduce rounds fp16 sums, and no residual contains this error
ROUNDING = {"fp16": 2.0**-9}


def rounding_of(method: Method) -> float:
    """Return the relative rounding error to allow in sums of the method's values, by its id or its ``values``."""
    return max((ROUNDING.get(str(word), 1e-5) for word in (method.id, getattr(method, "values", ""))), default=1e-5)


def check_method(
    method: Method,
    *,
    world_sizes: Sequence[int] = (1, 2, 3, 5),
    checks: Sequence[Check] = CHECKS,
    **settings: Unpack[Settings],
) -> None:
    """Check that a method conforms to the contract of ``hvdcompress/method.py``.

    Args:
        method: the method, with the hyper-parameters to check.
        world_sizes: numbers of ranks to try.
        checks: the checks to run (default: all).
        **settings: fields of :class:`Settings`: ``sizes`` (default: 0 to 1000 elements), ``steps`` (default: 4),
            ``ops`` (default: the array ops of the CPU drivers), ``rounding`` (default: by the number format of the
            method's ``values``), ``unbiased`` (default: the method's attribute ``unbiased``, else False), ``seed``
            (default: 0).

    Raises:
        AssertionError: a check failed; the message has the method, the check, the number of ranks and the failure.
        TypeError: ``method`` is not an instance of a method.
    """
    if not isinstance(method, Method):
        made = f"{method.__name__}()" if isinstance(method, type) else "an object such as RoundRobin()"
        raise TypeError(f"check_method() got {method!r}; pass {made}")
    settings.setdefault("rounding", rounding_of(method))
    settings.setdefault("unbiased", bool(getattr(method, "unbiased", False)))
    for world_size in world_sizes:
        for check in checks:
            try:
                check(Case(method, world_size, **settings))
            except Exception as error:
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                text = f"{method} fails {check.__name__} with {world_size} ranks: {kind}{error}"
                raise AssertionError(text) from error
