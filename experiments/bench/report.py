"""From the turns of a benchmark to one record per contender, a table and a picture.

The columns of :func:`summarize`; seconds and bytes are of one exchange, bytes of one rank on average:

- *seconds*, *least*, *most*, *exchanges*: the median of so many exchanges and its range;
- *speed_up*, *speed_up_least*, *speed_up_most*: seconds of the fastest dense all-reduce in the same set and at the same
  rate over these, and the range of this ratio over the rounds;
- *over*, *over_least*, *over_most*: seconds beyond those of DDP without communication, median and range over rounds;
- *cpu*, *codec*, *state*: CPU time, codec time and bytes of state, summed over the ranks of a host;
- *encode*, *decode*: codec time of a rank's main thread, before and after a tensor's last collective;
- *wire*, *wait*: of the time in which a rank is blocked in Horovod or MPI, what the link needs for the ledger's bytes
  with their headers, and the rest: latency, Horovod's cycles, other ranks' codecs;
- *other*: PyTorch, Python, calls of MPI, and how far the ranks are apart. DDP's time cannot be split;
- *interface*: bytes that left the host, with all headers and negotiation; *on_wire*: the ledger's bytes if collectives
  run as rings; *sent*: payload handed to collectives; *calls*: collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from experiments.bench.config import LOOPBACK, NOOP
from experiments.report import numbers, plots, tables
from hvdcompress.cli.numbers import HEADERS, bits_of

PLACE = ["set", "rate"]
PARTS = ("encode", "wire", "wait", "decode", "other")


def summarize(turns: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return one record per set, rate and contender.

    Args:
        turns: as in ``turns.jsonl``.
    """
    whole = pd.DataFrame([turn for turn in turns if "failed" not in turn])
    if whole.empty:
        return pd.DataFrame(columns=[*PLACE, "contender", "seconds"])
    given = whole.explode("exchanges", ignore_index=True)
    times = pd.concat([given.drop(columns="exchanges"), pd.json_normalize(given["exchanges"].tolist())], axis=1)
    by = [*PLACE, "contender"]
    groups = times.groupby(by, sort=False)
    seconds = groups["seconds"].agg(seconds="median", least="min", most="max", exchanges="count")
    columns = ("cpu", "codec", "state", "interface", "on_wire", "sent", "calls", "dense")
    means = groups[[c for c in columns if c in times]].mean()
    found = groups[["kind"]].first().join(seconds).join(means).reset_index()
    by_round = times.groupby([*by, "round"])["seconds"].median()
    found = found.join(_speed_ups(found, by_round), on=by).join(_over_noop(by_round.reset_index()), on=by)
    if "blocked" in times:
        shares = groups[["encode", "decode", "blocked"]].sum(min_count=1).div(groups["seconds"].sum(), axis=0)
        found = found.join(_parts(found, shares.reset_index(drop=True)))
    return found


def _speed_ups(found: pd.DataFrame, by_round: pd.Series) -> pd.DataFrame:
    """Return how many times as fast as the best dense all-reduce each contender is, and the range over the rounds."""
    dense = found[found["kind"] == "dense"].sort_values("seconds").drop_duplicates(PLACE)[[*PLACE, "contender"]]
    turns = pd.concat([by_round.reset_index(), found.assign(round="all")[[*PLACE, "contender", "round", "seconds"]]])
    both = turns.merge(turns.merge(dense), on=[*PLACE, "round"], suffixes=("", "_dense"))
    both["speed_up"] = both["seconds_dense"] / both["seconds"]
    by = [*PLACE, "contender"]
    ends = both.groupby(by)["speed_up"].agg(speed_up_least="min", speed_up_most="max")
    return both[both["round"] == "all"].set_index(by)[["speed_up"]].join(ends)


def _over_noop(by_round: pd.DataFrame) -> pd.DataFrame:
    """Return each contender's seconds beyond those of DDP without communication in the same round."""
    noop = by_round[by_round["contender"] == NOOP].drop(columns="contender")
    both = by_round.merge(noop, on=[*PLACE, "round"], suffixes=("", "_noop"))
    both["over"] = both["seconds"] - both["seconds_noop"]
    return both.groupby([*PLACE, "contender"])["over"].agg(over="median", over_least="min", over_most="max")


def _parts(found: pd.DataFrame, shares: pd.DataFrame) -> pd.DataFrame:
    """Return where the seconds of the median exchange went, by the mean shares of all exchanges."""
    spent = shares.mul(found["seconds"], axis=0)
    # The interface's count would include what Horovod says while nothing is exchanged
    rates = found["rate"].map(lambda rate: float("inf") if rate == LOOPBACK else bits_of(rate))
    wire = (8 * (1 + HEADERS) * found["on_wire"] / rates).clip(upper=spent["blocked"]).where(spent["blocked"].notna())
    other = (found["seconds"] - spent.sum(axis=1, skipna=False)).clip(lower=0.0)
    return pd.DataFrame({**spent[["encode", "decode"]], "wire": wire, "wait": spent["blocked"] - wire, "other": other})


def show(records: pd.DataFrame) -> None:
    """Print a table for each set and rate."""
    over = ("over", "over_least", "over_most")
    times = dict.fromkeys(("seconds", "least", "most", *over, "cpu", "codec", *PARTS), numbers.seconds_of)
    sizes = dict.fromkeys(("interface", "on_wire", "sent", "state"), numbers.num_bytes)
    counts = dict.fromkeys(("exchanges", "calls"), lambda value: f"{value:.0f}")
    ratios = dict.fromkeys(("speed_up", "speed_up_least", "speed_up_most"), numbers.rate_of)
    columns = ["contender", "exchanges", *times, *ratios, *sizes, "calls"]
    for (name, rate), rows in records.groupby(PLACE, sort=False):
        present = [column for column in columns if column in rows and rows[column].notna().any()]
        tables.show(rows[present], f"{name} at {rate}", **times, **sizes, **counts, **ratios)


def speed_ups(records: pd.DataFrame) -> Figure:
    """Draw bars, one panel per set and rate: how many times as fast as the best dense all-reduce.

    Args:
        records: as :func:`summarize` makes them.
    """
    parts = list(records[records["speed_up"].notna()].groupby(PLACE, sort=False))
    most = max(len(rows) for _, rows in parts)
    drawn, axes = plots.figure(len(parts), columns=2 if len(parts) > 3 else len(parts), height=0.7 + 0.17 * most)
    for ax, ((name, rate), rows) in zip(axes, parts, strict=True):
        _bars(ax, rows.sort_values("speed_up"), rate if records["set"].nunique() == 1 else f"{name}, {rate}")
    return drawn


def _bars(ax: Axes, rows: pd.DataFrame, title: str) -> None:
    colours = ["C0" if kind == "method" else "C7" for kind in rows["kind"]]
    ax.barh(rows["contender"], rows["speed_up"], color=colours, height=0.7)
    ax.hlines(rows["contender"], rows["speed_up_least"], rows["speed_up_most"], color="0.2", linewidth=0.8)
    for place, value in enumerate(rows["speed_up"]):
        ax.annotate(f" {numbers.number(value, 2)}x", (max(value, 1.0), place), va="center", fontsize=6.5)
    ax.axvline(1, color="0.2", linewidth=0.8)
    ax.set_xscale("log")
    ax.set_xlim(0.7 * min(rows["speed_up"].min(), 1.0), 2.5 * rows["speed_up_most"].max())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(axis="y", labelsize=6.5)
    ax.set_title(title)
    ax.grid(axis="y", visible=False)
