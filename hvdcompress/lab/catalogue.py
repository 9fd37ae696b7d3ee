"""What ``hvdcompress methods`` prints."""

from __future__ import annotations

from dataclasses import MISSING, fields

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdcompress import registry
from hvdcompress.method import Method


def _hyperparameters(cls: type[Method]) -> str:
    """``density=0.01 beta=1.0``; what every method has, at its common default, is left out."""
    common = {field.name: field.default for field in fields(Method)}
    return " ".join(
        f"{field.name}={field.default if field.default is not MISSING else '?'}"
        for field in fields(cls)
        if common.get(field.name, MISSING) != field.default
    )


def show(id: str | None, console: Console) -> None:
    """Print all methods as a table, or the documentation of one.

    Raises:
        ValueError: there is no such method.
    """
    known = registry.classes()
    if id is not None:
        if id not in known:
            raise ValueError(f"no method {id!r}{registry.suggest(id, list(known))}; there are: {', '.join(known)}")
        cls = known[id]
        console.print(f"[bold]{escape(id)}[/] — {escape(cls.paper)}\n", highlight=False)
        console.print(escape(registry.docstring(cls)), highlight=False)
        console.print("\n[bold]Hyper-parameters and defaults[/]")
        for field in fields(cls):
            console.print(f"  {field.name} = {escape(repr(field.default))}", highlight=False)
        return
    table = Table(box=None, header_style="bold", pad_edge=False, show_lines=False)
    for title in ("method", "paper", "a rank sends", "hyper-parameters"):
        table.add_column(title, overflow="fold")
    for name, cls in known.items():
        table.add_row(f"[bold]{name}[/]", *map(escape, (cls.paper, cls.sends, _hyperparameters(cls))))
    console.print(table)
    console.print("\n[dim]n elements, k kept, p ranks. All about one: hvdcompress methods scalecom[/]", highlight=False)
