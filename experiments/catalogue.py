"""``hvdcompress methods`` and ``hvdcompress configs``: what methods and packaged configurations there are."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from dataclasses import MISSING, fields
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator
from rich.console import Console
from rich.markup import escape

from experiments import packaged
from experiments.output.table import MISSING as MISSING_TEXT
from experiments.output.table import Column, Format, Table
from experiments.packaged import Packaged
from hvdcompress import registry
from hvdcompress.method import Method

__all__ = ["Option", "configs", "describe", "legal", "methods", "options"]


def _hyperparameters(cls: type[Method]) -> str:
    """A method's defaults, such as ``density=0.01 beta=1.0``, without fields that have their common default."""
    common = {field.name: field.default for field in fields(Method)}
    return " ".join(
        f"{field.name}={field.default if field.default is not MISSING else '?'}"
        for field in fields(cls)
        if common.get(field.name, MISSING) != field.default
    )


METHOD_COLUMNS: tuple[Column[tuple[str, type[Method]]], ...] = (
    Column("method", "method", lambda row: row[0], align="left"),
    Column("paper", "paper", lambda row: row[1].paper, align="left", wrap=True),
    Column("sends", "a rank sends", lambda row: row[1].sends, align="left", wrap=True),
    Column("hyperparameters", "hyper-parameters", lambda row: _hyperparameters(row[1]), align="left", wrap=True),
)
CONFIG_COLUMNS: tuple[Column[Packaged], ...] = (
    Column("name", "name", lambda one: one.name, align="left"),
    Column("kind", "kind", lambda one: one.kind, align="left"),
    Column("about", "about", lambda one: one.about, align="left", wrap=True),
)


def methods() -> Table[tuple[str, type[Method]]]:
    """All methods: id, paper, what a rank sends, hyper-parameters."""
    return Table(METHOD_COLUMNS, list(registry.classes().items()))


def configs() -> Table[Packaged]:
    """All packaged configurations: name, kind, first line of the comment."""
    return Table(CONFIG_COLUMNS, packaged.every())


class Option(NamedTuple):
    """A hyper-parameter of a method: its name, default, legal values, and what it means."""

    name: str
    default: str
    legal: str
    about: str


def legal(kind: Any) -> str:
    """The legal values of an annotated type, in words: "plain | lowpass", "0 < x ≤ 1", "true | false".

    >>> from hvdcompress.method import Count, Density, Route
    >>> legal(Density), legal(Count), legal(Route), legal(bool), legal(Density | None)
    ('0 < x ≤ 1', 'whole number ≥ 1', 'gather | scatter', 'true | false', '0 < x ≤ 1, or null')
    """
    bounds: dict[str, str] = {}
    validators = []
    inner = kind
    if get_origin(kind) is Annotated:
        inner, *notes = get_args(kind)
        for note in notes:
            if isinstance(note, AfterValidator):
                validators.append(note.func)
            for bound in getattr(note, "metadata", [note]):
                for name in ("gt", "ge", "lt", "le"):
                    if (value := getattr(bound, name, None)) is not None:
                        bounds[name] = f"{value:g}"
    if get_origin(inner) in (Union, UnionType):
        some = [legal(one) for one in get_args(inner) if one is not NoneType]
        return ", or ".join([*some, *(["null"] if NoneType in get_args(inner) else [])])
    if get_origin(inner) is Literal:
        return " | ".join(map(str, get_args(inner)))
    if inner is bool:
        return "true | false"
    for validate in validators:
        if words := inspect.getdoc(validate):
            return words.splitlines()[0].rstrip(".")
    what = {int: "whole number", float: "number", str: "text"}.get(inner, str(getattr(inner, "__name__", inner)))
    low = f"{bounds['gt']} <" if "gt" in bounds else f"{bounds['ge']} ≤" if "ge" in bounds else ""
    high = f"< {bounds['lt']}" if "lt" in bounds else f"≤ {bounds['le']}" if "le" in bounds else ""
    if low and high:
        return f"{low} x {high}" if inner is float else f"whole number, {low} x {high}"
    if low:
        return f"{what} {'>' if 'gt' in bounds else '≥'} {low.split()[0]}"
    return f"{what} {high}".strip()


def options(cls: type[Method]) -> list[Option]:
    """A method's hyper-parameters, with their documentation from the class and those above it."""
    kinds = get_type_hints(cls, include_extras=True)
    about: dict[str, str] = {}
    for ancestor in reversed(cls.__mro__):
        if ancestor is not object and issubclass(ancestor, Method):
            about |= _field_docs(ancestor)
    found = [
        Option(f.name, json.dumps(f.default, default=str), legal(kinds[f.name]), about.get(f.name, MISSING_TEXT))
        for f in fields(cls)
    ]
    own = list(inspect.get_annotations(cls))
    found.sort(key=lambda one: own.index(one.name) if one.name in own else len(own))  # its own first
    if cls.published:
        stands_for = ", ".join(f"{name}: {value}" for name, value in cls.published.items())
        found.append(Option("paper", "false", "true | false", f"The paper's settings: {stands_for}."))
    return found


def _field_docs(cls: type) -> dict[str, str]:
    """The string below each field of a class, by the field's name, in one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node, after in pairwise(body.body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            found[node.target.id] = " ".join(after.value.value.split())
    return found


OPTION_COLUMNS: tuple[Column[Option], ...] = (
    Column("name", "option", lambda row: row.name, align="left"),
    Column("default", "default", lambda row: row.default, lambda row: json.loads(row.default), align="left"),
    Column("legal", "values", lambda row: row.legal, align="left", wrap=True),
    Column("about", "meaning", lambda row: row.about, align="left", wrap=True),
)


def describe(id: str, console: Console, form: str = Format.text) -> None:
    """Print the documentation of one method; in other forms than text, the table of its options.

    Raises:
        ValueError: there is no such method.
    """
    known = registry.classes()
    if id not in known:
        raise ValueError(f"no method {id!r}{registry.suggest(id, list(known))}; there are: {', '.join(known)}")
    cls = known[id]
    table = Table(OPTION_COLUMNS, options(cls))
    if form == Format.text:
        console.print(f"[bold]{escape(id)}[/] — {escape(cls.paper)}\n", highlight=False)
        for paragraph in registry.docstring(cls).split("\n\n"):
            items = paragraph.split("\n- ")
            flows = not paragraph.startswith((" ", ">>>"))  # not an equation, not an example
            text = "\n- ".join(" ".join(item.split()) for item in items) if flows else paragraph
            console.print(f"{escape(text)}\n", highlight=False, soft_wrap=not flows)
        console.print()
    table.print(console, form)
