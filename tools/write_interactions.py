#!/usr/bin/env python3
"""Write docs/interactions.md: which tests hold that two features work together (tests/house/interactions.py).

python tools/write_interactions.py            write the page
python tools/write_interactions.py --check    exit with 1 if it is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "interactions.md"
sys.path.insert(0, str(ROOT / "tests" / "house"))

from interactions import FEATURES, HELD, REFUSED, holding  # noqa: E402

HEAD = """\
<!-- Written by tools/write_interactions.py from tests/house/interactions.py: do not edit. -->
# Which features work together

All do. Each pair below is held by the tests whose letters stand there; [promises.md](promises.md) has what each driver
promises of a feature by itself, and [reliability.md](reliability.md) what is promised when things go wrong.
"""


def letters(places: list[int]) -> str:
    """The letters of tests: A–D F."""
    runs: list[str] = []
    for place in places:
        letter = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[place]
        if place - 1 in places:
            runs[-1] = f"{runs[-1][0]}–{letter}"
        else:
            runs.append(letter)
    return " ".join(runs)


def source(test: str) -> str:
    """A test's name, as a link to its file."""
    file, _, name = test.partition("::")
    return f"[`{name}`](../{file})"


def page() -> str:
    """The page's text."""
    names = list(FEATURES)
    lines = [HEAD, "| feature | how it is asked for |", "|---|---|"]
    lines += [f"| {name} | {how} |" for name, how in FEATURES.items()]
    lines += ["", "## Pairs", "", f"| | {' | '.join(names[:-1])} |", "|---|" + ":-:|" * (len(names) - 1)]
    for row, name in enumerate(names[1:], 1):
        cells = [letters(holding((other, name))) for other in names[:row]]
        lines.append(f"| {name} | {' | '.join(cells + [''] * (len(names) - 1 - row))} |")
    lines += ["", "| test | under |", "|---|---|"]
    lines += [f"| {letters([place])}: {source(held.test)} | {held.where} |" for place, held in enumerate(HELD)]
    lines += ["", "## What is refused", ""]
    lines += [f"* {words[0].upper()}{words[1:]}: {source(test)}." for words, test in REFUSED]
    lines += ["", "What a driver refuses of its framework's own options is in [drivers.md](drivers.md).", ""]
    return "\n".join(lines)


def main() -> None:
    """Write the page, or check it."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is out of date: run tools/write_interactions.py")


if __name__ == "__main__":
    main()
