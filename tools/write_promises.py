#!/usr/bin/env python3
"""Write docs/promises.md: what each driver promises, from the tests that check it (tests/promises).

python tools/write_promises.py            write the page
python tools/write_promises.py --check    exit with 1 if it is out of date
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "promises.md"
sys.path.insert(0, str(ROOT))

from tests.promises import DRIVERS, EXCEPTIONS, PROMISES  # noqa: E402
from tests.promises.table import SUBSETS  # noqa: E402

HEAD = """\
<!-- Written by tools/write_promises.py from tests/promises: do not edit. -->
# What every driver promises

Each row is one test, written once and run behind every driver: ✓ is promised and tested, a number leads to the reason
why it is not. The loopback is the yardstick of the other drivers, and is itself held against the reference backend.
"""


def launches(driver: str) -> str:
    """How a driver's ranks are started for the tests, in words."""
    words = {
        "threads": "{} ranks in one process",
        "mpi": "{} ranks by `horovodrun` over MPI",
        "gloo": "{} ranks over Gloo",
        "mpirun": "{} ranks by `mpirun`",
        "torchrun": "{} ranks by `torchrun` over Gloo",
        "alone": "alone",
    }
    found: dict[str, list[str]] = {}
    for launch in DRIVERS[driver].launches:
        kind, _, world_size = launch.partition("-")
        found.setdefault(kind, []).append(world_size)
        words[kind] += " (some of the promises)" if (driver, launch) in SUBSETS else ""
    return "; ".join(words[kind].format(" or ".join(world_sizes)) for kind, world_sizes in found.items())


def page() -> str:
    """The page's text."""
    reasons: list[str] = []

    def cell(driver: str, name: str) -> str:
        exempt = EXCEPTIONS.get((driver, name))
        if exempt is None:
            return "✓"
        words = exempt.reason + (" (refused by name)" if exempt.refused else "")
        if words not in reasons:
            reasons.append(words)
        return f"[{reasons.index(words) + 1}](#where-it-is-not)"

    lines = [HEAD, "| driver | tested with |", "|---|---|"]
    lines += [f"| {entry.title} | {launches(driver)} |" for driver, entry in DRIVERS.items()]
    for subject, promises in groupby(PROMISES.values(), key=lambda promise: promise.subject):
        titles = " | ".join(entry.title for entry in DRIVERS.values())
        lines += ["", f"## {subject}", "", f"| promise | {titles} |", "|---|" + ":-:|" * len(DRIVERS)]
        for promise in promises:
            cells = " | ".join(cell(driver, promise.name) for driver in DRIVERS)
            lines.append(f"| {promise.text.replace('``', '`')} | {cells} |")
    lines += ["", "## Where it is not", ""]
    lines += [f"{number}. {words[0].upper()}{words[1:]}." for number, words in enumerate(reasons, 1)]
    return "\n".join(lines) + "\n"


def main() -> None:
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is out of date: run tools/write_promises.py")


if __name__ == "__main__":
    main()
