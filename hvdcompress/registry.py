"""Registry of the compression methods: maps method ids to classes.

The methods are the files in ``methods/``, whose names are the ids, and the modules that packages name in the entry
point group ``hvdcompress.methods``. A module is imported on first use. ``@method("my_id")`` registers further classes.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import pkgutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from itertools import pairwise
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from hvdcompress.method import REGISTERED, Method, method

__all__ = [
    "FieldError", "Option", "available", "classes", "docstring", "field_docs", "get_method", "legal",
    "method", "options", "suggest",
]  # fmt: skip


class Classes(Mapping[str, type[Method]]):
    """Mapping from method id to class, sorted by id. Modules are imported on first access.

    Args:
        modules: {method id: name of the module that defines the method}.
    """

    def __init__(self, modules: Mapping[str, str]):
        self._modules = modules

    def __getitem__(self, id: str) -> type[Method]:
        return REGISTERED[id] if id in REGISTERED else _class_in(self._modules[id])

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._modules, *REGISTERED}))

    def __len__(self) -> int:
        return len({*self._modules, *REGISTERED})


@cache
def _class_in(name: str) -> type[Method]:
    """Import a module and return the method class that it defines."""
    module = importlib.import_module(name)
    found = [
        item
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, Method) and item.__module__ == name and item.id
    ]
    if len(found) != 1:
        raise RuntimeError(f"module {name} must define exactly one class decorated with @method; found {found}")
    return found[0]


@cache
def classes() -> Classes:
    """Return the mapping of all known methods. It is created once per process.

    Raises:
        RuntimeError: two methods have the same id.
    """
    import hvdcompress.methods as package

    names = [f"{package.__name__}.{info.name}" for info in pkgutil.iter_modules(package.__path__)]
    names += [point.value for point in entry_points(group="hvdcompress.methods")]
    modules: dict[str, str] = {}
    for name in names:
        id = name.rpartition(".")[2]
        if id in modules:
            raise RuntimeError(f"method id {id!r} is defined by {modules[id]} and {name}; rename one of them")
        modules[id] = name
    return Classes(modules)


def available() -> list[str]:
    """Return the ids of all methods, sorted.

    >>> available()[:3]
    ['acpsgd', 'arctopk', 'bf16']
    """
    return list(classes())


def suggest(word: str, known: list[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` if ``word`` resembles or is a word of one of ``known``, or an empty string."""
    close = difflib.get_close_matches(str(word), known, n=1) or [each for each in known if word in each.split("_")]
    return f" (did you mean {close[0]!r}?)" if close else ""


class FieldError(ValueError):
    """A hyper-parameter is unknown, of the wrong type or out of range.

    Args:
        message: the error message.
        field: name of the wrong hyper-parameter, or "method" if the id is unknown. Stored as an attribute.
    """

    def __init__(self, message: str, field: str):
        super().__init__(message)
        self.field = field


def get_method(id: str, /, **hyperparameters: Any) -> Method:
    """Create a method from its id and hyper-parameters.

    Args:
        id: the method's id; :func:`available` lists all ids.
        **hyperparameters: values by name. Hyper-parameters that are not given have their defaults.

    Returns:
        The method, a frozen dataclass instance.

    Raises:
        ValueError: the id is unknown, or a hyper-parameter is unknown, of the wrong type or out of range. The
            message names it.

    >>> get_method("topk", density=0.01).density
    0.01
    """
    known = classes()
    if not isinstance(id, str) or id not in known:
        raise FieldError(
            f"unknown method {id!r}{suggest(id, list(known))}; available: {', '.join(known)}"
            ". For a method of your own, import its file first; the name of a plan's file ends in .yaml",
            "method",
        )
    cls = known[id]
    hyperparameters = expand_paper_settings(cls, hyperparameters)
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
        # Errors of __post_init__ concern several fields, so they have no location.
        where = f" {name}:" if name else ""
        if name in hyperparameters:
            where = f" {name} = {hyperparameters[name]!r}:"
        raise FieldError(f"{id}:{where} {first['msg'].removeprefix('Value error, ')}", name or "method") from None


def expand_paper_settings(cls: type[Method], given: dict[str, Any]) -> dict[str, Any]:
    """Replace ``paper: true`` in hyper-parameters by the settings in :attr:`Method.published`.

    Args:
        cls: the method's class.
        given: hyper-parameters. Methods without published settings have no key "paper".

    Returns:
        Hyper-parameters without the key "paper".

    Raises:
        FieldError: "paper" is not a boolean, or a given hyper-parameter contradicts the paper's setting.
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
                f"{cls.id}: {name} = {rest[name]!r} contradicts paper: true, which sets {name} to {value!r}; "
                "remove one of the two",
                name,
            )
    return {**rest, **cls.published}


def docstring(cls: type[Method]) -> str:
    """Return the documentation of a method: the docstring of its module."""
    return (sys.modules[cls.__module__].__doc__ or "").strip()


def field_docs(cls: type) -> dict[str, str]:
    """Return {field: the docstring below it in the class or in a base class}, each in one line."""
    found = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        for node, after in pairwise(getattr(body, "body", [])):
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Constant):
                found[ast.unparse(node.target)] = " ".join(str(text.value).split())
    return found


class Option(NamedTuple):
    """A hyper-parameter of a method: its name, its default, the :func:`legal` values, and what it means."""

    name: str
    default: Any
    values: str
    about: str


def options(cls: type[Method]) -> list[Option]:
    """Return a method's hyper-parameters: its own first, then those that all methods have."""
    schemas = TypeAdapter(cls).json_schema()["properties"]
    about = field_docs(cls)
    found = [Option(f.name, f.default, legal(schemas[f.name]), about.get(f.name, "")) for f in fields(cls)]
    own = [name for base in cls.__mro__ if base not in (Method, object) for name in inspect.get_annotations(base)]
    return sorted(found, key=lambda one: own.index(one.name) if one.name in own else len(own))


#: by the key of a field's JSON schema. The long keys are those of fields without validators of their own
BOUNDS = {
    "gt": ">", "exclusiveMinimum": ">", "ge": "≥", "minimum": "≥",
    "lt": "<", "exclusiveMaximum": "<", "le": "≤", "maximum": "≤",
}  # fmt: skip


def legal(schema: Mapping[str, Any]) -> str:
    """Return the values that a field's JSON schema allows, in Markdown; empty for any text.

    >>> legal({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]})
    'integer, ≥ 1; or `null`'
    """
    if "anyOf" in schema:
        return "; or ".join(map(legal, schema["anyOf"]))
    if "description" in schema:
        return schema["description"]
    if "enum" in schema or "const" in schema:  # a Literal; of one value, "const"
        return " | ".join(f"`{choice}`" for choice in schema.get("enum", [schema.get("const")]))
    bounds = " and ".join(f"{sign} {schema[key]:g}" for key, sign in BOUNDS.items() if key in schema)
    kind = {"boolean": "`true` | `false`", "null": "`null`", "string": ""}.get(schema["type"], schema["type"])
    return f"{kind}, {bounds}" if bounds else kind
