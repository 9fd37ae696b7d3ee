"""What a documentation page is checked for: links, examples, public names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests import ROOT

PACKAGE = ROOT / "hvdcompress"
FRAGMENT = "<!-- a fragment:"


def pages() -> list[Path]:
    """Every page of the documentation."""
    docs = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "templates" not in page.parts]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *docs]


# -- links -----------------------------------------------------------------------------------------


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        words = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).replace("`", "").strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


def dead_links(page: Path) -> Iterator[str]:
    """Links to files and headings that are not there."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists():
            yield f"{page.name}: {target} is not there"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.resolve()):
            yield f"{page.name}: {target}: no such heading"


# -- examples ------------------------------------------------------------------------------------------


def blocks(text: str, language: str) -> list[tuple[str, bool]]:
    """Code in a language, each with whether the line before it says that it is a fragment."""
    found = []
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.S | re.M):
        before = text[: match.start()].rstrip().rpartition("\n")[2]
        found.append((match[1], before.startswith(FRAGMENT)))
    return found


def wrong_names(code: str) -> Iterator[str]:
    """Imports from hvdcompress of what it has not: read from the sources, so no framework is needed."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hvdcompress":
            file = source_of(str(node.module))
            if file is None:
                yield f"no module {node.module}"
                continue
            for alias in node.names:
                if alias.name not in defined(file) and source_of(f"{node.module}.{alias.name}") is None:
                    yield f"{node.module} has no {alias.name}"


# -- public names ----------------------------------------------------------------------------------------


def source_of(module: str) -> Path | None:
    """The file of a module of the package."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.exists()), None)


@cache
def defined(file: Path) -> dict[str, ast.stmt]:
    """Names at the top of a file, with the statement that makes each."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def public(module: str) -> list[str]:
    """A module's public names: ``__all__``, or else the classes and functions that it defines."""
    file = source_of(module)
    assert file, module
    listed: Any = defined(file).get("__all__")
    if listed is not None:
        return [name for name in ast.literal_eval(listed.value) if not name.startswith("__")]
    made = (ast.FunctionDef, ast.ClassDef)
    return [name for name, node in defined(file).items() if isinstance(node, made) and not name.startswith("_")]


def definition(module: str, name: str) -> ast.stmt | None:
    """The statement that makes a name, through imports within the package."""
    file = source_of(module)
    node = defined(file).get(name) if file else None
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hvdcompress"):
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        return definition(str(node.module), original)
    return node


def undocumented(modules: Iterable[str], reference: str) -> Iterator[str]:
    """Public names without a docstring, and those that the reference lacks."""
    for module in modules:
        whole = re.search(rf"automodule:: {re.escape(module)}\n   :members:", reference)
        for name in public(module):
            node = definition(module, name)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not ast.get_docstring(node):
                yield f"{module}.{name} has no docstring"
            if not whole and not re.search(rf"\b{re.escape(module)}\.{re.escape(name)}\b", reference):
                yield f"docs/reference.md lacks {module}.{name}"
