"""``hvdcompress methods`` and ``hvdcompress configs``: what methods and packaged configurations there are."""

from __future__ import annotations

from dataclasses import MISSING, fields

from rich.console import Console
from rich.markup import escape

from hvdcompress import registry
from hvdcompress.lab import packaged
from hvdcompress.lab.output.table import Column, Table
from hvdcompress.lab.packaged import Packaged
from hvdcompress.method import Method

__all__ = ["configs", "describe", "methods"]


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


def describe(id: str, console: Console) -> None:
    """Print the documentation of one method.

    Raises:
        ValueError: there is no such method.
    """
    known = registry.classes()
    if id not in known:
        raise ValueError(f"no method {id!r}{registry.suggest(id, list(known))}; there are: {', '.join(known)}")
    cls = known[id]
    console.print(f"[bold]{escape(id)}[/] — {escape(cls.paper)}\n", highlight=False)
    console.print(escape(registry.docstring(cls)), highlight=False)
    console.print("\n[bold]Hyper-parameters and defaults[/]")
    for field in fields(cls):
        console.print(f"  {field.name} = {escape(repr(field.default))}", highlight=False)
