"""The claims of ScaleCom's paper (Chen et al. 2020, arXiv 2104.11125): what is measured for each, and its verdict."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.output.table import MISSING, Table
from experiments.report.numbers import num_bytes, number, percent, rate_of
from experiments.reproduce import scalecom_figures as figures
from experiments.reproduce import scalecom_measures as measures
from experiments.reproduce import scalecom_settings as settings
from experiments.reproduce.claims import Claim, Paper, Report, Result, judge
from experiments.reproduce.rows import grouped, spread, text

NEAR, ENERGY, OFTEN = 0.3, 0.8, 0.8  #: largest distance, least share of energy, share of the steps
BITS, POINTS = 0.05, 0.5  #: bits per byte and points of accuracy that count as no loss
LARGE_POINTS = 1.0  #: of accuracy, with many workers
LEAST_RATES = {"48x": 40.0, "over 100x": 100.0}  #: with what stays dense, for the ratio's claim to be judged
SLOPES = 0.1  #: by which an exponent may differ from the dense one's

Row = dict[str, Any]


# -- S1, S2, S3: the ranks' residuals and the leader's selection ------------------------------------


def rows_of(results: Sequence[Result]) -> list[Row]:
    """What was seen in the watched trainings, with their settings."""
    return [{**of_unit(result), **row} for result in results for row in result["rows"]]


def of_unit(result: Result) -> Row:
    """The settings of a watched training by which it is compared with others."""
    found = result.unit.settings
    task, method = found["task"], found["method"]
    return {
        "net": task["net"],
        "batch": task["batch_size"],
        "rate": task["learning_rate"],
        "select": method["select"],
        "beta": settings.beta_of(method),
        "seed": found["seed"],
        "diverged": result["diverged"],
    }


def condition(row: Row) -> str:
    """A training's settings in words."""
    place = f"{row['net']}, batch {row['batch']}, learning rate {row['rate']:g}"
    return f"{place}, {row['select']}, β {row['beta']:g}"


def fraction(met: Iterable[bool]) -> float:
    """The share of those that are true."""
    return statistics.fmean(map(float, met))


def by_seed(rows: Sequence[Row], key: str) -> list[float]:
    """The median over steps, for each seed."""
    return [statistics.median(row[key] for row in one) for one in grouped(rows, "seed").values()]


def alike(results: Sequence[Result]) -> Report:
    """Are residuals alike, and does the leader's selection serve all?"""
    rows, cells, lines = rows_of(results), {}, []
    for (name,), some in grouped([{**row, "name": condition(row)} for row in rows], "name").items():
        shares = [
            (fraction(row["distance"] < NEAR for row in one), fraction(row["share"] > ENERGY for row in one))
            for one in grouped(some, "seed").values()
        ]
        cells[name] = [min(share) >= OFTEN for share in shares]
        first = some[0]
        lines.append(
            {
                **{key: str(first[key]) for key in ("net", "batch", "rate", "select", "beta")},
                "distance": spread(by_seed(some, "distance")),
                "near": spread([100 * near for near, _ in shares], lambda v: f"{v:.0f} %"),
                "share": spread(by_seed(some, "share")),
                "enough": spread([100 * enough for _, enough in shares], lambda v: f"{v:.0f} %"),
                "diverged": str(len({row["seed"] for row in some if row["diverged"]}) or MISSING),
            }
        )
    columns = [
        text("net", "net", "left"),
        text("batch", "batch"),
        text("rate", "learning rate"),
        text("select", "selection", "left"),
        text("beta", "β"),
        text("distance", "distance of residuals"),
        text("near", f"steps below {NEAR:g}"),
        text("share", "leader's share of the best energy"),
        text("enough", f"steps above {ENERGY:g}"),
        text("diverged", "seeds that diverged"),
    ]
    of = {select: [row for row in rows if row["select"] == select] for select in ("exact", "chunk")}
    told = "; ".join(
        f"{select}: distance {spread(by_seed(some, 'distance'))}, share {spread(by_seed(some, 'share'))}"
        for select, some in of.items()
    )
    worst = (
        f"no condition has both in {percent(OFTEN)} of the steps of every seed: of all steps, "
        f"{100 * fraction(row['distance'] < NEAR for row in rows):.0f} % have the distance and "
        f"{100 * fraction(row['share'] > ENERGY for row in rows):.0f} % the share"
    )
    return Report(
        judge(cells, worst),
        f"Medians over steps and settings: {told}.",
        [Table(columns, lines, "Medians over steps, then over seeds (least to largest).")],
        [figures.distances(rows, net) for net in settings.NETS] + [figures.quantiles(results)],
    )


def filtered(results: Sequence[Result]) -> Report:
    """Does the filter bring residuals together, at a large learning rate?"""
    rows = rows_of(results)
    cells: dict[str, list[bool]] = {}
    lines, changes = [], []
    for (net, select, batch, rate), some in grouped(rows, "net", "select", "batch", "rate").items():
        found: dict[float, dict[int, float]] = defaultdict(dict)
        for (beta, seed), one in grouped(some, "beta", "seed").items():
            found[beta][seed] = statistics.median(row["distance"] for row in one)
        both = found[1.0].keys() & found[0.1].keys()  # a training that diverged at once was not seen
        if not both:
            continue
        if rate == max(rate for _, rate in settings.WATCHED):
            cells[f"{net}, {select}"] = [found[0.1][seed] < found[1.0][seed] for seed in sorted(both)]
            changes += [found[0.1][seed] - found[1.0][seed] for seed in sorted(both)]
        lines.append(
            {
                "net": net,
                "select": select,
                "batch": str(batch),
                "rate": f"{rate:g}",
                "one": spread(list(found[1.0].values())),
                "filter": spread(list(found[0.1].values())),
            }
        )
    columns = [
        text("net", "net", "left"),
        text("select", "selection", "left"),
        text("batch", "batch"),
        text("rate", "learning rate"),
        text("one", "distance at β 1"),
        text("filter", "at β 0.1"),
    ]
    return Report(
        judge(cells, "for no net and selection is the distance smaller at β 0.1 in every seed"),
        f"At a learning rate of {max(rate for _, rate in settings.WATCHED):g} β = 0.1 changes the distance by "
        f"{spread(changes)} (median, least to largest over nets, selections and seeds).",
        [Table(columns, lines, "Medians over steps, then over seeds (least to largest).")],
        [figures.distances(rows, net) for net in settings.NETS],
    )


def lemma(results: Sequence[Result]) -> Report:
    """Does the leader's selection leave more than Lemma 1 allows?"""
    rows = [
        {**row, **part, "tensor": tensor, "slack": part["bound"] - part["left"]}
        for row in rows_of(results)
        for tensor, part in row["tensors"].items()
    ]
    cells, lines = {}, []
    for (net, select), some in grouped(rows, "net", "select").items():
        seeds = grouped(some, "seed").values()
        cells[f"{net}, {select}"] = [all(row["slack"] >= -1e-6 for row in one) for one in seeds]
        lines.append(
            {
                "net": net,
                "select": select,
                "vectors": str(len(some)),
                "missed": spread(by_seed(some, "missed")),
                "left": spread(by_seed(some, "left")),
                "bound": spread(by_seed(some, "bound")),
                "slack": spread(by_seed(some, "slack")),
                "above": str(sum(row["slack"] < -1e-6 for row in some)),
            }
        )
    columns = [
        text("net", "net", "left"),
        text("select", "selection", "left"),
        text("vectors", "vectors"),
        text("missed", "d/k"),
        text("left", "left"),
        text("bound", "bound"),
        text("slack", "slack"),
        text("above", "above it"),
    ]
    total = sum(row["slack"] < -1e-6 for row in rows)
    return Report(
        judge(cells, f"the bound is broken {total} times in {len(rows)}"),
        f"{total} of {len(rows)} vectors are above the bound; slack {spread(by_seed(rows, 'slack'))}.",
        [
            Table(
                columns,
                lines,
                "‖ȳ − CLT(ȳ)‖²/‖ȳ‖² of the ranks' mean ȳ; medians over steps and tensors, then over seeds.",
            )
        ],
        [figures.bounds(rows)],
        [
            "It can be broken: where the d positions that are missed hold more than d/k of the energy of the k best, "
            "and the leader's other choices do not make up for it."
        ],
    )


# -- S4: many workers ------------------------------------------------------------------------------


def large_batch(results: Sequence[Result]) -> Report:
    """Does the filter help many workers at four times the learning rate?"""
    base = min(r.unit.settings["task"]["learning_rate"] for r in results)
    found: dict[int, dict[tuple[int, str], dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for r in results:
        given = r.unit.settings
        method, factor = given["method"], round(given["task"]["learning_rate"] / base)
        name = "none" if method["method"] == "none" else f"β {settings.beta_of(method):g}"
        found[given["ranks"]][factor, name][given["seed"]] = r["value"]
    times, cells = max(settings.FACTORS), dict[str, list[bool]]()
    lines, told, pictures = [], [], []
    for workers, values in found.items():
        names = list(dict.fromkeys(name for _, name in values))
        best, plain = values[times, "β 0.1"], values[times, "β 1"]
        # each seed's dense training at the learning rate that serves it best: at x4 dense may fail by itself
        dense = {s: max(values[f, "none"][s] for f in settings.FACTORS if finite(values[f, "none"][s])) for s in best}
        # a training that diverged is worse than any other
        cells[f"{workers} workers: β 0.1 above β 1 at x{times}"] = [
            best[s] > plain[s] or (finite(best[s]) and not finite(plain[s])) for s in best
        ]
        cells[f"{workers} workers: β 0.1 at x{times} within {LARGE_POINTS:g} point of the best dense"] = [
            best[s] >= dense[s] - LARGE_POINTS for s in best
        ]
        lines += [
            {
                "workers": str(workers),
                "rate": f"{base * factor:g} (x{factor})",
                "method": name,
                "value": spread(list(values[factor, name].values())),
                "gap": spread([v - dense[s] for s, v in values[factor, name].items()]),
            }
            for factor in settings.FACTORS
            for name in names
        ]
        told.append(
            f"with {workers} workers "
            + " and ".join(_gain(values[factor, "β 0.1"], values[factor, "β 1"], factor) for factor in settings.FACTORS)
            + f", and against the best dense {spread([best[s] - dense[s] for s in best])} at x{times}"
        )
        pictures.append(figures.sweep(values, settings.FACTORS, names, base, workers))
    columns = [
        text("workers", "workers"),
        text("rate", "learning rate"),
        text("method", "method", "left"),
        text("value", "held-out accuracy, %"),
        text("gap", "against the best dense, points"),
    ]
    return Report(
        judge(cells, "β 0.1 is neither above β 1 in every seed nor within a point of dense"),
        f"β 0.1 against β 1, in points: {'; '.join(told)}.",
        [Table(columns, lines, "Median over seeds (least to largest).")],
        pictures,
        ["The best dense is each seed's, at the learning rate of the two that serves it better."],
    )


def _gain(of: dict[int, float], against: dict[int, float], factor: int) -> str:
    """By how much one is better than the other at a learning rate; of seeds where neither diverged."""
    both = [of[s] - against[s] for s in of if finite(of[s]) and finite(against[s])]
    lost = len(against) - sum(map(finite, against.values()))
    diverged = f" (β 1 diverged in {lost} of {len(against)} seeds)" if lost else ""
    return f"{spread(both) if both else MISSING} at x{factor}{diverged}"


def finite(value: float) -> bool:
    """Whether a training ended."""
    return math.isfinite(value)


# -- S5: no loss -----------------------------------------------------------------------------------


def compared(results: Sequence[Result]) -> list[Row]:
    """The trainings of all tasks and settings, with what they lose against dense: points, or bits per byte."""
    known = {key(given): names for names, given in settings.settings(0).items()}
    tasks, rows = settings.tasks(settings.Scale()), []
    for r in results:
        found = r.unit.settings
        method, rate = known[key(found["method"])]
        task = next(name for name, t in tasks.items() if same(t, found["task"]))
        rows.append({"task": task, "method": method, "at": rate, "seed": found["seed"], "value": r["value"],
                     "rate": r["rate"]})  # fmt: skip
    dense = {(row["task"], row["seed"]): row["value"] for row in rows if row["method"] == "none"}
    for row in rows:
        gap = row["value"] - dense[row["task"], row["seed"]]
        row["loss"] = gap if row["task"] in settings.TEXTS else -gap
    return rows


def key(method: Row) -> str:
    """A method's settings without the length of a warm-up, which goes by the task's steps."""
    return str(sorted({name: value if name != "warmup" else True for name, value in method.items()}.items()))


def same(task: Row, other: Row) -> bool:
    """Whether two tasks are the same but for their length."""
    return all(task.get(name) == other.get(name) for name in ("task", "net", "learning_rate", "clip"))


def no_loss(results: Sequence[Result]) -> Report:
    """What is lost against dense training, by task, rate, selection and β?"""
    rows = compared(results)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    most = {task: BITS if task in settings.TEXTS else POINTS for task in tasks}
    cells = {
        f"{task} at {rate}, {method}": [row["loss"] < most[task] for row in some]
        for (task, rate, method), some in grouped(rows, "task", "at", "method").items()
        if rate in LEAST_RATES and method != "topk" and overall_of(rows, task, rate) >= LEAST_RATES[rate]
    }
    lines = []
    for (rate, method), some in grouped(rows, "at", "method").items():
        line = {"rate": rate or MISSING, "method": method}
        for task in tasks:
            one = [row["value" if method == "none" else "loss"] for row in some if row["task"] == task]
            line[task] = spread(one) if one else MISSING
        lines.append(line)
    columns = [text("rate", "ratio", "left"), text("method", "method", "left")]
    columns += [text(task, f"{task}, {'bits' if task in settings.TEXTS else 'points'}") for task in tasks]
    losses = {
        (method, at): [row["loss"] for row in rows if (row["method"], row["at"]) == (method, at) and
                       row["task"] not in settings.TEXTS]
        for method in ("exact, β 1", "chunk, β 0.1")
        for at in ("48x", "over 100x")
    }  # fmt: skip
    told = "; ".join(f"{method} at {at} {spread(each)}" for (method, at), each in losses.items())
    return Report(
        judge(cells, "no setting is that close to dense on any task in every seed"),
        f"Points behind dense on the pictures (median, least to largest over tasks and seeds): {told}.",
        [Table(columns, lines, "Behind dense, median over seeds (least to largest); dense: its own value, % or bits "
               "per byte.")],
        [figures.ratios(rows, tasks, ("topk", "exact, β 1", settings.HALF, "chunk, β 0.1"), most),
         figures.losses(rows, tasks)],
        [overall(rows, tasks)],
    )  # fmt: skip


def overall_of(rows: Sequence[Row], task: str, at: str) -> float:
    """The ratio of exact selection with what stays dense, the median over seeds; NaN where it was not trained."""
    some = [row["rate"] for row in rows if (row["task"], row["method"], row["at"]) == (task, "exact, β 1", at)]
    return statistics.median(some) if some else math.nan


def overall(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    """What of the ratios is left if all is counted, and where that is too little to be judged."""
    measured, small = [], []
    for task in tasks:
        of = {at: overall_of(rows, task, at) for at in LEAST_RATES}
        if not any(map(math.isnan, of.values())):
            measured.append(f"{task} {' and '.join(map(rate_of, of.values()))}")
        if any(rate < LEAST_RATES[at] for at, rate in of.items()):
            small.append(task)
    left = f" {' and '.join(small)}, much of which stays dense, is not judged." if small else ""
    return f"Ratios are those of large tensors; with what stays dense, exact selection has {'; '.join(measured)}.{left}"


# -- S6: convergence -------------------------------------------------------------------------------


def converges(results: Sequence[Result]) -> Report:
    """Does the mean of ‖∇f‖² fall with the number of steps as it does without compression?"""
    found: dict[str, dict[int, tuple[float, list[float]]]] = defaultdict(dict)
    lengths = results[0].unit.settings["lengths"]
    for r in results:
        method, seed = r.unit.settings["method"], r.unit.settings["seed"]
        name = "none" if method["method"] == "none" else f"{method['select']}, β {settings.beta_of(method):g}"
        found[name][seed] = (measures.slope(lengths, r["squares"]), r["squares"])
    dense = found["none"]
    cells = {
        name: [slope - dense[seed][0] <= SLOPES for seed, (slope, _) in each.items()]
        for name, each in found.items()
        if name != "none"
    }
    slopes = {name: [slope for slope, _ in each.values()] for name, each in found.items()}
    lines = [
        {"method": name, "slope": spread(each), "last": spread([squares[-1] for _, squares in found[name].values()])}
        for name, each in slopes.items()
    ]
    columns = [
        text("method", "method", "left"),
        text("slope", "exponent of T"),
        text("last", f"mean ‖∇f‖² at T = {lengths[-1]:,}"),
    ]
    return Report(
        judge(cells, "every exponent is larger than dense training's by more than the rule allows"),
        "Exponents: " + "; ".join(f"{name} {spread(each)}" for name, each in slopes.items()) + ".",
        [Table(columns, lines, "Median over seeds (least to largest).")],
        [figures.convergence({name: [s for _, s in each.values()] for name, each in found.items()}, lengths)],
    )


# -- S7: traffic -----------------------------------------------------------------------------------


def flat(results: Sequence[Result]) -> Report:
    """Do a rank's bytes grow with the number of ranks?"""
    found: dict[str, list[Row]] = defaultdict(list)
    world_sizes, n = results[0].unit.settings["world_sizes"], results[0].unit.settings["n"]
    for r in results:
        method = r.unit.settings["method"]
        found[method.get("select", method["method"])].append(r.found)
    ring = [2 * (p - 1) / p for p in world_sizes]
    lines, cells = [], {}
    for name, each in found.items():
        wire = each[0]["wire"]
        if name != "topk":
            # a ring transmits 2(p − 1)/p of what it sums; its pieces are whole elements
            kept = [
                len(set(one["sent"])) == 1
                and all(w <= 1.02 * one["sent"][0] * r for w, r in zip(one["wire"], ring, strict=True))
                for one in each
            ]
            cells[name] = kept
        lines.append(
            {
                "method": name,
                "sent": num_bytes(each[0]["sent"][0]),
                **{str(p): num_bytes(w) for p, w in zip(world_sizes, wire, strict=True)},
                "union": f"{percent(each[0]['union'][0])} to {percent(each[0]['union'][-1])}",
            }
        )
    columns = [text("method", "method", "left"), text("sent", "handed over")]
    columns += [text(str(p), f"on the wire, {p} ranks") for p in world_sizes]
    columns += [text("union", f"of the result not zero, {world_sizes[0]} to {world_sizes[-1]} ranks")]
    growth = {name: [one["wire"][-1] / one["wire"][0] for one in each] for name, each in found.items()}
    return Report(
        judge(cells, "its bytes grow with the ranks"),
        f"From {world_sizes[0]} to {world_sizes[-1]} ranks, what a rank transmits grows by a factor of "
        + "; ".join(f"{spread(each)} ({name})" for name, each in growth.items())
        + f"; a ring's 2(p − 1)/p by {number(ring[-1] / ring[0])}.",
        [Table(columns, lines, f"One exchange of n = {n:,} elements, k/n = 1 %, the first seed's.")],
        [figures.traffic(found, world_sizes, n)],
    )


WATCHED = (
    "FNN-3 and LeNet-5 on Fashion-MNIST, 4 simulated ranks, 100 steps (800 with --full) at k/n = 1 %, SGD with "
    "momentum 0.9; residuals and selections at 10 (50) of the steps, of all tensors of at least "
    f"{measures.LEAST} elements."
)

PAPER = Paper(
    "scalecom",
    "ScaleCom",
    'Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed '
    'Training", NeurIPS 2020 (arXiv 2104.11125).',
    ["fashion_mnist", "noisy_digits", "bytes"],
    [
        Claim(
            "S1",
            "The ranks' residuals are alike, so that one rank's selection serves all.",
            "Fig. 2 and assumption A1",
            f"{WATCHED} 32 examples per rank (with --full 8, too). Mean cosine distance of all pairs of residuals; the "
            "squares of the ranks' mean gradient + residual at the leader's positions, in those at the k best; "
            "quantiles of two ranks' residuals.",
            f"distance below {NEAR:g} and share above {ENERGY:g}, each in at least {percent(OFTEN)} of the steps.",
            settings.watched,
            alike,
        ),
        Claim(
            "S2",
            "A low-pass filter on the residual makes residuals more alike at a large learning rate.",
            "Fig. 2 and eq. 5",
            f"{WATCHED} The distance at β = 0.1 against that at β = 1.",
            "smaller in every seed at the largest learning rate.",
            settings.watched,
            filtered,
        ),
        Claim(
            "S3",
            "The leader's selection contracts: with d of k positions missed it leaves at most d/k + (1 − d/k)·γ0, γ0 "
            "being what the best selection leaves.",
            "Lemma 1",
            f"{WATCHED} What the leader's positions leave of the ranks' mean, each tensor by itself.",
            "never above the bound.",
            settings.watched,
            lemma,
        ),
        Claim(
            "S4",
            "At a large batch and a learning rate scaled up, the filter saves convergence.",
            "large-batch experiments",
            "FNN-3 on Fashion-MNIST, 16 and 64 simulated workers with 8 examples each (with --quick 16 alone), so that "
            "the batch has 128 and 512; k/n = 1 % in chunks, 100 steps (800 with --full), learning rates 0.05 and 0.2, "
            "β 1, 0.3 and 0.1.",
            f"at four times the learning rate β = 0.1 ends above β = 1, and within {LARGE_POINTS:g} point of dense at "
            "the rate that serves dense better.",
            settings.large,
            large_batch,
            "ResNet-50 on ImageNet, 64 workers, 96x: 76.47 → 75.90 %.",
            trains=True,
        ),
        Claim(
            "S5",
            "Models train without loss at 47x to 65x and at more than 100x.",
            "Tables 2 and 3",
            "Four trainings on pictures (300 steps of 64 examples, a third of an epoch; 2400 with --full) and three on "
            "text (500; 2500; fewer settings): a transformer whose averaged gradient is clipped, the same with each "
            "rank's whole gradient clipped before the exchange, and an LSTM. 2 simulated ranks, SGD with momentum, the "
            "same learning rate for all of a task. 80x is the default density of 1 %. With --full β 0.3 is tried, too; "
            "with --quick three trainings on pictures and one on text have fewer settings.",
            f"less than {BITS:g} bits per byte or {POINTS:g} points behind dense.",
            settings.trained,
            no_loss,
            "ResNet-34 on CIFAR-10, 4 workers, 92x: 93.78 → 93.98 %; ResNet-18 on ImageNet, 8 workers, 112x: 70.48 → "
            "70.17 %; ResNet-50, 96x: 76.44 → 75.99 %; MobileNetV2, 155x: 71.64 → 71.52 %; a transformer, 47x to 65x: "
            "27.64 → 27.27 BLEU.",
            trains=True,
        ),
        Claim(
            "S6",
            "It converges as dense SGD does, with 1/√T.",
            "Theorem 1",
            "A net of two layers on scikit-learn's digits, 4 ranks with 8 examples each, k/n = 2 %, a constant "
            "learning rate of 2/√T, no momentum; the mean of ‖∇f‖² over a training, ∇f of all examples; T from 100 to "
            "800 (200 to 6400).",
            f"the exponent of T is at most {SLOPES:g} larger than dense training's.",
            settings.converging,
            converges,
        ),
        Claim(
            "S7",
            "Traffic does not grow with the number of workers, as it does with top-k.",
            "Fig. 1 and the system's analysis",
            "One exchange of independent Normal gradients among 2 to 256 simulated ranks; bytes are counted.",
            "a rank hands over as many bytes whatever the ranks, and transmits what a ring of them does.",
            settings.travelling,
            flat,
        ),
    ],
)
