"""The site's navigation: all pages in the order in which a person asks, in one place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent
NAV: dict[str, list[str]] = {
    "Start": ["quickstart", "advise"],
    "Guides": [
        "guides/pytorch",
        "ddp",
        "tensorflow",
        "guides/mpi",
        "guides/checkpoints",
        "reliability",
        "guides/plans",
        "launch",
    ],
    "Methods": ["methods/README", "methods/*", "guides/new-method"],
    "Evidence": [
        "results",
        "quickstart-table",
        "one-exchange",
        "bench",
        "bench/*",
        "scale",
        "codec-benchmark",
        "ops-benchmark",
        "papers/README",
        "papers/*",
        "formats",
    ],
    "Reference": ["reference", "cli", "sharp-bits", "promises", "architecture", "changelog"],
}
#: pages that may be absent: the navigation leaves them out until they are there
OPTIONAL = {"advise", "ddp", "reliability"}
#: files of docs/ that are parts of generated pages, and no pages
PARTS = {"bench_notes", "scale_notes"}


def pages() -> dict[str, list[str]]:
    """The pages that there are, by caption, patterns written out.

    Raises:
        FileNotFoundError: a page that is not optional is absent.
    """
    found: dict[str, list[str]] = {}
    listed = {name for names in NAV.values() for name in names}
    for caption, names in NAV.items():
        found[caption] = []
        for name in names:
            if name.endswith("/*"):
                found[caption] += sorted(set(_folder(name[:-2])) - listed)
            elif (DOCS / f"{name}.md").exists():
                found[caption].append(name)
            elif name not in OPTIONAL:
                raise FileNotFoundError(f"docs/nav.py lists {name}, and docs/{name}.md is not there")
    return found


def _folder(name: str) -> Iterator[str]:
    for file in (DOCS / name).glob("*.md"):
        yield f"{name}/{file.stem}"


def toctrees() -> str:
    """The navigation as Sphinx's, in MyST's Markdown; what a pattern found lies below the page before it."""
    return "\n\n".join(
        "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```"])
        for caption, names in pages().items()
    )
