"""Method ids -> classes, found by walking ``methods/`` and the entry points ``hvdcompress.methods``.

No list is kept by hand: the file's name is the id, and a file that is there is a method that is there.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from hvdcompress.method import Method, method

__all__ = ["FieldError", "available", "classes", "docstring", "formula", "get", "method", "suggest"]


def _methods_of(module: Any) -> list[type[Method]]:
    return [
        item
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, Method) and item.__module__ == module.__name__ and item.id
    ]


@cache
def classes() -> dict[str, type[Method]]:
    """Every method known, by id. A third party's entry point names a module with a decorated class.

    Raises:
        RuntimeError: two methods have the same id.
    """
    import hvdcompress.methods as package

    names = [f"{package.__name__}.{info.name}" for info in pkgutil.iter_modules(package.__path__)]
    names += [point.value for point in entry_points(group="hvdcompress.methods")]
    found: dict[str, type[Method]] = {}
    for name in names:
        for cls in _methods_of(importlib.import_module(name)):
            if cls.id in found:
                raise RuntimeError(f"two methods have the id {cls.id!r}: {found[cls.id]!r} and {cls!r}")
            found[cls.id] = cls
    return dict(sorted(found.items()))


def available() -> list[str]:
    """The ids of all methods, sorted.

    >>> available()[:3]
    ['bf16', 'dgc', 'fft']
    """
    return list(classes())


def suggest(word: str, known: list[str]) -> str:
    """``" (did you mean 'x'?)"`` for a near miss, else an empty string."""
    close = difflib.get_close_matches(str(word), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


class FieldError(ValueError):
    """A hyper-parameter that is unknown, of the wrong type or out of range; ``field`` is its name."""

    def __init__(self, message: str, field: str):
        super().__init__(message)
        self.field = field


def get(id: str, /, **hyperparameters: Any) -> Method:
    """The method ``id`` with these hyper-parameters, as a frozen value.

    Raises:
        ValueError: no such method, or a hyper-parameter is unknown, of the wrong type or out of range;
            the message names it.

    >>> get("topk", density=0.01).density
    0.01
    """
    known = classes()
    if not isinstance(id, str) or id not in known:
        raise FieldError(f"unknown method {id!r}{suggest(id, list(known))}; available: {', '.join(known)}", "method")
    cls = known[id]
    names = [f.name for f in fields(cls)]
    for name in hyperparameters:
        if name not in names:
            hint = suggest(name, names)
            raise FieldError(f"{id} has no hyper-parameter {name!r}{hint}; it has: {', '.join(names)}", name)
    try:
        return cls(**hyperparameters)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        given = f" {name} = {hyperparameters[name]!r}:" if name in hyperparameters else f" {name}:" if name else ""
        raise FieldError(f"{id}:{given} {first['msg'].removeprefix('Value error, ')}", name or "method") from None


def formula(cls: type[Method]) -> str:
    """The method's bytes formula, in one line: the paragraph "Bytes:" of its documentation."""
    _, _, rest = docstring(cls).partition("\nBytes:")
    return " ".join(rest.partition("\n\n")[0].split())


def docstring(cls: type[Method]) -> str:
    """The docstring of the method's file, which is its documentation."""
    return (sys.modules[cls.__module__].__doc__ or "").strip()
