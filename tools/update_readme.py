"""Write what is generated in README.md and docs: diffs, an example's text, the table of methods, a training's table.

    python tools/update_readme.py [runs/quickstart]

Generated parts stand between comments, ``<!-- NAME: begin … -->`` and ``<!-- NAME: end -->``. ``--check`` changes
nothing and fails if one is out of date.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable
from pathlib import Path

from charts import Axis, Line, lines
from growth import wire
from printed import Printed, figure, tables

from experiments.report.numbers import rate_of

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PICTURE = DOCS / "exchange.svg"
QUICKSTART = DOCS / "quickstart-table.md"
PAGES = (ROOT / "README.md", DOCS / "index.md", *sorted((DOCS / "guides").glob("*.md")))
DRAWN = {  # what the picture shows, by its row in the benchmark: (name, whether it is a baseline)
    "DDP none (best dense)": ("dense", True),
    "DDP fp16": ("fp16 (DDP's hook)", True),
    "qsgd 4 bits": ("qsgd, 4 bits", False),
    "topk 0.5 %": ("topk, 0.5 %", False),
    "powersgd rank 1": ("powersgd, rank 1", False),
    "scalecom 100x": ("scalecom, 100x", False),
}
DECISIONS = (  # method, its label in the tables of trainings, of ResNet-50's exchange, and what follows from them
    ("fp16", "fp16", "fp16 compressor", "First try: loses no more than seeds differ."),
    ("qsgd", "qsgd", "qsgd 4 bits", "Slow links, and no accuracy to lose."),
    ("scalecom", "scalecom", "scalecom 100x", "Many ranks, or links up to 1 Gbit/s."),
    ("topk", "topk", "topk 0.5 %", "Few ranks: loses less than ScaleCom on text, but its bytes grow."),
    ("powersgd", "powersgd", "powersgd rank 1", "Large matrices on slow links; many ranks."),
    ("signsgd", "signsgd", "signsgd", "Only if a training of your own shows no loss."),
    ("fft", "fft", "fft", "No: top-k loses less at four times the ratio."),
    ("randomk", "randomk", "randomk 1 %", "No: a baseline. It hardly learns text."),
)


def replaced(text: str, name: str, body: str) -> str:
    """``text`` with what is between the markers of ``name`` replaced by ``body``."""
    head, _, rest = text.partition(f"<!-- {name}: begin")
    opening, _, rest = rest.partition("-->\n")
    _, _, tail = rest.partition(f"<!-- {name}: end -->")
    return f"{head}<!-- {name}: begin{opening}-->\n{body.strip()}\n<!-- {name}: end -->{tail}"


def diff(kind: str) -> str:
    """The difference of a pair of examples, without the docstrings'."""
    before, after = ((ROOT / "examples" / f"{kind}_{name}.py").read_text() for name in ("plain", "compressed"))
    changed = difflib.unified_diff(
        before.split('"""', 2)[2].splitlines(), after.split('"""', 2)[2].splitlines(), n=1, lineterm=""
    )
    return "```diff\n" + "\n".join(line for line in changed if not line.startswith(("---", "+++", "@@"))) + "\n```"


def core(kind: str) -> str:
    """Of that difference, the lines that have to do with hvdcompress."""
    kept = [line for line in diff(kind).splitlines()[1:-1] if re.match(r"[+-] *\S", line)]
    words = ("hvdcompress", "ompress", "Distributed", "callbacks", "ddp.")
    return "```diff\n" + "\n".join(line for line in kept if any(word in line for word in words)) + "\n```"


def file(path: str) -> str:
    """A file's text."""
    return f"```python\n{(ROOT / path).read_text().strip()}\n```"


def trained(task: str) -> dict[str, dict[str, str]]:
    """Rows of the training of all methods on a task, by label: of one experiment, as others differ by a seed."""
    printed = [table for table in tables(DOCS / "results.md") if table.heading.startswith(f"{task}:")]
    widest = max(printed, key=lambda table: len(table.rows))
    return {row["method"]: row for row in widest.rows}


def exchanges() -> dict[str, Printed]:
    """The tables of ResNet-50's exchange by link."""
    return {re.sub(r".* at (.*?):.*", r"\1", table.heading): table for table in tables(DOCS / "bench" / "resnet50.md")}


def which() -> str:
    """The table "which method when"."""
    digits, text, links = trained("digits"), trained("bytes"), exchanges()
    out = [
        "| method | measured: in training; exchanged | compression ratio | bytes | accuracy "
        "| at 100 Mbit/s | at 1 Gbit/s | verdict |",
        "|---|---|---:|---|---|---:|---:|---|",
    ]
    for id, label, contender, verdict in DECISIONS:
        cells = [f"[`{id}`](docs/methods/{id}.md)"]
        settings = contender.removeprefix(id).removesuffix("compressor").strip() or "defaults"
        cells.append(f"{text[label]['density'].replace('–', 'defaults')}; {settings}")
        cells.append(text[label]["ratio"])
        cells.append("constant" if wire(id)[-1] <= 2 * wire(id)[1] else "grow with ranks")  # from 4 to 1024
        cells.append(f"{digits[label]['vs none']} points; {text[label]['vs none']} bits")
        for link in ("100 Mbit/s", "1 Gbit/s"):
            (row,) = (row for row in links[link].rows if row["method"] == contender)
            times = figure(row["× best dense"])
            cells.append(rate_of(times) if times >= 1 else "slower")
        out.append(f"| {' | '.join([*cells, verdict])} |")
    return "\n".join(out)


def carried(link: str) -> str:
    """What the benchmark's links of a nominal speed carried, on average."""
    page = (DOCS / "bench" / "resnet50.md").read_text(encoding="utf-8")
    (words,) = re.findall(rf"hosts, {link} each .*?got across (.*)\.", page)
    speeds = [figure(word) for word in words.split(", ")]
    return f"{sum(speeds) / len(speeds) / 1e9:.1f} Gbit/s"


def picture() -> str:
    """README's picture: the time of an exchange against the links' speed."""
    drawn = []
    for contender, (name, dense) in DRAWN.items():
        points = []
        for link, table in exchanges().items():
            (row,) = (
                row for row in table.rows if row["method"] in (contender, contender.removesuffix(" (best dense)"))
            )
            points.append((figure(link), figure(row["seconds"])))
        drawn.append(Line(name, points, dense))
    word: Callable[[float], str] = lambda x: f"{x / 1e9:g} Gbit/s" if x >= 1e9 else f"{x / 1e6:g} Mbit/s"  # noqa: E731
    return lines(
        "Time to exchange ResNet-50's gradients among four hosts",
        f"Emulated hosts on one machine of two cores; links of 10 Gbit/s carried {carried('10 Gbit/s')} here.",
        Axis("speed of the links", (1e8, 1e9, 1e10), word),
        Axis("seconds", (0.1, 0.3, 1, 3, 10, 20), lambda y: f"{y:g} s"),
        drawn,
    )


def parts() -> dict[str, str]:
    """Every generated part but the training's table."""
    found = {"which": which()}
    for path in sorted((ROOT / "examples").glob("*.py")):
        found[f"file examples/{path.name}"] = file(f"examples/{path.name}")
    for kind in ("torch", "ddp", "tensorflow", "keras"):
        found[f"{kind} diff"], found[f"{kind} core"] = diff(kind), core(kind)
    return found


def main() -> None:
    """Write the parts, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", 1)[0] + ".")
    parser.add_argument("run", nargs="?", type=Path, help="folder of a finished training, whose table is copied")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is out of date")
    given = parser.parse_args()
    wanted = {PICTURE: picture()}
    for page in PAGES:
        wanted[page] = page.read_text()
        for name, body in parts().items():
            if f"<!-- {name}: begin" in wanted[page]:
                wanted[page] = replaced(wanted[page], name, body)
    if given.check:
        stale = [page.name for page, new in wanted.items() if not page.exists() or page.read_text() != new]
        sys.exit(f"out of date: {', '.join(stale)}; run: python tools/update_readme.py" if stale else 0)
    if given.run:
        wanted[QUICKSTART] = replaced(QUICKSTART.read_text(), "quickstart", (given.run / "table.md").read_text())
    for page, new in wanted.items():
        page.write_text(new)
    print(f"wrote {', '.join(str(page.relative_to(ROOT)) for page in wanted)}")


if __name__ == "__main__":
    main()
