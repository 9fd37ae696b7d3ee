"""The registry: method ids and their classes, found in ``methods/`` and in entry points of ``hvdcompress.methods``.

There is no list to maintain: every file in ``methods/`` is a method, and its name is the id.
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
    """Return every known method's class, by id.

    An entry point of a third party names a module with a decorated class.

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
                raise RuntimeError(
                    f"two methods have the id {cls.id!r}: {found[cls.id]!r} and {cls!r}; rename one of their modules"
                )
            found[cls.id] = cls
    return dict(sorted(found.items()))


def available() -> list[str]:
    """Return the ids of all methods, sorted.

    >>> available()[:3]
    ['acpsgd', 'bf16', 'dgc']
    """
    return list(classes())


def suggest(word: str, known: list[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` if ``word`` resembles one of ``known``, else an empty string."""
    close = difflib.get_close_matches(str(word), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


class FieldError(ValueError):
    """A hyper-parameter is unknown, of the wrong type or out of range.

    Args:
        message: the error message.
        field: the name of the hyper-parameter, or "method"; kept as an attribute.
    """

    def __init__(self, message: str, field: str):
        super().__init__(message)
        self.field = field


def get(id: str, /, **hyperparameters: Any) -> Method:
    """Return a method.

    Args:
        id: the method's id, one of :func:`available`.
        **hyperparameters: its hyper-parameters; those not given have their defaults.

    Returns:
        The method, as a frozen value.

    Raises:
        ValueError: there is no such method, or a hyper-parameter is unknown, of the wrong type or out of range. The
            message names it.

    >>> get("topk", density=0.01).density
    0.01
    """
    known = classes()
    if not isinstance(id, str) or id not in known:
        raise FieldError(f"unknown method {id!r}{suggest(id, list(known))}; available: {', '.join(known)}", "method")
    cls = known[id]
    hyperparameters = written_out(cls, hyperparameters)
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


def written_out(cls: type[Method], given: dict[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters with ``paper: true`` replaced by what it stands for, :attr:`Method.published`.

    Args:
        cls: the method's class.
        given: hyper-parameters; a method whose paper's settings are its defaults has no "paper".

    Raises:
        FieldError: "paper" is not a boolean, or one of the paper's settings is given with another value.
    """
    if "paper" not in given or not cls.published:
        return given
    rest = {name: value for name, value in given.items() if name != "paper"}
    if not isinstance(given["paper"], bool):
        raise FieldError(f"{cls.id}: paper = {given['paper']!r}: must be true or false", "paper")
    if not given["paper"]:
        return rest
    for name, value in cls.published.items():
        if rest.get(name, value) != value:
            raise FieldError(
                f"{cls.id}: {name} = {rest[name]!r}: paper: true sets {name} to {value!r}; leave one of the two out",
                name,
            )
    return {**rest, **cls.published}


def formula(cls: type[Method]) -> str:
    """Return the method's bytes formula in one line: the paragraph "Bytes:" of its docstring."""
    _, _, rest = docstring(cls).partition("\nBytes:")
    return " ".join(rest.partition("\n\n")[0].split())


def docstring(cls: type[Method]) -> str:
    """Return the method's documentation: the docstring of its file."""
    return (sys.modules[cls.__module__].__doc__ or "").strip()
