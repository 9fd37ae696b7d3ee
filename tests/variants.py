"""Settings of a method that together use every value of its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hvdcompress import registry
from hvdcompress.method import Density, Method, Values

VALUES = ("fp32", "fp16", "bf16", "qsgd4", "rangefloat8", "qsgd2", "rangefloat11m5")  #: number formats to try


def variants(cls: type[Method], density: float = 0.06) -> dict[str, dict[str, Any]]:
    """Return settings that together use every value of a method's options at least once.

    The values follow from the types of the fields: each choice, each flag, the densities 1, 0.34 and 1e-9, and feedback
    none, plain and low-pass with each number format. Combinations that the method refuses are left out.

    Args:
        cls: the method's class.
        density: the default density, for methods that have this field.

    Returns:
        Settings by a readable name, such as "density=0.06,values=fp16".
    """
    hints = get_type_hints(cls, include_extras=True)
    names = [f.name for f in fields(cls) if f.name not in ("beta", "momentum", "optimizer_momentum")]
    base = {"density": density} if "density" in names else {}
    wanted: list[dict[str, Any]] = [{}, base, {**base, "feedback": "lowpass", "beta": 0.3}]
    wanted += [{**base, **example} for example in cls.examples]
    for name in names:
        options: Sequence[Any] = ()
        if get_origin(hints[name]) is Literal:
            options = get_args(hints[name])
        elif hints[name] is bool:
            options = (False, True)
        elif hints[name] == Values:
            options = VALUES
        elif name == "density" and hints[name] == Density:
            options = (1.0, 0.34, 1e-9)
        wanted += [{**base, name: option} for option in options]
        if name not in ("feedback", "values"):
            wanted += [{**base, name: option, "feedback": "none"} for option in options]
        if name == "values":
            wanted += [{**base, name: option, "feedback": "lowpass", "beta": 0.3} for option in ("fp32", "fp16")]
    found: dict[Method, dict[str, Any]] = {}
    for settings in wanted:
        try:
            found.setdefault(cls(**registry.expand_paper_settings(cls, settings)), settings)
        except ValueError:  # pydantic's ValidationError is one
            continue
    return {",".join(f"{k}={v}" for k, v in s.items()) or "defaults": s for s in found.values()}
