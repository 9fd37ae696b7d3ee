"""The site's page of each method, written when Sphinx starts: ``docs/methods/ID.md`` is not committed.

``templates/method.md.j2`` makes a page of the method's class and of the docstring of its file. On GitHub, links to a
method lead to its file; ``conf.py`` turns these into links to the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import jinja2
import yaml

import hvdcompress
from hvdcompress import registry
from hvdcompress.method import Method, TensorSpec
from hvdcompress.registry import Option, classes, docstring

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS / "methods"
RESULTS = DOCS.parent / "experiments" / "results"
SECTIONS = ("What is sent", "Bytes", "State", "When it loses", "Departures from")
CONV, RANKS = TensorSpec("conv", (256, 256, 3, 3)), 4  #: the example of a page: 0.59 million values among 4 ranks


def write() -> None:
    """Write the pages of all methods, and remove those of methods that are gone."""
    FOLDER.mkdir(exist_ok=True)
    for file in FOLDER.glob("*.md"):
        if file.stem not in classes():
            file.unlink()
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(DOCS / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("method.md.j2")
    for id, cls in classes().items():
        text = template.render(variables(cls))
        file = FOLDER / f"{id}.md"
        if not file.exists() or file.read_text(encoding="utf-8") != text:  # Sphinx reads changed files again
            file.write_text(text, encoding="utf-8")


def variables(cls: type[Method]) -> dict[str, Any]:
    """Return the variables of a method's page."""
    title, *rest = markdown(docstring(cls)).split("\n\n")
    name, _, about = title.replace("\n", " ").partition(": ")
    known = re.sub(r"\W", "", name).lower() == cls.id or f"({cls.id})" in name.lower()
    method = hvdcompress.get_method(cls.id)
    shared = {field.name for field in fields(Method)}
    own = {field.name: field.default for field in fields(cls) if field.name not in shared - {"feedback"}}
    return {
        "id": cls.id,
        "title": name if known else f"{name} ({cls.id})",
        "about": about[:1].upper() + about[1:],
        "text": headed(rest),
        "sends": cls.sends,
        "bytes": method.num_bytes(CONV, RANKS) if method.suits(CONV) and cls.id != "none" else 0,
        "dense": 4 * CONV.size,
        "plan": yaml.safe_dump({"method": cls.id, **own}, sort_keys=False).strip(),
        "options": list(options(cls)),
        "published": {key: yaml.safe_dump(value).split("\n")[0] for key, value in cls.published.items()},
        "paper": re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", cls.paper),
        "measured": measured(cls.id),
        "claims": f"../papers/{cls.id}.md" if (DOCS / "papers" / f"{cls.id}.md").exists() else "",
    }


def headed(paragraphs: list[str]) -> str:
    """Turn the words that open a section of a docstring into a heading."""
    out = []
    for paragraph in paragraphs:
        opened = next((title for title in SECTIONS if paragraph.startswith(title)), None)
        if opened:
            head, _, rest = paragraph.partition(":")
            rest = rest.strip()
            out.append(f"## {head.partition(',')[0]}")
            paragraph = rest if "," not in head else paragraph
            paragraph = paragraph[:1].upper() + paragraph[1:] if re.match("[a-z]{2}", paragraph) else paragraph
        out.append(paragraph)
    return "\n\n".join(out)


def markdown(text: str) -> str:
    """Return a docstring as Markdown: indented lines and doctests are preformatted, lists have a blank line before."""
    out: list[str] = []
    code = ""
    for line in [*text.splitlines(), ""]:
        kind = "pycon" if line.startswith(">>> ") or (code == "pycon" and line) else ""
        kind = kind or ("text" if line.startswith("    ") or (code == "text" and not line) else "")
        if kind != code:
            while code == "text" and not out[-1]:
                out.pop()
            out += ["```", ""] if code else []
            out += ["", f"```{kind}"] if kind else []
            code = kind
        if not code and line.startswith("- ") and out and not out[-1].startswith(("- ", "  ")):
            out.append("")
        plain = line[4:] if code == "text" else line
        out.append(plain if code else re.sub(r"(?::\w+:)?``?([^`]+)``?", r"`\1`", plain).replace("::", ":"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def options(cls: type[Method]) -> Iterator[Option]:
    """Yield the hyper-parameters as cells of a Markdown table."""
    for one in registry.options(cls):
        about = re.sub(r"``(.+?)``", r"`\1`", one.about)
        cells = one._replace(default=yaml.safe_dump(one.default).split("\n")[0], about=about)
        yield Option(*(cell.replace("|", "\\|") for cell in cells))


def measured(id: str) -> list[dict[str, Any]]:
    """Return the method's trainings in the published table of all methods."""
    records = json.loads((RESULTS / "training-all-methods.json").read_text(encoding="utf-8"))["records"]
    return [record for record in records if record["method"].split()[0] == id and id != "none"]
