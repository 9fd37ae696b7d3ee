"""The feature budget: no folder has more statements than tests/size.json says; the numbers follow when it shrinks."""

from __future__ import annotations

import json
from pathlib import Path

from tests import ROOT
from tests.size import sizes, statements

COMMAND = "python -m tests.size >tests/size.json"


def complaints(counted: dict[str, int], allowed: dict[str, int]) -> list[str]:
    """Return a sentence for each folder whose number is wrong."""
    found = [f"{name} is new or gone" for name in sorted(counted.keys() ^ allowed.keys())]
    for name in sorted(counted.keys() & allowed.keys()):
        count, most = counted[name], allowed[name]
        if count > most:
            found.append(f"{name} has {count} statements, {count - most} too many")
        elif count < 0.97 * most:
            found.append(f"{name} has {count} statements, {most - count} fewer than its number: lower it")
    return found


def test_no_folder_grows_and_the_numbers_follow() -> None:
    """CONTRIBUTING.md, "Feature budget", says when a number may rise."""
    allowed = json.loads((ROOT / "tests" / "size.json").read_text())
    assert not complaints(sizes(), allowed), f"see CONTRIBUTING.md, Feature budget; {COMMAND}"


def test_a_folder_that_grows_or_shrinks_is_found() -> None:
    assert complaints({"a": 101}, {"a": 100}) == ["a has 101 statements, 1 too many"]
    assert complaints({"a": 97}, {"a": 100}) == []
    assert complaints({"a": 96}, {"a": 100}) == ["a has 96 statements, 4 fewer than its number: lower it"]
    assert complaints({"b": 1}, {"a": 1}) == ["a is new or gone", "b is new or gone"]


def test_what_is_counted(tmp_path: Path) -> None:
    assert statements('"""Text."""\ndef f():\n    """Text."""\n    x = 1; return x\n') == 3
    inner = tmp_path / "hvdcompress" / "ops" / "numba" / "one.py"
    inner.parent.mkdir(parents=True)
    inner.write_text("x = 1\n")
    (tmp_path / "hvdcompress" / "two.py").write_text("if x:\n    y = 1\n")
    assert sizes(tmp_path) == {"hvdcompress": 3, "hvdcompress/ops": 1}
