"""The site's navigation: all pages in the order in which a person asks, in one place."""

from __future__ import annotations

from fnmatch import fnmatch

NAV: dict[str, list[str]] = {
    "Start": ["quickstart", "which-method", "advise"],
    "Guides": [
        *(f"guides/{name}" for name in ("ddp", "pytorch", "tensorflow", "keras", "keras-torch", "fsdp", "mpi")),
        *(f"guides/{name}" for name in ("lightning", "accelerate", "transformers")),
        *(
            f"guides/{name}"
            for name in ("nodes", "local-steps", "checkpoints", "speed", "plans", "migrate", "new-method", "new-driver")
        ),
        "launch",
        "cli",
    ],
    "Methods": ["methods", "momentum"],
    "Evidence": ["results", "momentum-results", "bench", "one-exchange", "scale", "papers/README", "reliability"],
    "Reference": [
        "reference",
        "sharp-bits",
        "versions",
        "drivers",
        "backends",
        "architecture",
        "decisions",
        "changelog",
    ],
}
#: page -> patterns of the pages below it
BELOW = {"methods": ["methods/*"], "papers/README": ["papers/[!R]*"]}


def listed(page: str) -> bool:
    """Return whether a page is in the navigation."""
    patterns = [name for names in (*NAV.values(), *BELOW.values()) for name in names]
    return page == "index" or page.endswith("_notes") or any(fnmatch(page, pattern) for pattern in patterns)


def toctree(page: str) -> str:
    """Return what goes to the end of a page, in MyST's Markdown: the captions' trees, or the pages below it."""
    if page == "index":
        return "\n\n".join(_tree(names, caption) for caption, names in NAV.items())
    return _tree([f"/{name}" for name in BELOW[page]]) if page in BELOW else ""


def _tree(names: list[str], caption: str = "") -> str:
    options = [":hidden:", ":glob:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["```{toctree}", *options, "", *names, "```"])
