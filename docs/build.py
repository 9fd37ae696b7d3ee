"""Build the generated pages of the documentation from published results, the examples and the registry.

    python docs/build.py [PAGE …]    write all pages, or some, such as ``bench`` or ``papers/fft``
    python docs/build.py --check     write nothing; fail if a file would change

The template ``docs/templates/PAGE.md`` makes ``docs/PAGE.md``; ``docs/templates/README.md`` makes the README of the
repository. A template is Markdown with Jinja: the words are in it, and the numbers come from variables.

An area of the experiments adds a page in three steps:

1. Write ``docs/templates/PAGE.md``. Start it with the heading.
2. Write a function that takes the page's name and returns the variables of the template, a dictionary. It reads
   ``experiments/results/*.json`` (``experiments.report.results.load``), and measures nothing.
3. Name the function in ``AREAS``. It is imported only when one of its pages is built.

Variables may be numbers, strings, lists, data frames (``{{ frame | table }}``,
``{{ frame | table(time=seconds_of, sent=num_bytes) }}``) or pictures. A picture is a matplotlib figure of
``report.plots``; it is written to ``docs/PAGE-VARIABLE.svg``, and the template sees the path relative to the page:
``![Time against ranks]({{ ring }})``. Those of ``AS_PNG`` are also written as PNG.

Package indexes show README, too, without the repository's files. Its links are relative in the template and absolute in
the page; its pictures must be PNG.

All templates may use ``table``, the formats of ``experiments.report.numbers`` as filters and functions, and:

* ``raw("bench-resnet50")``: the link target of a result's JSON file;
* ``made("bench-resnet50")``: its command, commit, date and machine, in one line;
* ``diff("ddp")``: the lines that differ between ``examples/ddp_plain.py`` and ``examples/ddp_compressed.py``;
* ``methods``: the classes of all methods, and ``source(id)``: the link target of a method's file.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import imread

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
TEMPLATES = DOCS / "templates"
sys.path[:0] = [str(ROOT), str(DOCS)]

from experiments.papers.command import PAPERS  # noqa: E402
from experiments.report import numbers, plots, results, tables  # noqa: E402
from hvdcompress import registry  # noqa: E402

#: Page -> "module:function", which takes the page's name and returns the template's variables.
AREAS: dict[str, str] = {
    "README": "pages:readme",
    "which-method": "pages:which_method",
    "momentum": "pages:momentum",
    "momentum-results": "pages:momentum_results",
    "results": "pages:results_page",
    "bench": "experiments.bench.report:context",
    "one-exchange": "experiments.bench.report:one_exchange",
    "scale": "experiments.cost_model.scale:context",
    "reliability": "pages:reliability",
    "guides/nodes": "pages:nodes",
    "guides/fsdp": "experiments.sharded.report:context",
    "guides/local-steps": "pages:local_steps",
    "guides/migrate": "peers:migrate",
    **{f"papers/{name}": "experiments.papers.command:context" for name in ("README", *PAPERS)},
}
#: pictures that README shows: package indexes show PNG only
AS_PNG = {"which-method-seconds"}
REPOSITORY: str = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
NOTE = "<!-- Made by docs/build.py: change {} instead. -->\n"


def pages() -> list[str]:
    """Return the names of all generated pages: ``README``, ``bench``, ``papers/fft``."""
    templates = {str(path.relative_to(TEMPLATES).with_suffix("")) for path in TEMPLATES.rglob("*.md")}
    return sorted(templates | set(AREAS))


def path_of(page: str) -> Path:
    """Return the file that a page is written to."""
    return (ROOT if page == "README" else DOCS) / f"{page}.md"


def variables(page: str) -> dict[str, Any]:
    """Return what the page's area gives to its template."""
    module, _, function = AREAS.get(page, "").partition(":")
    found: dict[str, Any] = getattr(import_module(module), function)(page) if module else {}
    return found


def build(page: str) -> dict[Path, str | bytes]:
    """Return the text of a page and the content of its pictures, by file."""
    target = path_of(page)
    files: dict[Path, str | bytes] = {}
    given = variables(page)
    for name, value in given.items():
        if isinstance(value, Figure):
            picture = target.with_name(f"{target.stem}-{name.replace('_', '-')}.svg")
            files[picture] = plots.svg(value)
            if picture.stem in AS_PNG:
                files[picture.with_suffix(".png")] = png(value)
            given[name] = picture.name
    rendered = environment(target).get_template(f"{page}.md").render(given)
    if page == "README":
        rendered = absolute(rendered)
    files[target] = NOTE.format(f"docs/templates/{page}.md") + rendered
    return files


def absolute(text: str) -> str:
    """Make the relative links and pictures of a page at the root of the repository absolute."""
    text = re.sub(r"(!\[[^]]*\]\()(?![a-z]+:|#)", rf"\g<1>{REPOSITORY}/raw/main/", text)
    return re.sub(r"(\]\()(?![a-z]+:|#)", rf"\g<1>{REPOSITORY}/blob/main/", text)


def is_current(file: Path, content: str | bytes) -> bool:
    """Return whether a file has this content. Pictures may be compressed differently, so their pixels are compared."""
    if not file.exists():
        return False
    if isinstance(content, str):
        return file.read_text(encoding="utf-8") == content
    there, made = imread(file), imread(io.BytesIO(content))
    return there.shape == made.shape and np.allclose(there, made, atol=0.02)


def png(drawn: Figure) -> bytes:
    """Return a figure as PNG, for screens of twice the usual resolution."""
    file = io.BytesIO()
    drawn.savefig(file, format="png", dpi=200, bbox_inches="tight", metadata={"Software": None})
    return file.getvalue()


def environment(target: Path) -> jinja2.Environment:
    """Return the Jinja environment of a page; relative links depend on the page's folder."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    formats = {name: getattr(numbers, name) for name in ("number", "num_bytes", "seconds_of", "rate_of", "percent")}
    made.filters.update(formats, table=tables.markdown)

    def link(path: str) -> str:
        return os.path.relpath(ROOT / path, target.parent)

    made.globals.update(
        formats,
        table=tables.markdown,
        diff=diff,
        made=made_by,
        methods={id: cls for id, cls in registry.classes().items() if cls.__module__.startswith("hvdcompress.")},
        link=link,
        raw=lambda name: link(f"experiments/results/{name}.json"),
        source=lambda id: link(f"hvdcompress/methods/{id}.py"),
        cite=cite,
    )
    return made


def diff(kind: str) -> str:
    """Return a diff block of a pair of examples, without docstrings, blank lines, and what they print."""
    dropped = re.compile(r"\s*(print\(.*|if \S+rank\(\) == 0:)?$")
    before, after = (
        [line for line in text.split('"""', 2)[2].splitlines() if not dropped.match(line)]
        for text in ((ROOT / "examples" / f"{kind}_{name}.py").read_text("utf-8") for name in ("plain", "compressed"))
    )
    lines = list(difflib.unified_diff(before, after, n=1, lineterm=""))[2:]
    kept = [line for line in lines if not re.match(r"@@| (from|import) ", line)]
    return "\n".join(["```diff", *kept, "```"])


def made_by(name: str) -> str:
    """Return what made a published result, in one line."""
    about = results.load(name).attrs
    machine = about.get("machine", {})
    words = [f"`{about['command']}`", f"commit {about['commit']}" if about.get("commit") else "", about.get("date", "")]
    words.append(
        ", ".join(str(part) for part in (machine.get("cpu"), f"{machine['cores']} cores") if part) if machine else ""
    )
    return "; ".join(filter(None, words))


def cite(paper: str) -> str:
    """Return a citation with links to arXiv."""
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", paper)


def main() -> None:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", help="pages to build (default: all)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file would change")
    given = parser.parse_args()
    if unknown := set(given.pages) - set(pages()):
        parser.error(f"no template for {', '.join(sorted(unknown))}; there are: {', '.join(pages())}")
    stale = []
    for page in given.pages or pages():
        for file, content in build(page).items():
            if is_current(file, content):
                continue
            stale.append(str(file.relative_to(ROOT)))
            if not given.check:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content.encode() if isinstance(content, str) else content)
    if given.check and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run: python docs/build.py")
    print(f"{'checked' if given.check else 'wrote'}: {', '.join(stale) or 'nothing to change'}")


if __name__ == "__main__":
    main()
