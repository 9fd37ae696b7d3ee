"""The report of ``python -m experiments scale``: its tables, on a terminal and as Markdown."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from experiments.cluster.rates import Rate
from experiments.output.table import MISSING, Column, Format, Table, print_tables
from experiments.report import numbers
from experiments.scale.cost import Constants
from experiments.scale.model import Model
from experiments.scale.prediction import Row

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
    """Rows, and what they were predicted for."""

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
        """``Seconds per exchange at 1 Gbit/s: …``."""
        return f"Seconds per exchange at {Rate.parse(rate)}: {self.name}"

    def dense(self, rate: str) -> Row:
        """The dense row."""
        return next(row for row in self.by_rate()[rate] if row.is_dense)


def loses(row: Row) -> str:
    """Among how many workers a method is no faster than dense: "never", "always", "from 256", "up to 8" or a list."""
    workers, mine = sorted(row.seconds), row.loses
    if not mine or len(mine) == len(workers):
        return "always" if mine else "never"
    if mine == workers[-len(mine) :]:
        return f"from {mine[0]}"
    return f"up to {mine[-1]}" if mine == workers[: len(mine)] else ", ".join(map(str, mine))


def _seconds(workers: int, dense: Row, yields: int) -> Column[Row]:
    """The column of one number of workers in the table of times."""

    def is_slow(row: Row) -> bool:
        return not row.is_dense and row.seconds[workers] >= dense.seconds[workers]

    def text(row: Row) -> str:
        return numbers.seconds_of(row.seconds[workers]) + (LOSES if is_slow(row) else "")

    key = f"workers_{workers}"
    return Column(key, str(workers), text, lambda row: row.seconds[workers], "s", yields=yields, marked=is_slow)


def _bytes(workers: int, yields: int) -> Column[Row]:
    key = f"workers_{workers}"
    return Column(
        key,
        str(workers),
        lambda row: numbers.num_bytes(row.on_wire[workers]),
        lambda row: row.on_wire[workers],
        "B",
        yields=yields,
    )


METHOD: Column[Row] = Column("method", "method", lambda row: row.label, align="left")


def time_table(prediction: Prediction, rate: str) -> Table[Row]:
    """Seconds by the number of workers, over links of one rate."""
    rows, dense = prediction.by_rate()[rate], prediction.dense(rate)
    last: Column[Row] = Column("loses", "loses", lambda row: MISSING if row.is_dense else loses(row))
    columns = [METHOD, *(_seconds(p, dense, y) for p, y in _yielding(prediction.workers)), last]
    order = [row.label for row in rows]
    return Table(columns, rows, prediction.heading(rate), colour=lambda row: order.index(row.label))


def byte_table(prediction: Prediction) -> Table[Row]:
    """Bytes that a rank transmits, by the number of workers."""
    rows = next(iter(prediction.by_rate().values()))
    columns = [METHOD, *(_bytes(p, y) for p, y in _yielding(prediction.workers))]
    return Table(columns, rows, "Bytes on the wire, per rank and exchange")


def _yielding(workers: list[int]) -> list[tuple[int, int]]:
    """Numbers of workers, and how soon their columns give way: every second one first, the last one never."""
    return [(p, (len(workers) - 1 - at) % 2) for at, p in enumerate(workers)]


class Constant(NamedTuple):
    """A constant of the model, as the table shows it."""

    name: str
    value: float
    text: str


def constant_table(constants: Constants) -> Table[Constant]:
    """The model's constants: name, value, meaning."""

    def text(name: str, value: float) -> str:
        if name in ("link", "codec"):
            return numbers.number(value)
        return f"{numbers.number(1e9 * value)} ns" if name == "byte" else numbers.seconds_of(value)

    columns: list[Column[Constant]] = [
        Column("constant", "constant", lambda one: one.name, align="left"),
        Column("value", "value", lambda one: one.text, lambda one: one.value),
        Column("of", "of", lambda one: MEANING[one.name], align="left"),
    ]
    rows = [Constant(name, value, text(name, value)) for name, value in asdict(constants).items()]
    return Table(columns, rows, "Fitted constants")


def notes(prediction: Prediction) -> list[str]:
    """What a reader must know to read the figures correctly."""
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
    largest = max(point.work.world_size for point in model.points) if model.points else 0
    said.append(f"Beyond {largest} workers nothing was measured: those figures are extrapolations by the formulas.")
    return said


def warnings(prediction: Prediction) -> list[str]:
    """What is asked for beyond what the model was fitted to: links faster or slower than any that was measured."""
    measured = [point.rate for point in prediction.model.points if point.rate]
    if not measured:
        return []
    asked = {rate: Rate.parse(rate).slower for rate in prediction.by_rate()}
    said = []
    for rate, speed in asked.items():
        if not min(measured) <= speed <= max(measured):
            low, high = (Rate.parse(f"{bits / 1e6:g}mbit") for bits in (min(measured), max(measured)))
            said.append(
                f"{Rate.parse(rate)} is beyond the fit, whose links had {low} to {high}: the times at that rate are "
                "extrapolated, and real ones can be several times longer, as other limits than the link take over. "
                "`python -m experiments bench` measures them."
            )
    return said


def _sources(model: Model) -> str:
    words = []
    for source in model.sources:
        command = f" (`{source['command']}`)" if "command" in source else ""
        words.append(f"{source['points']} of {source.get('folder', source.get('file'))}{command}")
    return "; ".join(words)


def tables(prediction: Prediction) -> list[Table[Row]]:
    """Seconds for each rate, and bytes."""
    return [*(time_table(prediction, rate) for rate in prediction.by_rate()), byte_table(prediction)]


def show(prediction: Prediction, console: Console, form: str = Format.text) -> None:
    """Print the tables; as text, the notes, too."""
    left_out = print_tables(tables(prediction), console, form)
    if form != Format.text:
        return
    if left_out:
        console.print("[dim]This terminal is narrow: --format csv, and table.md of --out, have all columns.[/]")
    for note in notes(prediction):
        console.print(escape(note), highlight=False)


def show_fit(model: Model, console: Console) -> None:
    """Print the constants."""
    constant_table(model.constants).show(console)


def markdown(prediction: Prediction) -> str:
    """All tables and the notes as Markdown."""
    text = [f"**{table.title}**\n\n{table.markdown()}\n" for table in tables(prediction)]
    text.append(f"**Constants**\n\n{constant_table(prediction.model.constants).markdown()}\n")
    return "".join([*text, *(f"- {note}\n".replace("*:", "\\*:") for note in notes(prediction))])
