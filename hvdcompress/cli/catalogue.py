"""``hvdcompress methods`` and ``configs``: documentation and plans, made from the methods' classes when asked for."""

from __future__ import annotations

import json
import textwrap
from dataclasses import MISSING, fields
from typing import Any

import yaml
from rich.markup import escape

from hvdcompress import registry
from hvdcompress.cli.console import console_of, print_table
from hvdcompress.method import Method
from hvdcompress.plan.reading import AUTO

WIDTH = 100  #: characters of a line of a configuration
COLUMN = 34  #: characters of the column of legal values


def options(cls: type[Method]) -> list[registry.Option]:
    """Return a method's hyper-parameters, with the legal values as plain text instead of Markdown."""
    return [one._replace(values=one.values.replace("`", "")) for one in registry.options(cls)]


def as_dict(id: str) -> dict[str, Any]:
    """Return everything about a method that a program may ask for."""
    cls = _class_of(id)
    named = {"id": id, "paper": cls.paper, "sends": cls.sends, "published": cls.published}
    return {**named, "options": [one._asdict() for one in options(cls)], "documentation": registry.docstring(cls)}


def print_methods() -> None:
    """Print a table of all methods."""
    common, rows = {field.name: field.default for field in fields(Method)}, []
    for id, cls in registry.classes().items():
        own = [f"{f.name}={f.default}" for f in fields(cls) if common.get(f.name, MISSING) != f.default]
        rows.append({"method": id, "paper": cls.paper, "a rank sends": cls.sends, "defaults": " ".join(own)})
    print_table(rows)
    console_of().print(
        "\n[dim]n elements, k kept, p ranks. About one method: hvdcompress methods scalecom[/]", highlight=False
    )


def describe(id: str) -> None:
    """Print the documentation of one method, and a table of its options."""
    cls, console = _class_of(id), console_of()
    console.print(f"[bold]{escape(id)}[/] — {escape(cls.paper)}\n", highlight=False)
    for paragraph in registry.docstring(cls).split("\n\n"):
        is_text = not paragraph.startswith((" ", ">>>"))  # neither an equation nor an example
        text = "\n- ".join(" ".join(item.split()) for item in paragraph.split("\n- ")) if is_text else paragraph
        console.print(f"{escape(text)}\n", highlight=False, soft_wrap=not is_text)
    print_table(
        [
            {**one._asdict(), "default": json.dumps(one.default), "values": textwrap.fill(one.values, COLUMN)}
            for one in options(cls)
        ]
    )
    if cls.published:
        stands_for = ", ".join(f"{name}: {value}" for name, value in cls.published.items())
        console.print(f"\npaper: true stands for the paper's settings: {escape(stands_for)}", highlight=False)


def config(id: str) -> str:
    """Return a plan as YAML, for a method or "auto": every option with its meaning, legal values and default."""
    if id == "auto":
        return f"# auto stands for {yaml.safe_dump(AUTO, default_flow_style=True, width=WIDTH)}method: auto\n"
    cls = _class_of(id)
    parts = [f"# {id}: {cls.paper}\n{_comment(f'A rank sends {cls.sends}.')}\n", f"method: {id}\n"]
    for one in options(cls):
        comments = [one.about, *([f"Values: {one.values}"] if one.values else [])]
        line = yaml.safe_dump({one.name: one.default}, allow_unicode=True)
        parts.append("\n".join([*map(_comment, comments), line]))
    return "\n".join(parts)


def _comment(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _class_of(id: str) -> type[Method]:
    known = registry.classes()
    if id not in known:
        raise ValueError(f"unknown method {id!r}{registry.suggest(id, list(known))}; available: {', '.join(known)}")
    return known[id]
