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

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from experiments.bench.config import LOOPBACK, NOOP
from experiments.cluster.hosts import title
from experiments.report import numbers, plots, results, tables
from experiments.report.numbers import num_bytes, number, percent, rate_of, seconds_of
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


BENCHES = ("resnet50", "ddp_hooks", "ddp_cuda", "awake", "resnet32", "gpt2", "alexnet", "vgg16_conv", "saved")
BASELINES = {"none ddp": "dense, DDP", "fp16 ddp": "DDP's fp16 hook", "powersgd ddp": "DDP's PowerSGD hook, rank 1"}
#: the bars of the picture
DRAWN = ["none ring", "none mpi", "fp16 ddp", "powersgd ddp", "topk 0.5 %", "scalecom 100x", "dgc 0.1 %", "gtopk 0.5 %"]
DRAWN += ["gaussiank 0.5 %", "randomk 1 %", "powersgd rank 1", "qsgd 4 bits", "signsgd", "fft", "fp16 compressor"]
BEST = ["topk 0.5 %", "scalecom 100x", "powersgd rank 1"]
HOOKS = ["fp16 ddp", "powersgd ddp", "fp16 in DDP", "powersgd rank 1 in DDP", "topk 1 % in DDP", "scalecom 48x in DDP"]
CODECS = ["fp16", "scalecom", "topk", "arctopk", "gtopk", "dgc", "oktopk", "signsgd", "qsgd", "powersgd", "fft"]
CODECS += ["natural", "blockwise", "blockwise values=int4", "blockwise values=int4 rotation=true", "onebit", "gradiveq"]
NETS = {
    "resnet50": "ResNet-50",
    "gpt2": "a block of GPT-2",
    "alexnet": "AlexNet",
    "vgg16_conv": "VGG-16's convolutions",
}
PEERS = {
    "top-k as GRACE publishes it": "GRACE's top-k",
    "PowerSGD's arithmetic in DDP's hook": "PyTorch's PowerSGD hook",
    "the same, and back to float32": "PyTorch's conversions",
    "torch.fft: rfft and irfft": "the FFTs alone, PyTorch",
}
LEVELS = ["topk 1 %", "topk 1 % in 4 bits", "scalecom 48x", "qsgd 4 bits", "powersgd rank 1", "fp16"]
EXCHANGES = ["qsgd 4 bits", "signsgd", "powersgd rank 4", "topk density=0.01", "topk qsgd4", "fft density=0.15"]


def context(page: str) -> dict[str, Any]:
    """Return the numbers, tables and pictures of ``docs/templates/bench.md``."""
    frames = {name: results.load(f"bench-{name}").assign(net=name) for name in BENCHES}

    def row(bench: str, contender: str, rate: str, set: str = "") -> pd.Series:
        rows = frames[bench].set_index(["contender", "rate"]).loc[[(contender, rate)]]
        return rows[rows["set"].str.contains(set)].iloc[0]

    resnet = frames["resnet50"]
    drawn = resnet[resnet["contender"].isin(DRAWN)]
    nets = pd.concat(frames[net] for net in NETS)
    nets = nets.groupby(["contender", "net"])["speed_up"].agg(lambda values: ", ".join(map(rate_of, values)))
    return {
        "up": lambda *place: rate_of(row(*place)["speed_up"]),
        "took": lambda *place: seconds_of(row(*place)["seconds"]),
        "speed_up": speed_ups(drawn.assign(set="ResNet-50", rate=drawn["rate"].map(title))),
        "by_rate": _by_rate(resnet, ["none ddp", *BEST, "qsgd 4 bits"]),
        "parts": _parts_of(resnet[resnet["rate"] == "1gbit"]),
        "nets": nets.unstack()[[*NETS]].rename(columns=NETS).loc[BEST].rename_axis("").reset_index(),
        "hooks": _by_rate(frames["ddp_hooks"], HOOKS),
        "gpu": _by_rate(frames["ddp_cuda"], HOOKS),
        "to_loss": _to_loss,
    }


def one_exchange(page: str) -> dict[str, Any]:
    """Return the tables of ``docs/templates/one-exchange.md``."""
    on_gpu = results.load("codec-cuda").set_index("method")["copies"].map(number).rename("copies").reset_index()
    return {"codec": _codec(), "gpu": on_gpu, "exchange": _exchange()}


def two_levels() -> dict[str, Any]:
    """Return the table of "What it saves" on the page on nodes."""
    rows = results.load("bench-nodes-4-hosts").set_index("contender")
    slow = rows[rows["rate"] == "100mbit"]
    fast = rows[rows["rate"] == "1gbit"]
    table = {
        "": LEVELS,
        "sent": _levels(fast, "interface", num_bytes),
        "added to a step, 1 Gbit/s": _levels(fast, "over", seconds_of),
        "added, 100 Mbit/s": _levels(slow, "over", seconds_of),
        "CPU time": _levels(fast, "cpu", seconds_of),
    }
    return {"levels": pd.DataFrame(table), "two_hosts": _two_hosts()}


def _two_hosts() -> pd.DataFrame:
    """Return the time added to a step with two levels, divided by that with one, for each set of gradients and rate."""
    rows = []
    for name in ("bench-nodes-2-hosts", "bench-nodes-resnet50"):
        for (net, rate), some in results.load(name).groupby(["set", "rate"]):
            over = some.set_index("contender")["over"]
            ratios = {method: number(over[f"two-level {method}"] / over[method]) for method in LEVELS}
            rows.append({"": f"{NETS[net]}, {title(rate)}", **ratios})
    return pd.DataFrame(rows)


def _levels(rows: pd.DataFrame, column: str, shown: Callable[[float], str]) -> list[str]:
    """Return a figure of each method with one level and with two."""
    figures = rows[column].map(shown)
    return [f"{figures[name]} → {figures[f'two-level {name}']}" for name in LEVELS]


def _by_rate(frame: pd.DataFrame, contenders: list[str]) -> pd.DataFrame:
    """Return a table of contenders by rate: seconds, and how many times as fast as the best dense all-reduce."""
    rows = frame.set_index("contender").loc[contenders].reset_index()
    cells = rows["seconds"].map(seconds_of) + " (" + rows["speed_up"].map(rate_of) + ")"
    long = {"": rows["contender"].replace(BASELINES), "rate": rows["rate"].map(title), "cell": cells}
    return (
        pd.DataFrame(long).pivot_table("cell", "", "rate", "first", sort=False).rename_axis(None, axis=1).reset_index()
    )


def _parts_of(frame: pd.DataFrame) -> pd.DataFrame:
    rows = frame.set_index("contender").loc[["none ring", *BEST, "qsgd 4 bits"]]
    return (
        rows[["encode", "wire", "wait", "decode", "other"]]
        .map(seconds_of)
        .assign(**{"on the wire": rows["on_wire"].map(num_bytes)})
        .rename_axis("")
        .reset_index()
    )


def _to_loss(rate: str, methods: str, task: str = "") -> str:
    """Return the range of shares of dense training's seconds until the lower of two losses.

    Args:
        rate: of the links.
        methods: a pattern of the names of methods.
        task: a part of the name of the task.
    """
    frame = results.load("bench-training")
    frame = frame[frame["loss"].isin([0.02, 2.4]) & (frame["rate"] == rate) & frame["task"].str.contains(task)]
    share = 100 * frame["share"][frame["method"].str.contains(methods)]
    return f"{share.min():.0f} to {share.max():.0f} %"


def _codec() -> pd.DataFrame:
    frame = results.load("codec").set_index("method")
    one = frame["net"].isna()
    others = results.load("codec-peers").set_index("method")
    others = others[others["peer"].isin(PEERS)]
    columns = {
        "one tensor": frame["copies"][one].map(number),
        "ResNet-50's tensors": frame["copies"][~one].map(number),
        "another implementation": others["copies"].map(number) + " (" + others["peer"].map(PEERS) + ")",
    }
    return pd.DataFrame(columns).loc[CODECS].rename_axis("method").reset_index()


def _exchange() -> pd.DataFrame:
    frame = results.load("one-exchange").set_index("method").loc[[*EXCHANGES, "topk like fft"]]
    shares = frame[["one_exchange", "whole_run"]].map(percent)
    shares.columns = ["one exchange", "whole run"]
    return shares.assign(ratio=frame["ratio"].map(rate_of)).reset_index()
