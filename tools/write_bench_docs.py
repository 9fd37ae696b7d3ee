"""Write docs/bench.md, a page per benchmark and their plots from the folders of benchmarks, and of trainings to a loss:

    python tools/write_bench_docs.py runs/bench-resnet50 … runs/end_to_end-100mbit … digits=0.3 bytes=2.8

docs/bench.md shows ResNet-50's in short. Pages of benchmarks that are not given stay as they are, and that part, too.
`python tools/update_readme.py` then draws README's picture again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from update_readme import ROOT

from experiments.bench import page, results
from experiments.bench.config import LOOPBACK
from experiments.bench.report import LEGEND, heading, table
from experiments.bench.results import Result, Row, best_dense, ratio
from experiments.cluster.rates import Rate
from experiments.output import plots
from experiments.output.table import folded
from experiments.report import numbers
from experiments.training import results as trainings
from experiments.training import to_loss

DOCS = ROOT / "docs"
PLOTS = DOCS / "bench"
NOTES = "Notes on the machine and the links"
HEAD = """# How long an exchange of gradients takes

Each page answers one question: a picture first, then the tables, folded, with the command that made them. Figures of
one table were measured in one run, on the same hosts, in turns.

"""
MADE_BY = "python tools/write_bench_docs.py "
MADE = f"""## How these pages are made

`python -m experiments bench` measures, as root, in the virtual environment, from the repository's root
(`sudo .venv/bin/hvdcompress …`). Pages are written from its results, each with the version that was measured, and this
one with the text of `docs/bench_notes.md`; those that were not measured again stay as they were. Last:

```
{MADE_BY}{{folders}}
```
"""
SHORT = "resnet50"  #: the benchmark that docs/bench.md shows in short
QUESTIONS = {
    "resnet50": "ResNet-50: how fast is every method, at three link speeds?",
    "awake": "Nobody stopped, nobody pinned: what is left of it on busy machines?",
    "ddp_hooks": "DDP: how fast are methods compared with DDP's own hooks?",
    "ddp_cuda": "DDP on a GPU: what is left of a method's gain?",
    "resnet32": "ResNet-32: what do many small tensors cost?",
    "vgg16_conv": "VGG-16: what happens with large convolutions?",
    "gpt2": "GPT-2: which method suits a transformer's matrices?",
    "saved": "Gradients of a real training: does it matter that they are not random?",
    "alexnet": "AlexNet: what happens with large dense layers?",
    "training": "Time to a fixed loss: is a faster exchange a faster training?",
}

TO_LOSS = f"""`experiments run end_to_end --hosts 4 --rate RATE` trains two small nets, of 0.5 MB (digits) and 1.9 MB
(bytes), with methods' defaults and ScaleCom's 48x. Forward and backward passes are included. Time counts up to the
first moment at which the mean of the last {to_loss.WINDOW} logged training losses is at or below the given one. Tables
have the median over three seeds, and the least and the greatest.
"""
READ = """\
One exchange of all gradients among emulated hosts, nothing of it hidden behind a backward pass. A bar says how many
times as fast as the fastest uncompressed all-reduce of the same run it is: longer is better, and left of the line is
slower. Thin lines are the least and the greatest of that over the rounds.
[How to read the tables](../bench.md#how-to-read-it).
"""


class Group(NamedTuple):
    """What a page says of one set of gradients at one rate."""

    heading: str
    plot: str  # file name
    said: Sequence[str]
    table: str


def question(name: str) -> str:
    """A page's title."""
    return QUESTIONS.get(name, name)


def _place(page: Path) -> tuple[int, str]:
    """Where a page is in the index."""
    names = list(QUESTIONS)
    return names.index(page.stem) if page.stem in names else len(names), page.stem


def bench_page(name: str, command: str, version: str, notes: Sequence[str], groups: Sequence[Group]) -> str:
    """The page of one benchmark: pictures and comparisons, then the command, the machine and the tables, folded."""
    lines = [f"# {question(name)}", "", READ]
    for group in groups:
        lines += [f"## {group.heading}", "", f"![Times faster than the best dense all-reduce]({group.plot})", ""]
        shown = [said for said in group.said if said.startswith("Best dense")]
        hidden = [said for said in group.said if said not in shown]
        lines += [line for said in shown for line in (said, "")]
        lines.append(folded("\n\n".join([group.table.strip(), *hidden])))
    lines += [
        "## How it was measured",
        "",
        "```",
        command,
        "```",
        "",
        f"Version measured: {version}.",
        "",
    ]
    return "\n".join([*lines, folded("\n".join(f"- {note}" for note in notes), NOTES)])


def section(result: Result) -> str:
    """A benchmark's page; draws its plots."""
    groups = []
    for old in PLOTS.glob(f"{result.bench.name}-*.svg"):
        old.unlink()
    for (set, rate), rows in result.groups().items():
        name = f"{result.bench.name}-{set}-{rate}".lower().replace(" ", "-").replace("/", "-")
        svg = plots.alone(page.speed_up(rows, name))
        (PLOTS / f"{name}.svg").write_text(svg, encoding="utf-8")
        groups.append(Group(heading(result, set, rate), f"{name}.svg", _said(rows), table(rows).markdown()))
    command, version = str(result.launch.get("command", "?")), str(result.launch.get("commit", "unknown"))[:7]
    return bench_page(result.bench.name, command, version, result.notes, groups)


def training(folder: Path, targets: Sequence[tuple[str, float]]) -> str:
    """A training's link, picture, table and command."""
    found, times = trainings.read([folder]), to_loss.times(folder, targets)
    launch = found.launches[0]
    name = f"training-{folder.name}"
    (PLOTS / f"{name}.svg").write_text(plots.alone(to_loss.picture(times, name)), encoding="utf-8")
    shown = folded(to_loss.table(times).markdown(), "All figures")
    said = [note for note in found.notes if not note.startswith("Mean")]  # here they are medians
    notes = "\n".join(f"- {note}" for note in [*said, f"Launched by `{launch.get('command', '?')}`."])
    head = f"## {str(launch.get('link', folder.name)).split(' (')[0]}"
    picture = f"![Time to a fixed loss by dense training's]({name}.svg)"
    return "\n".join([head, "", picture, "", shown, "", folded(notes, NOTES)])


def brief(result: Result) -> str:
    """A table of a line per method, a column per rate."""
    rates = list(dict.fromkeys(row.rate for row in result.rows))
    heads = ["without a network" if rate == LOOPBACK else str(Rate.parse(rate)) for rate in rates]
    lines = [f"| seconds (times faster than the best dense) | {' | '.join(heads)} |"]
    lines.append("|---|" + "---:|" * len(rates))
    first = result.bench.sets[0].label
    groups = {rate: rows for (set, rate), rows in result.groups().items() if set == first}
    for contender in result.bench.contenders():
        cells = []
        for rate in rates:
            row = next((row for row in groups[rate] if row.contender == contender.label), None)
            if row is None or not (row.time and row.speed_up):
                cells.append("–")
                continue
            cell = f"{numbers.seconds_of(row.time.middle)} ({numbers.rate_of(row.speed_up.middle)})"
            cells.append(f"**{cell}**" if row is best_dense(groups[rate]) else cell)
        lines.append(f"| {contender.shown} | {' | '.join(cells)} |")
    about = str(result.bench.sets[0])
    said = f"{about}, exchanged among {result.bench.hosts} hosts; medians. Bold: the best dense all-reduce. From"
    return "\n".join([f"{said} `{result.launch.get('command', '?')}`, by `tools/write_bench_docs.py`.", "", *lines])


def _said(rows: list[Row]) -> list[str]:
    """The best dense one, and the methods' ratios to DDP's PowerSGD and to the dense ring."""
    best, words = best_dense(rows), []
    if best and best.time:
        losers = [row.shown for row in rows if row.speed_up and row.speed_up.middle < 1 and not row.is_dense]
        words.append(f"Best dense: {best.shown}. {'Slower than it: ' + ', '.join(losers) + '.' if losers else ''}")
    mine = [row for row in rows if row.time and row.kind == "method"]
    for other in rows:
        if other.contender in ("powersgd ddp", "none ring") and other.time:
            parts = []
            for row in mine:
                found = ratio(other, row)
                assert found
                parts.append(f"{row.shown} {found.middle:.2f} ({found.least:.2f} – {found.most:.2f})")
            words.append(f"Times faster than {other.shown}: {', '.join(parts)}.")
    return [word.strip() for word in words]


def index(words: str, titles: Mapping[str, str], notes: str, short: str) -> str:
    """docs/bench.md: the questions, one table, what was found, and how to read a page."""
    links = "\n".join(f"* [{title}](bench/{name}.md)" for name, title in titles.items())
    parts = [HEAD + links, "", "## In short", "", short, notes, "## How to read it", "", LEGEND, ""]
    return "\n".join([*parts, MADE.format(folders=words)])


def main() -> None:
    """Read the folders and write the pages."""
    folders = [Path(word) for word in sys.argv[1:] if "=" not in word]
    targets = [(task, float(loss)) for task, _, loss in (word.partition("=") for word in sys.argv[1:]) if loss]
    if not folders:
        sys.exit(__doc__)
    notes = DOCS / "bench_notes.md"
    benches = [folder for folder in folders if (folder / "results.jsonl").exists()]
    trained = [folder for folder in folders if folder not in benches]
    PLOTS.mkdir(exist_ok=True)
    measured = {result.bench.name: result for result in map(results.read, benches)}
    for name, result in measured.items():
        (PLOTS / f"{name}.md").write_text(section(result), encoding="utf-8")
    if trained:
        text = "\n".join([f"# {question('training')}", "", TO_LOSS, *(training(folder, targets) for folder in trained)])
        (PLOTS / "training.md").write_text(text, encoding="utf-8")
    titles = {page.stem: question(page.stem) for page in sorted(PLOTS.glob("*.md"), key=_place)}
    there, found = DOCS / "bench.md", notes.read_text(encoding="utf-8") if notes.exists() else ""
    before = there.read_text(encoding="utf-8") if there.exists() else ""
    short = before.partition("## In short\n\n")[2].partition("\n\n## ")[0].strip()
    if SHORT in measured or (measured and not short):
        short = brief(measured.get(SHORT) or next(iter(measured.values())))
    said = before.partition(MADE_BY)[2].partition("\n")[0].split()
    text = index(" ".join(dict.fromkeys([*said, *sys.argv[1:]])), titles, found, short)
    there.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
