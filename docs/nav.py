"""The site's navigation: all pages in the order in which a person asks, in one place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent
NAV: dict[str, list[str]] = {
    "Start": ["quickstart", "which-method", "advise"],
    "Guides": [
        "guides/ddp",
        "guides/lightning",
        "guides/accelerate",
        "guides/transformers",
        "guides/fsdp",
        "guides/pytorch",
        "guides/tensorflow",
        "guides/keras",
        "guides/mpi",
        "guides/migrate",
        "guides/checkpoints",
        "reliability",
        "guides/plans",
        "guides/speed",
        "momentum",
    ],
    "Methods": ["methods", "methods/README", "methods/*"],
    "Evidence": [
        "papers/README",
        "papers/*",
        "results",
        "quickstart-table",
        "one-exchange",
        "formats",
        "bench",
        "bench/*",
        "scale",
        "codec-benchmark",
        "ops-benchmark",
    ],
    "Run and extend": ["launch", "cli", "guides/new-method", "guides/new-driver"],
    "Reference": [
        "reference",
        "sharp-bits",
        "stability",
        "promises",
        "architecture",
        "drivers",
        "tensorflow",
        "backends",
        "decisions",
        "changelog",
    ],
}
#: files of docs/ that are parts of generated pages, and no pages
PARTS = {"templates/**/*", "bench_notes", "reliability_notes", "scale_notes"}


def pages() -> dict[str, dict[str, list[str]]]:
    """The pages that there are: by caption, each with those below it, which the pattern after it finds.

    Raises:
        FileNotFoundError: a page is absent.
    """
    found: dict[str, dict[str, list[str]]] = {}
    listed = {name for names in NAV.values() for name in names}
    for caption, names in NAV.items():
        here = found[caption] = {}
        for name in names:
            if name.endswith("/*"):
                here[list(here)[-1]] = sorted(set(_folder(name[:-2])) - listed)
            elif (DOCS / f"{name}.md").exists():
                here[name] = []
            else:
                raise FileNotFoundError(f"docs/nav.py lists {name}, and docs/{name}.md is not there")
    return found


def every() -> set[str]:
    """All pages, the first one included."""
    return {"index"} | {name for tree in pages().values() for page, below in tree.items() for name in (page, *below)}


def _folder(name: str) -> Iterator[str]:
    for file in (DOCS / name).glob("*.md"):
        yield f"{name}/{file.stem}"


def toctree(page: str) -> str:
    """What goes to the end of a page, in MyST's Markdown: the captions' trees, or the pages below it."""
    if page == "index":
        return "\n\n".join(_tree(list(tree), caption) for caption, tree in pages().items())
    below = next((tree[page] for tree in pages().values() if tree.get(page)), [])
    return _tree([f"/{name}" for name in below]) if below else ""


def _tree(names: list[str], caption: str = "") -> str:
    return "\n".join(["```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), "", *names, "```"])
