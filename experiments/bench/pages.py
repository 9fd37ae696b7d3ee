"""What ``docs/build.py`` gives to the templates of the pages on benchmarks and on one exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from experiments.bench.report import speed_ups
from experiments.cluster.rates import title
from experiments.report import results
from experiments.report.numbers import num_bytes, number, percent, rate_of, seconds_of

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
        "parts": _parts(resnet[resnet["rate"] == "1gbit"]),
        "nets": nets.unstack()[[*NETS]].rename(columns=NETS).loc[BEST].rename_axis("").reset_index(),
        "hooks": _by_rate(frames["ddp_hooks"], HOOKS),
        "gpu": _by_rate(frames["ddp_cuda"], HOOKS),
        "to_loss": _to_loss,
    }


def one_exchange(page: str) -> dict[str, Any]:
    """Return the tables of ``docs/templates/one-exchange.md``."""
    return {"codec": _codec(), "gpu": _codec_gpu(), "exchange": _exchange()}


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


def _wide(cells: pd.Series, index: pd.Series, columns: pd.Series) -> pd.DataFrame:
    """Return texts as a table."""
    long = pd.DataFrame({"": index, "columns": columns, "cell": cells})
    return long.pivot_table("cell", "", "columns", "first", sort=False).rename_axis(None, axis=1).reset_index()


def _by_rate(frame: pd.DataFrame, contenders: list[str]) -> pd.DataFrame:
    """Return a table of contenders by rate: seconds, and how many times as fast as the best dense all-reduce."""
    rows = frame.set_index("contender").loc[contenders].reset_index()
    cells = rows["seconds"].map(seconds_of) + " (" + rows["speed_up"].map(rate_of) + ")"
    return _wide(cells, rows["contender"].replace(BASELINES), rows["rate"].map(title))


def _parts(frame: pd.DataFrame) -> pd.DataFrame:
    rows = frame.set_index("contender").loc[["none ring", *BEST, "qsgd 4 bits"]]
    parts = rows[["encode", "wire", "wait", "decode", "other"]].map(seconds_of)
    return parts.assign(**{"on the wire": rows["on_wire"].map(num_bytes)}).rename_axis("").reset_index()


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


def _codec_gpu() -> pd.DataFrame:
    frame = results.load("codec-cuda").set_index("method")
    return frame["copies"].map(number).rename("copies").reset_index()


def _exchange() -> pd.DataFrame:
    frame = results.load("one-exchange").set_index("method").loc[[*EXCHANGES, "topk like fft"]]
    shares = frame[["one_exchange", "whole_run"]].map(percent)
    shares.columns = ["one exchange", "whole run"]
    return shares.assign(ratio=frame["ratio"].map(rate_of)).reset_index()
