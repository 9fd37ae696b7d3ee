"""Variables and pictures of the pages that are about no single experiment: README and "Which method?"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.bench.report import two_levels
from experiments.cluster.hosts import title
from experiments.cost_model import scale
from experiments.momentum import report as study
from experiments.report import plots, results, statistics
from experiments.report.numbers import rate_of
from experiments.sharded import report as report_of_shards
from experiments.to_accuracy import report

DOCS = Path(__file__).resolve().parent
#: contender of experiments/results/to-accuracy.json -> its name on the pages
NAMES = {
    "dense": "dense",
    "fp16": "PyTorch's fp16 hook",
    "ddp_powersgd_r4": "PyTorch's PowerSGD hook, rank 4",
    "acpsgd@matrix_rank=8": "ACP-SGD, rank 8",
    "auto": "auto",
    "noop": "no communication",
}
COMPRESSED = {"topk@values=qsgd4", "topk@values=qsgd4,beta1=0"}  #: what ``auto`` does where it is not given up
#: methods of experiments/results/scale-nodes.json that the page on nodes shows
AT_SCALE = ("dense", "fp16", "scalecom 100x", "topk 0.5 %", "powersgd rank 1", "qsgd 4 bits")
RACES = {
    "mlp": "MLP, 5.8 million parameters: 84 %",
    "cnn": "convolutions, 3.2 million: 80 %",
    "lstm": "LSTM, 2.0 million: 2.7 bits",
    "transformer": "transformer, 1.8 million, AdamW: 3.0 bits",
}
#: contender and task of experiments/results/momentum.json -> names on the page
CONTENDERS = {
    "dense": "dense",
    "topk:plain": "top-k, momentum kept",
    "topk": "top-k",
    "gaussiank": "Gaussian-k",
    "scalecom_48x": "ScaleCom, 48x",
    "redsync": "RedSync",
    "gtopk": "gTop-k",
    "dgc": "DGC",
    "powersgd_r4": "PowerSGD, rank 4",
    "powersgd_r1": "PowerSGD, rank 1",
}
NETS = {
    "mlp": "MLP of 1.9 million",
    "cnn": "CNN with BatchNorm",
    "lstm": "LSTM, text",
    "mnist_example": "Horovod's MNIST example",
    "transformer": "transformer, AdamW",
}
FORMS = {"plain": ", keep", "": ", adapt", "cancelled": ", cancel"}
REMEDIES = {
    "topk:plain": "top-k, momentum kept",
    "topk": "top-k",
    "topk:cancelled": "top-k, momentum cancelled",
    "dgc": "DGC",
    "gmc": "GMC",
    "lowpass:plain": "low-pass filter, β = 0.1",
    "regtopk:plain": "RegTop-k",
    "regtopk": "RegTop-k, momentum adapted",
    "ef21_sgdm": "EF21-SGDM",
}
#: contenders and tasks of experiments/results/momentum-adam.json and momentum-muon.json -> names on the page
ADAM = {
    "dense": "dense",
    "topk": "top-k: in the buffer",
    "topk@beta1=0:plain": "top-k: beta1 = 0",
    "topk@values=qsgd4": "`auto`: in the buffer",
    "topk@values=qsgd4,beta1=0:plain": "`auto`: beta1 = 0",
    "powersgd_r4": "PowerSGD, rank 4: in the buffer",
    "powersgd_r4@beta1=0:plain": "PowerSGD, rank 4: beta1 = 0",
    "acpsgd_r4": "ACP-SGD, rank 4: in the buffer",
    "acpsgd_r4@beta1=0:plain": "ACP-SGD, rank 4: beta1 = 0",
}
ADAM_NETS = {"transformer": "transformer, text", "lstm_adamw": "LSTM, text", "cnn_adamw": "CNN with BatchNorm"}
MUON = {
    "dense": "dense",
    "topk_kept": "top-k: momentum kept",
    "topk": "top-k: c from the wait",
    "topk:cancelled": "top-k: c = 1",
    "powersgd_kept": "PowerSGD, rank 4: momentum kept",
    "powersgd_r4": "PowerSGD, rank 4: c from the wait",
    "powersgd_r4:cancelled": "PowerSGD, rank 4: c = 1",
}
#: contenders and trainings of experiments/results/local-steps.json -> names on the page
OUTER = "outer_lr=1,outer_momentum=0.5"
SPARSE = f"local@every=10,method=topk,density=0.01,values=qsgd4,{OUTER}"
LOCAL = {
    "dense": "every step, uncompressed",
    "dense@lr=2": "every step, twice the learning rate",
    "local@every=30": "30, uncompressed",
    "local@every=30,method=qsgd": "30, QSGD",
    "local@every=100,method=qsgd": "100, QSGD",
    "local@every=30,outer_lr=1,outer_momentum=0": "30, `outer=None`",
    SPARSE: "10, milder, top-k 1 %, 4 bits",
    f"local@every=30,method=topk,density=0.03,values=qsgd4,{OUTER}": "30, milder, top-k 3 %, 4 bits",
    "local@every=30,method=topk,density=0.03,values=qsgd4:plain": "30, top-k 3 %, 4 bits",
    "local@every=30,method=topk,density=0.01:plain": "30, top-k 1 %",
    "local@every=30,method=powersgd,matrix_rank=4:plain": "30, PowerSGD, rank 4",
    "local@every=30,method=qsgd,warmup=100": "30, warm-up, QSGD",
    "local@every=30,warmup=250": "30, warm-up of half",
    f"{SPARSE},warmup=100": "10, warm-up, milder, top-k 1 %, 4 bits",
}
#: contenders and nets of local-steps-small.json; the MLP's dense runs are in local-steps.json
SMALL = {
    "dense": "every step, uncompressed",
    f"local@every=30,method=topk,density=0.08,values=qsgd4,{OUTER}": "30, milder, top-k 8 %, 4 bits",
    "local@every=30,method=qsgd": "30, QSGD",
    "local@every=10,method=qsgd": "10, QSGD",
}
SMALL_TRAINED = {
    "mlp": "MLP, points",
    "cnn": "convolutions, points",
    "lstm": "LSTM, bits",
    "mlp_by_label": "MLP, uneven classes, points",
}
RACED = {
    "noop": "no communication",
    "powersgd_r4": "every step, PowerSGD, rank 4",
    "local@every=30,method=qsgd": "30, QSGD",
    SPARSE: LOCAL[SPARSE],
}
STREAM = "fragments=6,delay=4,mixing=0.5"
STREAMED = {
    "noop": "no communication",
    "local@every=30,method=qsgd": "30, QSGD",
    f"local@every=30,method=qsgd,{STREAM}": "… streamed",
    f"local@every=30,method=topk,density=0.03,values=qsgd4,{OUTER}": "30, milder, top-k 3 %, 4 bits",
    f"local@every=30,method=topk,density=0.03,values=qsgd4,{OUTER},{STREAM}": "… streamed",
}
TRAINED = {
    "mlp 4": "MLP, points",
    "mlp 8": "MLP, 8 ranks",
    "transformer 4": "transformer, AdamW, bits",
    "transformer 4 decays": "rate decays",
}
#: contenders of experiments/results/methods-accuracy.json and methods-times.json -> names on the page
COMPARED = {
    "noop": "no communication",
    "dense": "dense",
    "fp16": "PyTorch's fp16 hook",
    "qsgd": "QSGD, 4 bits",
    "blockwise": "blockwise, int8",
    "blockwise@values=fp8_e4m3": "blockwise, FP8 E4M3",
    "blockwise@values=int4": "blockwise, int4",
    "blockwise@values=int4,rotation=true": "blockwise, int4, rotated",
    "natural": "natural compression",
    "onebit": "1-bit SGD",
    "onebit_adam": "signSGD after 100 dense steps",
    "powersgd_r4": "PowerSGD, rank 4",
    "topk": "top-k, 1 %",
    "gtopk@density=0.01": "gTop-k, 1 %",
    "oktopk@density=0.01": "Ok-Topk, 1 %",
    "arctopk@density=0.01": "ARC-Top-K, 1 %",
    "scalecom_48x": "ScaleCom, 48x",
}
STEPS = {"fnn3": 300, "lenet5": 300}  #: of trainings that are not 1500 steps long
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}


def which_method(page: str) -> dict[str, Any]:
    """Return the tables, the numbers and the picture of "Which method?"."""
    frame = times(results.load("to-accuracy"))
    host = frame[(frame.device == "cpu") & (frame.driver == "ddp")]
    one = host[(host.rate == "1gbit") & host.race.isin(list(RACES))]
    mlp = host[host.race == "mlp"]
    rows = host.set_index(["race", "contender", "rate"])
    return {
        "by_net": pivot(one, "race", RACES, "training"),
        "by_link": pivot(mlp, "rate", LINKS, "link"),
        "at": lambda race, contender, rate="1gbit": rows.loc[race, contender, rate],
        "seconds": picture(mlp),
    }


def readme(page: str) -> dict[str, Any]:
    """Return the numbers of README: those of "Which method?", without its picture, and one of FSDP2's guide."""
    numbers = {name: value for name, value in which_method(page).items() if not isinstance(value, Figure)}
    sharded = report_of_shards.times(results.load("sharded")).set_index(["rate", "contender"])
    return {**numbers, "fsdp": f"{sharded.of_bf16['1gbit', 'qsgd4+int8']:.2f}"}


def times(records: pd.DataFrame) -> pd.DataFrame:
    """Return a row per training, link and contender. ``assumed``: seconds are those of dense training's steps."""
    where = ["race", "driver", "rate", "device"]
    runs = report.outcomes(records)
    # auto is its method where compression is kept, and was timed as such where it is given up
    runs.loc[runs.contender.isin(COMPRESSED) & (runs.rate != "10gbit"), "contender"] = "auto"
    dense = runs[runs.contender == "dense"].set_index([*where, "seed"]).seconds.rename("dense_seconds")
    runs = runs.join(dense, on=[*where, "seed"])
    runs["of_dense"] = runs.seconds / runs.dense_seconds
    frame = runs.groupby([*where, "contender"], sort=False, as_index=False).agg(
        milliseconds=("milliseconds", "first"),
        p95=("p95", "first"),
        longest=("longest", "first"),
        seeds=("seed", "count"),
        seconds=("seconds", lambda seconds: seconds.mean(skipna=False)),
        of_dense=("of_dense", "mean"),
        score=("score", "mean"),
    )
    rows = frame[frame.contender == "dense"].set_index(where)
    frame = frame.join((rows.seconds / rows.milliseconds).rename("dense_steps"), on=where)
    frame["assumed"] = frame.contender.isin(["fp16", "auto", "noop"]) & frame.seconds.isna()
    frame.loc[frame.assumed, "seconds"] = frame.milliseconds * frame.dense_steps
    return frame


def pivot(frame: pd.DataFrame, index: str, names: dict[str, str], title: str) -> pd.DataFrame:
    """Return a table of seconds to the target: a row per value of ``index``, a column per contender."""
    out = []
    for value, name in names.items():
        rows = frame[frame[index] == value].set_index("contender", drop=False)
        cells = {title: name}
        for contender, label in NAMES.items():
            cells[label] = cell(rows.loc[contender]) if contender in rows.index else "–"
        cells["auto"] = f"**{cells['auto']}**"
        out.append(cells)
    return pd.DataFrame(out)


def cell(row: pd.Series) -> str:
    """Return seconds, with a star where the number of steps is that of dense training."""
    if pd.isna(row.seconds):
        return "not reached" if row.seeds else "–"
    return f"{row.seconds:.0f}{' *' if row.assumed and row.contender == 'fp16' else ''}"


def picture(frame: pd.DataFrame) -> Figure:
    """Draw seconds to the target against the link's speed."""
    drawn, (ax,) = plots.figure(1, height=3.2)
    grey = {"dense": "0.35", "noop": "0.65"}
    for number, (contender, label) in enumerate(NAMES.items()):
        rows = frame[frame.contender == contender].set_index("rate").reindex(list(LINKS))
        style = {"color": grey.get(contender, f"C{number - 1}"), "linestyle": "--" if contender in grey else "-"}
        width = 3 if contender == "auto" else 1.5
        ax.plot(list(LINKS.values()), rows.seconds, "o", markersize=4, label=label, linewidth=width, **style)
    ax.set(yscale="log", xlabel="speed of the links", ylabel="seconds to 84 % (less is better)")
    ax.set_yticks([20, 50, 100, 200, 500], ["20", "50", "100", "200", "500"])
    ax.minorticks_off()
    drawn.legend(loc="outside lower center", ncols=3)
    return drawn


def nodes(page: str) -> dict[str, Any]:
    """Return the tables and the picture of the page on nodes."""
    found = results.load("scale-nodes")
    frame = found[found.method.isin(AT_SCALE)].copy()
    frame["nodes"] = frame.workers // found.attrs["per_host"]
    frame["rate"] = frame.rate.map(title)
    seconds = frame.set_index(["levels", "method", "rate", "nodes"]).seconds
    gain = (seconds[1] / seconds[2]).rename("gain").reset_index()
    gain = gain[gain.nodes.isin([8, 64, 512])]
    gain["column"] = gain.rate + ": " + gain.nodes.astype(str) + " nodes"
    return {
        **two_levels(),
        "at_scale": scale.draw(frame, "nodes"),
        "gain": gain.pivot_table("gain", "method", "column", sort=False).map(rate_of).reset_index(),
    }


def local_steps(page: str) -> dict[str, Any]:
    """Return the tables of the page on local steps: gaps, and times with seconds to the target."""
    found = study.summary(results.load("local-steps"))
    found = found[found.seeds > 1].copy()
    found["column"] = found.task + " " + found.ranks.astype(str) + found.decays.map({False: "", True: " decays"})
    found["cell"] = [gap_cell(row) for row in found.itertuples()]
    gaps = wide(found, {"contender": LOCAL}, {"column": TRAINED}).rename(columns={"contender": "exchange"})
    ratios = found.groupby("contender").ratio.max().reindex(list(LOCAL))
    gaps.insert(1, "fewer bytes", [rate_of(ratio) for ratio in ratios])
    runs = results.load("to-accuracy")
    trained = runs[(runs.kind == "train") & (runs.race == "mlp") & runs.contender.isin(list(RACED))]
    raced = times(pd.concat([trained, results.load("local-steps-race")], ignore_index=True))
    raced["cell"] = [
        f"{row.milliseconds:.0f} ms" + ("" if pd.isna(row.seconds) else f", {row.seconds:.0f} s")
        for row in raced.itertuples()
    ]
    rates = {rate: title(rate) for rate in ("1gbit", "100mbit", "20mbit")}
    timed = wide(raced, {"contender": RACED}, {"rate": rates}).rename(columns={"contender": "exchange"})
    return {"gaps": gaps, "small": small(), "times": timed, "streams": streams()}


def small() -> pd.DataFrame:
    """Return the table of gaps with a thousand times fewer bytes, and with classes that differ by rank."""
    runs = pd.concat([results.load(name) for name in ("local-steps", "local-steps-small")], ignore_index=True)
    runs = runs[(runs.steps == 500) & (runs.ranks == 4) & runs.task.isin(list(SMALL_TRAINED))]
    found = study.summary(runs)
    found["cell"] = [gap_cell(row) for row in found.itertuples()]
    return wide(found, {"contender": SMALL}, {"task": SMALL_TRAINED}).rename(columns={"contender": "exchange"})


def streams() -> pd.DataFrame:
    """Return the table of streaming at 100 Mbit/s: milliseconds of steps, and seconds to the target."""
    found = times(results.load("local-steps-times")).set_index("contender").loc[list(STREAMED)]
    shown = found[["milliseconds", "p95", "longest"]].map("{:.0f} ms".format)
    shown.columns = ["a step", "95th percentile", "longest"]
    shown["seconds to 84 %"] = ["–" if pd.isna(each) else f"{each:.0f}" for each in found.seconds]
    return shown.rename(index=STREAMED).rename_axis("exchange").reset_index()


def momentum(page: str) -> dict[str, Any]:
    """Return the picture of "Momentum"."""
    return {"scores": study.picture(results.load("momentum"))}


def momentum_results(page: str) -> dict[str, Any]:
    """Return the tables of "Momentum, measured"."""
    found = study.summary(results.load("momentum"))
    found = found[found.steps == found.task.map(STEPS).fillna(1500)].copy()
    adam = (found.task == "transformer") & found.contender.str.endswith(":cancelled")  # beta1 = 0, as auto has it
    found.loc[adam, "contender"] = found.contender.str.removesuffix(":cancelled")
    gaps = found[found.contender.isin(list(CONTENDERS)) & found.task.isin(list(NETS))].copy()
    gaps["cell"] = [gap_cell(row) for row in gaps.itertuples()]
    rates = found[found.task.isin(["fnn3", "lenet5"])].copy()
    rates["method"], rates["form"] = rates.contender.str.split(":").str[0], rates.contender.str.split(":").str[1]
    rates["column"] = rates.task.map({"fnn3": "FNN-3", "lenet5": "LeNet-5"}) + rates.form.fillna("").map(FORMS)
    rates["cell"] = ["diverged" if row.diverged else signed(row.gap, 1) for row in rates.itertuples()]
    columns = [net + form for net in ("FNN-3", "LeNet-5") for form in FORMS.values()]
    methods = {name: CONTENDERS[name] for name in ("topk", "scalecom_48x", "powersgd_r4")}
    return {
        "gaps": wide(gaps, {"contender": CONTENDERS}, {"task": NETS}),
        "largest_rate": wide(rates, {"method": methods}, {"column": dict(zip(columns, columns, strict=True))}),
        "remedies": remedies(found),
        "against_beta1": against_beta1(),
        "adam": optimizer_gaps("momentum-adam", ADAM, ADAM_NETS),
        "muon": optimizer_gaps("momentum-muon", MUON, {"transformer_muon": "transformer, text"}),
    }


def against_beta1() -> dict[str, str]:
    """Return what adapting Adam's momentum in its buffer loses against beta1 = 0, with the upper end of its interval.

    Positive is worse. The keys are "task contender".
    """
    frame = results.load("momentum-adam")
    frame["loss"] = frame.score.where(frame.unit != "%", -frame.score)
    texts = {}
    for name in ("topk", "topk@values=qsgd4", "powersgd_r4", "acpsgd_r4"):
        before = f"{name}{',' if '@' in name else '@'}beta1=0:plain"
        pairs = frame[frame.contender.isin([name, before])]
        for row in statistics.gaps(pairs, "loss", "contender", before, ["task", "seed"]).itertuples():
            if row.contender == name:
                places = 1 if row.task == "cnn_adamw" else 3
                texts[f"{row.task} {name}"] = f"{signed(row.mean, places)} ({signed(row.high, places)})"
    return texts


def optimizer_gaps(name: str, contenders: dict[str, str], nets: dict[str, str]) -> pd.DataFrame:
    """Return the gaps of published results to dense training, in a row per contender and a column per net."""
    found = study.summary(results.load(name))
    found["cell"] = [gap_cell(row) for row in found.itertuples()]
    return wide(found, {"contender": contenders}, {"task": nets})


def gap_cell(row: Any) -> str:
    """Return a gap with half of its interval's width, in bold if it is closed; of dense training the score."""
    places = 2 if row.unit == "%" else 3
    if pd.isna(row.gap):
        return f"{row.score:.{places}f} {row.unit}"
    text = f"{signed(row.gap, places)} ± {row.high - row.gap:.{places}f}"
    return f"**{text}**" if row.closed else text


def remedies(found: pd.DataFrame) -> pd.DataFrame:
    """Return the table of remedies: gaps at the best rate, with the rate's factor and few seeds in parentheses."""
    nets = {"fnn3": "FNN-3", "lenet5": "LeNet-5", "lstm": "LSTM, text"}
    best = study.at_best_rates(found)
    best = best[best.contender.isin(list(REMEDIES)) & best.task.isin(list(nets))].copy()
    best["cell"] = [remedy_cell(row) for row in best.itertuples()]
    return wide(best, {"contender": REMEDIES}, {"task": nets})


def remedy_cell(row: Any) -> str:
    """Return a gap, with the factor of the learning rate if it is not 1, and the number of seeds if they are few."""
    notes = [] if row.rate == 1 else [f"×{row.rate:g}"]
    notes += [] if row.seeds > 2 else ["1 seed" if row.seeds == 1 else "2 seeds"]
    gap = signed(row.gap, 2 if row.unit == "%" else 3) if row.seeds == 1 else gap_cell(row).strip("*")
    return gap + (f" ({', '.join(notes)})" if notes else "")


def compared() -> pd.DataFrame:
    """Return the table of methods on the same trainings and links: ratio, gaps, and median of a step's time."""
    found = study.summary(results.load("methods-accuracy"))
    found = found[found.contender != "dense:cancelled"].copy()
    found["contender"] = found.contender.str.removesuffix(":cancelled")  # beta1 = 0, as auto has it
    found["cell"] = [
        f"{row.score:.2f} {row.unit}" if pd.isna(row.gap) else signed(row.gap, 2) for row in found.itertuples()
    ]
    frame = wide(found, {"contender": COMPARED}, {"task": {"mlp": "MLP, points", "transformer": "transformer, bits"}})
    ratios = found.sort_values("task").groupby("contender").ratio.first().reindex(list(COMPARED))
    frame.insert(1, "compression ratio", [rate_of(ratio) for ratio in ratios])
    timed = report.outcomes(results.load("methods-times"))
    timed["cell"] = [f"{each:.0f} ms" for each in timed.milliseconds]
    steps = wide(timed, {"contender": COMPARED}, {"rate": {rate: LINKS[rate] for rate in ("1gbit", "100mbit")}})
    return frame.merge(steps, on="contender").rename(columns={"contender": "method"})


def sent() -> pd.DataFrame:
    """Return the table of what a rank sends of ResNet-50's gradients among 2 and 8 emulated hosts."""
    frame = results.load("bench-sparse")
    frame = frame[frame.sent.notna()].copy()
    frame["cell"] = [f"{row.sent / 1e6:.2f}, {row.on_wire / 1e6:.2f}" for row in frame.itertuples()]
    names = {name: name for name in frame.contender.unique()}
    table = wide(frame, {"contender": names}, {"hosts": {n: f"{n} hosts" for n in (2, 8)}})
    return table.rename(columns={"contender": "method"})


def results_page(page: str) -> dict[str, Any]:
    """Return the tables of "Results": ratio and loss of each method on both tasks, and newer methods beside older."""
    frame = results.load("training-all-methods")
    text, digits = (frame[frame.task == task].set_index("method") for task in ("bytes", "digits"))
    table = pd.DataFrame(
        {
            "method": method,
            "compression ratio": f"{row.ratio:.3g}x",
            "digits: points of accuracy": "" if pd.isna(row.gap) else signed(digits.gap[method], 2),
            "text: bits per byte": "" if pd.isna(row.gap) else signed(row.gap, 3),
        }
        for method, row in text.iterrows()
    )
    return {
        "compared": compared(),
        "sent": sent(),
        "methods_table": table.iloc[1:],
        "dense": {"digits": digits.score["none"], "text": text.score["none"]},
    }


def wide(frame: pd.DataFrame, index: dict[str, dict[str, str]], columns: dict[str, dict[Any, str]]) -> pd.DataFrame:
    """Return a table of the column ``cell``: {column of the frame: {value: name}} for its rows and its columns."""
    ((row, rows),) = index.items()
    ((column, names),) = columns.items()
    table = (
        frame.pivot(index=row, columns=column, values="cell")
        .reindex(index=list(rows), columns=list(names))
        .rename(index=rows)
    )
    table.columns = pd.Index(names.values())
    return table.fillna("–").rename_axis(row).reset_index()


def signed(value: float, places: int) -> str:
    """Return a number with its sign: ``+0.5``, ``−0.5``, ``0.0``."""
    return f"{value:+.{places}f}".replace("-", "−") if value else f"{0:.{places}f}"


def reliability(page: str) -> dict[str, Any]:
    """Return how many launches with a fault there were, and the seconds of the slowest that ended with an error."""
    frame = results.load("chaos")

    def slowest(*faults: str) -> float:
        return float(frame[frame.fault.isin(faults)].slowest_error_s.max())

    return {**frame[["launches", "recovered", "error"]].sum().to_dict(), "slowest": slowest}
