"""The report of a benchmark: its tables, on a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape

from experiments.bench.config import LOOPBACK
from experiments.bench.results import PARTS, Result, Row, best_dense
from experiments.cluster.rates import Rate
from experiments.output.table import MISSING, Column, Format, Table, print_tables
from experiments.report import numbers

__all__ = ["LEGEND", "heading", "markdown", "show", "table", "tables"]


def _seconds(row: Row) -> str:
    return numbers.seconds_of(row.time.middle) if row.time else "failed"


def _spread(row: Row) -> str:
    if not row.time:
        return MISSING
    return f"{numbers.seconds_of(row.time.least)} – {numbers.seconds_of(row.time.most)}"


def _speed_up(row: Row) -> str:
    if not row.speed_up:
        return MISSING
    middle, least, most = (numbers.number(value) for value in row.speed_up)
    return f"{middle} ({least} – {most})" if least != most else middle


def _part(what: str) -> Column[Row]:
    def text(row: Row) -> str:
        return numbers.seconds_of(row.parts[what]) if what in row.parts else MISSING

    return Column(what, what, text, lambda row: row.parts.get(what), "s", yields=1)


def _from_ledger(key: str, title: str, form: Callable[[float], str], unit: str = "") -> Column[Row]:
    def text(row: Row) -> str:
        return form(row.ledger[key]) if key in row.ledger else MISSING

    return Column(key, title, text, lambda row: row.ledger.get(key), unit, yields=2)


def _interface(row: Row) -> str:
    return MISSING if row.interface is None else numbers.num_bytes(row.interface)


def columns(best: Row | None) -> list[Column[Row]]:
    """The columns of a table in which ``best`` is the best dense all-reduce."""
    return [
        Column("method", "method", lambda row: row.shown + (" (best dense)" if row is best else ""), align="left"),
        Column("value", "seconds", _seconds, lambda row: row.time and row.time.middle, "s"),
        Column("spread", "least – most", _spread, yields=1),
        Column("count", "of", lambda row: str(sum(map(len, row.seconds.values()))), yields=1),
        Column("rate", "× best dense", _speed_up, lambda row: row.speed_up and row.speed_up.middle),
        *(_part(what) for what in PARTS),
        Column("interface", "left the host", _interface, lambda row: row.interface, "B", yields=2),
        _from_ledger("on_wire", "ledger, as a ring", numbers.num_bytes, "B"),
        _from_ledger("sent", "payload", numbers.num_bytes, "B"),
        _from_ledger("calls", "collectives", lambda calls: f"{calls:.0f}"),
    ]


LEGEND = (
    "Horovod none, Horovod fp16, DDP powersgd (rank 1) and so on are baselines: "
    "stock Horovod over MPI's ring, over MPI with the algorithm that Open MPI chooses "
    "(mpi) and over gloo; PyTorch's DDP over gloo (ddp) with its own hooks, PowerSGD's in one bucket, as it aborts on "
    "gloo with more. Methods are behind stock Horovod over MPI's ring, or where their `over` says: mpi4py is our MPI "
    "driver on numpy arrays, with MPI's ring, and without PyTorch and Horovod. A title's end says whether the ranks "
    "over other transports were stopped meanwhile or awake, and whether each host's ranks were pinned to its share of "
    "the processors. Seconds: one exchange of all gradients, from the first rank's beginning to the last one's end, "
    "nothing of it hidden behind a backward pass; "
    "the median of so many exchanges (of). A turn's first exchange, which still has ranks waking up, counts only "
    "where it was the only one. × best dense: the fastest `none`'s median over this one's, with the least and the "
    "greatest of that ratio in a round; below 1 the method loses to dense. Of a rank's main thread: encode = codec "
    "until a tensor's last collective is under way; decode = after it; wire = of the time blocked in Horovod or MPI, "
    "what the link needs for the ledger's bytes and their headers; wait = the rest of that time: latency, Horovod's "
    "cycles, other ranks' codecs; other = PyTorch, Python, calls of MPI, and how far ranks are apart. DDP does not "
    "let its time be told apart. Bytes are one rank's in one exchange, on average over ranks: left the host = by the "
    "interface's counters, with all headers and negotiation, also between exchanges; ledger = if collectives run as "
    "rings; payload = handed to the collectives."
)


def heading(result: Result, set: str, rate: str) -> str:
    """Such as ``resnet50 at 100 Mbit/s: 161 tensors, …; others stopped, ranks pinned``."""
    about = str(next(one for one in result.bench.sets if one.label == set)).removeprefix(f"{set}: ")
    place = "without a network" if rate == LOOPBACK else f"at {Rate.parse(rate)}"
    return f"{set} {place}: {about}; {result.bench.conditions(rate == LOOPBACK)}"


def table(rows: Sequence[Row], title: str = "") -> Table[Row]:
    """The table of one set and rate, without columns that no row fills."""
    best = best_dense(rows)

    def mark(row: Row) -> str:
        return "failed" if row.error else "best" if row is best else ""

    return Table(columns(best), rows, title, mark, lambda row: 0 if row.is_baseline else 1).filled()


def tables(result: Result) -> list[Table[Row]]:
    """A table for each set and rate."""
    return [table(rows, heading(result, *key)) for key, rows in result.groups().items()]


def show(result: Result, console: Console, form: str = Format.text) -> None:
    """Print the tables; as text, the notes, too."""
    print_tables(tables(result), console, form)
    for note in result.notes if form == Format.text else ():
        console.print(escape(note), highlight=False)


def markdown(result: Result) -> str:
    """All tables, the legend and the notes as Markdown."""
    parts = [f"**{each.title}**\n\n{each.markdown()}\n" for each in tables(result)]
    return "".join([*parts, f"{LEGEND}\n\n", *(f"- {note}\n" for note in result.notes)])
