"""Count the statements of each folder: ``python -m tests.size >tests/size.json`` writes the numbers that may only fall.

A statement is an ``ast.stmt`` that is no docstring. Tests are not counted.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path

from tests import ROOT

FOLDERS = ("hvdcompress", "experiments", "examples", "docs")


def statements(source: str) -> int:
    """Return the number of statements in a file."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    return sum(not _is_text(node) for node in found)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def sizes(root: Path = ROOT) -> dict[str, int]:
    """Return the number of statements in each folder, and in each folder of the package."""
    found: Counter[str] = Counter()
    for file in (file for folder in FOLDERS for file in (root / folder).rglob("*.py")):
        top, *below = file.relative_to(root).parts[:-1]
        count = statements(file.read_text(encoding="utf-8"))
        found[top] += count
        if top == "hvdcompress" and below:
            found[f"{top}/{below[0]}"] += count
    return dict(sorted(found.items()))


if __name__ == "__main__":
    print(json.dumps(sizes(), indent=2))
