"""What ``hvdcompress scale`` prints and writes: tables, scale.json, table.md and report.html."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdcompress.lab.cluster.links import Rate
from hvdcompress.lab.output import numbers
from hvdcompress.lab.scale.cost import Constants
from hvdcompress.lab.scale.model import Model, Row
from hvdcompress.lab.training.report import as_json, write_files

MISSING = "–"
LOSES = "*"  # marks what is no faster than dense
MEANING = {
    "message": "a message that waits for another (α)",
    "link": "share of the bare link's time for bytes (β)",
    "byte": "processors' work for a byte (δ)",
    "call": "a collective, before fusion (ν)",
    "round": "a round: one waits for another (κ)",
    "codec": "share of the codec's time in one process (γ)",
}


@dataclass
class Prediction:
    """Rows, and of what."""

    name: str
    rows: list[Row]
    model: Model
    file: str
    command: str
    timed: list[str] = field(default_factory=list)  #: methods whose codec was timed just now, not with the fit

    @property
    def workers(self) -> list[int]:
        """The columns."""
        return sorted(self.rows[0].seconds)

    def by_rate(self) -> dict[str, list[Row]]:
        """Rows of each rate, in their order."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.rate, []).append(row)
        return found

    def heading(self, rate: str) -> str:
        """``Seconds an exchange at 1 Gbit/s: …``."""
        return f"Seconds an exchange at {Rate.parse(rate)}: {self.name}"

    def dense(self, rate: str) -> Row:
        """The dense row."""
        return next(row for row in self.by_rate()[rate] if row.is_dense)


def _seconds(row: Row, dense: Row, workers: int) -> str:
    loses = not row.is_dense and row.seconds[workers] >= dense.seconds[workers]
    return numbers.seconds_of(row.seconds[workers]) + (LOSES if loses else "")


def time_cells(prediction: Prediction, row: Row) -> list[str]:
    """A line of the table of times."""
    dense = prediction.dense(row.rate)
    last = MISSING if row.is_dense else loses(row)
    return [row.label, *(_seconds(row, dense, p) for p in prediction.workers), last]


def loses(row: Row) -> str:
    """Among how many workers a method is no faster than dense: "never", "always", "from 256", "up to 8" or a list."""
    workers, mine = sorted(row.seconds), row.loses
    if not mine or len(mine) == len(workers):
        return "always" if mine else "never"
    if mine == workers[-len(mine) :]:
        return f"from {mine[0]}"
    return f"up to {mine[-1]}" if mine == workers[: len(mine)] else ", ".join(map(str, mine))


def byte_cells(prediction: Prediction, row: Row) -> list[str]:
    """A line of the table of bytes."""
    return [row.label, *(numbers.num_bytes(row.on_wire[p]) for p in prediction.workers)]


def constant_cells(constants: Constants) -> list[tuple[str, str, str]]:
    """(name, value, meaning) of each constant."""

    def text(name: str, value: float) -> str:
        if name in ("link", "codec"):
            return numbers.number(value)
        return f"{numbers.number(1e9 * value)} ns" if name == "byte" else numbers.seconds_of(value)

    return [(name, text(name, value), MEANING[name]) for name, value in asdict(constants).items()]


def notes(prediction: Prediction) -> list[str]:
    """What a reader must know to read the figures rightly."""
    model = prediction.model
    said = [f"From {prediction.file}, fitted {model.made} to {len(model.points)} measured points: {_sources(model)}."]
    for split, found in model.held_out.items():
        said.append(
            f"Held out ({split}; {found.points} exchanges): median error {100 * found.median:.0f} %, worst "
            f"{100 * found.worst:.0f} % ({found.which})."
        )
    if not model.held_out:
        said.append("No measured exchange was held out: how far off the model is, is not known.")
    said.append(
        f"{LOSES}: no faster than dense. Collectives as rings, dense too; nothing is hidden behind a backward pass; "
        "each rank has a processor like that of the fit for itself, and its link for itself."
    )
    if prediction.timed:
        said.append(f"Codecs that were timed just now, on this machine: {', '.join(prediction.timed)}.")
    largest = max(point.work.world for point in model.points) if model.points else 0
    said.append(f"Beyond {largest} workers nothing was measured: these figures are carried over by the formulas alone.")
    return said


def _sources(model: Model) -> str:
    words = []
    for source in model.sources:
        command = f" (`{source['command']}`)" if "command" in source else ""
        words.append(f"{source['points']} of {source.get('folder', source.get('file'))}{command}")
    return "; ".join(words)


def show(prediction: Prediction, console: Console) -> None:
    """Print the tables."""
    heads = ["method", *(f"{p}" for p in prediction.workers)]
    for rate, rows in prediction.by_rate().items():
        lines = [time_cells(prediction, row) for row in rows]
        _show(prediction.heading(rate), [*heads, "loses"], lines, console, mark=LOSES)
    rows = next(iter(prediction.by_rate().values()))
    _show("Bytes on the wire, a rank and exchange", heads, [byte_cells(prediction, row) for row in rows], console)
    for note in notes(prediction):
        console.print(escape(note), highlight=False)


def _show(title: str, heads: list[str], lines: list[list[str]], console: Console, mark: str = "\0") -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="bold", padding=(0, 1))
    for head in heads:
        table.add_column(head, justify="left" if head == "method" else "right", no_wrap=True)
    for line in lines:
        table.add_row(*(f"[red]{escape(cell)}[/]" if cell.endswith(mark) else escape(cell) for cell in line))
    console.print()
    console.print(table)


def show_fit(model: Model, console: Console) -> None:
    """Print the constants, and how far off their predictions are."""
    table = Table(title="Fitted constants", title_justify="left", title_style="bold", box=None, show_header=False)
    for name, value, meaning in constant_cells(model.constants):
        table.add_row(name, value, escape(meaning))
    console.print(table)


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("*", "\\*") for cell in cells) + " |"

    return [line(heads), "|---|" + "---:|" * (len(heads) - 1), *map(line, lines)]


def markdown(prediction: Prediction) -> str:
    """All tables as Markdown."""
    heads = ["method", *(str(p) for p in prediction.workers)]
    text = []
    for rate, rows in prediction.by_rate().items():
        text += [f"**{prediction.heading(rate)}**", ""]
        text += [*_table([*heads, "loses"], [time_cells(prediction, row) for row in rows]), ""]
    rows = next(iter(prediction.by_rate().values()))
    text += ["**Bytes on the wire, a rank and exchange**", ""]
    text += [*_table(heads, [byte_cells(prediction, row) for row in rows]), ""]
    text += ["**Constants**", "", *_table(("constant", "value", "of"), constant_cells(prediction.model.constants)), ""]
    return "\n".join([*text, *(f"- {note}".replace("*:", "\\*:") for note in notes(prediction))]) + "\n"


def write(prediction: Prediction, folder: Path) -> list[Path]:
    """Write ``scale.json``, ``table.md`` and, if the report extra is installed, ``report.html`` and its plots of
    seconds, each a file."""
    given: dict[str, Any] = {
        "name": prediction.name,
        "command": prediction.command,
        "notes": notes(prediction),
        "rows": [row.to_dict() for row in prediction.rows],
    }

    def pages() -> dict[str, str]:
        from hvdcompress.lab.scale import page as _scale_page

        return {"report.html": _scale_page.html(prediction), **_scale_page.pictures(prediction)}

    return write_files(folder, {"scale.json": as_json(given), "table.md": markdown(prediction)}, pages)
