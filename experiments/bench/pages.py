"""What ``docs/build.py`` gives to the template of the page on benchmarks."""

from __future__ import annotations

from typing import Any

import pandas as pd

from experiments.bench.report import speed_ups
from experiments.report import results
from experiments.report.numbers import num_bytes, number, rate_of, seconds_of

__all__ = ["context"]

BENCHES = ("resnet50", "ddp_hooks", "ddp_cuda", "awake", "resnet32", "gpt2", "alexnet", "vgg16_conv", "saved")
RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
BASELINES = {"none ddp": "dense, DDP", "fp16 ddp": "DDP's fp16 hook", "powersgd ddp": "DDP's PowerSGD hook, rank 1"}
#: the bars of the picture
DRAWN = ["none ring", "none mpi", "fp16 ddp", "powersgd ddp", "topk 0.5 %", "scalecom 100x", "dgc 0.1 %", "gtopk 0.5 %"]
DRAWN += ["gaussiank 0.5 %", "randomk 1 %", "powersgd rank 1", "qsgd 4 bits", "signsgd", "fft", "fp16 compressor"]
BEST = ["topk 0.5 %", "scalecom 100x", "powersgd rank 1"]
HOOKS = ["fp16 ddp", "powersgd ddp", "fp16 in DDP", "powersgd rank 1 in DDP", "topk 1 % in DDP", "scalecom 48x in DDP"]
CODECS = ["fp16", "scalecom", "qsgd", "signsgd", "topk", "dgc", "powersgd", "fft", "gradiveq"]
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
EXCHANGES = ["qsgd 4 bits", "signsgd", "powersgd rank 4", "topk density=0.01", "topk qsgd4", "fft density=0.15"]


def context(page: str) -> dict[str, Any]:
    """Return the numbers, tables and pictures of ``docs/templates/bench.md``."""
    frames = {name: results.load(f"bench-{name}") for name in BENCHES}

    def row(bench: str, contender: str, rate: str, set: str | None = None) -> pd.Series:
        frame = frames[bench]
        found = frame[(frame["contender"] == contender) & (frame["rate"] == rate)]
        return (found if set is None else found[found["set"] == set]).iloc[0]

    def up(*place: str) -> str:
        return rate_of(row(*place)["speed_up"])

    def took(*place: str) -> str:
        return seconds_of(row(*place)["seconds"])

    resnet = frames["resnet50"]
    return {
        "up": up,
        "took": took,
        "speed_up": speed_ups(resnet[resnet["contender"].isin(DRAWN)].assign(set="ResNet-50", rate=_rates(resnet))),
        "by_rate": _by_rate(resnet, [*BASELINES, *BEST, "qsgd 4 bits"]),
        "parts": _parts(resnet[resnet["rate"] == "1gbit"]),
        "nets": pd.DataFrame({title: _triples(frames[net]) for net, title in NETS.items()})
        .rename_axis("")
        .reset_index(),
        "hooks": _by_rate(frames["ddp_hooks"], HOOKS),
        "gpu": _by_rate(frames["ddp_cuda"], HOOKS),
        "to_loss": _to_loss(),
        "codec": _codec(),
        "exchange": _exchange(),
    }


def _rates(frame: pd.DataFrame) -> pd.Series:
    return frame["rate"].map(RATES)


def _triples(frame: pd.DataFrame) -> pd.Series:
    """Return the speed-ups of the best methods at the rates that were measured, such as ``42.9x, 11.7x, 2.81x``."""
    found = frame.groupby("contender")["speed_up"].agg(lambda values: ", ".join(map(rate_of, values)))
    return found.reindex(BEST)


def _wide(frame: pd.DataFrame, index: str, columns: str) -> pd.DataFrame:
    """Return the texts of the column "cell" as a table."""
    wide = frame.pivot_table("cell", index, columns, "first", sort=False)
    return wide.rename_axis(None, axis=1).rename_axis("").reset_index()


def _by_rate(frame: pd.DataFrame, contenders: list[str]) -> pd.DataFrame:
    """Return a table of contenders by rate: seconds, and how many times as fast as the best dense all-reduce."""
    rows = frame.set_index("contender").loc[contenders].rename(BASELINES).reset_index()
    cells = rows["seconds"].map(seconds_of) + " (" + rows["speed_up"].map(rate_of) + ")"
    return _wide(rows.assign(cell=cells, rate=_rates(rows)), "contender", "rate")


def _parts(frame: pd.DataFrame) -> pd.DataFrame:
    rows = frame.set_index("contender").loc[
        ["none ring", "topk 0.5 %", "scalecom 100x", "powersgd rank 1", "qsgd 4 bits"]
    ]
    parts = {name: rows[name].map(seconds_of) for name in ("seconds", "encode", "wire", "wait", "decode", "other")}
    return pd.DataFrame({**parts, "on the wire": rows["on_wire"].map(num_bytes)}).rename_axis("").reset_index()


def _to_loss() -> pd.DataFrame:
    """Return the share of dense training's seconds until the lower of two losses, per method, task and rate."""
    frame = results.load("bench-training")
    frame = frame[frame["loss"].isin([0.02, 2.4]) & (frame["rate"] != "10gbit") & (frame["method"] != "none")]
    places = frame["task"].map({"digits": "0.5 MB", "bytes": "1.9 MB"}) + ", " + _rates(frame)
    shares = frame["share"].map(lambda share: f"{100 * share:.0f} %")
    return _wide(frame.assign(place=places, cell=shares), "method", "place")


def _codec() -> pd.DataFrame:
    frame = results.load("codec")
    one = frame[frame["net"].isna()]
    ours = one[one["peer"].isna()].set_index("method")
    of_net = frame[frame["net"] == "resnet50"].set_index("method")["copies"]
    others = one[one["peer"].isin(list(PEERS))]
    other = {row["method"]: f"{number(row['copies'])} ({PEERS[row['peer']]})" for row in others.to_dict("records")}
    found = pd.DataFrame({"one tensor": ours["copies"], "ResNet-50's tensors": of_net})
    found = found.loc[CODECS].map(number)
    found["another implementation"] = pd.Series(other)
    return found.rename_axis("method").reset_index()


def _exchange() -> pd.DataFrame:
    frame = results.load("one-exchange").set_index("method").loc[[*EXCHANGES, "topk like fft"]]
    shares = {name: frame[name].map(lambda share: f"{100 * share:.3g} %") for name in ("one_exchange", "whole_run")}
    return pd.DataFrame(
        {"one exchange": shares["one_exchange"], "whole run": shares["whole_run"], "ratio": frame["ratio"].map(rate_of)}
    ).reset_index()
