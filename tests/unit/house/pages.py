"""Checks of documentation pages: links, examples, public names. Sources are parsed, so no framework is needed."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OURS = re.compile(rf"{re.escape(PROJECT['urls']['Repository'])}/(?:blob|raw)/main/")
FRAGMENT = "<!-- a fragment:"  #: begins the line before a code block that is not complete


def pages() -> list[Path]:
    """Return every page of the documentation."""
    docs = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "templates" not in page.parts]
    return [*sorted(ROOT.glob("*.md")), *docs]


# -- links -----------------------------------------------------------------------------------------


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE):
        words = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).replace("`", "").strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", without_code(page))


def dead_links(page: Path) -> Iterator[str]:
    """Iterate over links to files of this repository, and to headings, that do not exist."""
    for target in links(page):
        in_repository = OURS.sub("", target)
        if re.match("[a-z]+:", in_repository):
            continue
        name, _, anchor = in_repository.partition("#")
        folder = page.parent if in_repository == target else ROOT
        file = folder / name if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file.resolve())):
            yield f"{page.name}: {target}"


# -- examples --------------------------------------------------------------------------------------


def blocks(text: str, language: str) -> list[tuple[str, bool]]:
    """Return the code blocks in a language, each with whether it is marked as a fragment."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    before = [(match[1], text[: match.start()].rstrip().rpartition("\n")[2]) for match in found]
    return [(code, line.startswith(FRAGMENT)) for code, line in before]


def run_blocks(page: str, names: dict[str, Any]) -> None:
    """Run the Python blocks of a page one after another, also fragments, with these names and those that they make."""
    for code, _ in blocks((ROOT / page).read_text(encoding="utf-8"), "python"):
        exec(compile(code, page, "exec", dont_inherit=True), names)


def imports_of_diffs(text: str) -> Iterator[str]:
    """Iterate over the imports that the diffs of a page add."""
    for diff, _ in blocks(text, "diff"):
        yield from (line[1:] for line in diff.splitlines() if re.match(r"\+(from|import) ", line))


def wrong_names(code: str) -> Iterator[str]:
    """Iterate over imports from hvdcompress of names that do not exist."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hvdcompress":
            for alias in node.names:
                in_module = alias.name in defined(source_of(str(node.module)))
                if not in_module and source_of(f"{node.module}.{alias.name}") is None:
                    yield f"{node.module} has no {alias.name}"


# -- public names ----------------------------------------------------------------------------------


def source_of(module: str) -> Path | None:
    """Return the file of a module of the package."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.exists()), None)


@cache
def defined(file: Path | None) -> dict[str, ast.stmt]:
    """Return the names at the top of a file, with the statement that makes each."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body if file else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def public(module: str) -> list[str]:
    """Return a module's public names: ``__all__``, or else the classes and functions that it defines."""
    names = defined(source_of(module))
    listed: Any = names.get("__all__")
    if listed is not None:
        return [name for name in ast.literal_eval(listed.value) if not name.startswith("__")]
    return [
        name
        for name, node in names.items()
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not name.startswith("_")
    ]


def definition(module: str, name: str) -> ast.stmt | None:
    """Return the statement that makes a name, through imports within the package."""
    node = defined(source_of(module)).get(name)
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hvdcompress"):
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        return definition(str(node.module), original)
    return node


def undocumented(modules: Iterable[str], reference: str) -> Iterator[str]:
    """Iterate over public names without a docstring, and those that the reference lacks."""
    for module in modules:
        whole = re.search(rf"automodule:: {re.escape(module)}\n   :members:", reference)
        for name in public(module):
            node = definition(module, name)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not ast.get_docstring(node):
                yield f"{module}.{name} has no docstring"
            if not whole and not re.search(rf"\b{re.escape(module)}\.{re.escape(name)}\b", reference):
                yield f"docs/reference.md lacks {module}.{name}"
