"""From what was measured to what FFT's page says: a report per claim, with its verdict by rule."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from scipy.stats import spearmanr

from experiments.cluster.rates import Rate
from experiments.output.table import MISSING, Table
from experiments.report.numbers import number, percent, rate_of, seconds_of
from experiments.reproduce import fft_exchange as exchange
from experiments.reproduce import fft_figures as figures
from experiments.reproduce import fft_measures as measures
from experiments.reproduce.claims import Report, Result, judge, judge_by
from experiments.reproduce.fft_settings import (
    EQUAL,
    EXCHANGED,
    FASTER,
    HALVED,
    LARGE,
    MOST,
    NET,
    POINTS,
    RATES,
    REGAINED,
    THETA,
    THETAS,
    WORLD,
    schedules,
)
from experiments.reproduce.rows import Row, grouped, over_seeds, spread, text
from experiments.training import loop
from experiments.training.experiment import Task

# -- F1: the error of an exchange ----------------------------------------------------------------


def tensors_of(results: Iterable[Result]) -> Iterator[Row]:
    """Errors by net, seed, step, tensor and rival; at equal θ the rival is top-k."""
    for result in results:
        settings = result.unit.settings
        for row in result["tensors"]:
            about = {"net": settings["task"]["net"], "seed": settings["seed"], **row}
            for rival, found in row["rivals"].items():
                yield {**about, "rival": rival, "fft": found["fft"], "other": found["rival"], "bytes": found["bytes"]}
            equal = row["thetas"][str(THETA)]
            yield {**about, "rival": EQUAL, "fft": equal["fft"], "other": equal["topk"]}


def ratio(row: Row) -> float:
    """FFT's error in units of the rival's."""
    return row["fft"] / row["other"] if row["other"] else math.inf


def errors(results: Sequence[Result]) -> Report:
    """Does FFT err less, by layer kind and phase?"""
    rows = list(tensors_of(results))
    rivals = [*measures.RIVALS, EQUAL]
    places = grouped(rows, "net", "kind", "phase")
    lower: dict[str, dict[int, list[bool]]] = {rival: {} for rival in rivals}
    lines: list[Row] = []
    for (net, kind, phase), some in places.items():
        line = {"place": f"{net}, {kind}", "phase": phase, "tensors": len({row["tensor"] for row in some})}
        usual = [row for row in some if row["rival"] == rivals[0]]
        line["fft"] = spread(over_seeds(usual, lambda row: row["fft"]))
        for rival in rivals:
            those = [row for row in some if row["rival"] == rival]
            for (seed,), one in grouped(those, "seed").items():
                lower[rival].setdefault(seed, []).append(statistics.median(map(ratio, one)) < 1)
            line[rival] = spread(over_seeds(those, ratio))
        lines.append(line)
    shares = {rival: [statistics.fmean(cells) for cells in seeds.values()] for rival, seeds in lower.items()}
    verdict = judge(
        {f"against {rival}": [share >= MOST for share in found] for rival, found in shares.items()},
        f"FFT errs less in fewer than {percent(MOST)} of the cells against every method",
    )
    told = ", ".join(f"{rival} {spread(found, percent)}" for rival, found in shares.items())
    kinds = [
        {
            "kind": kind,
            "cells": len({(row["net"], row["phase"]) for row in some}),
            **{rival: spread(over_seeds([row for row in some if row["rival"] == rival], ratio)) for rival in rivals},
        }
        for (kind,), some in grouped(rows, "kind").items()
    ]
    equal = medians(row for row in rows if row["rival"] == EQUAL)
    tails, smooth = (
        float(spearmanr([row[key] for row in equal], [ratio(row) for row in equal]).statistic)
        for key in ("kurtosis", "correlation")
    )
    columns = [text(rival, rival) for rival in rivals]
    return Report(
        verdict,
        f"Share of the {len(places)} cells in which FFT errs less than: {told}.",
        [
            Table(
                [text("kind", "layers", "left"), text("cells", "nets × phases"), *columns],
                kinds,
                "FFT's error divided by the other's, by kind of layer: median over tensors and steps, then over seeds "
                "(least to largest). Below 1, FFT is better.",
            ),
            Table(
                [
                    text("place", "net, layers", "left"),
                    text("phase", "phase", "left"),
                    text("tensors", "tensors"),
                    text("fft", f"FFT's error, θ {THETA:g}"),
                    *columns,
                ],
                lines,
                "The same in each cell, and FFT's own error with range floats of 10 bits.",
            ),
        ],
        [figures.ratios(rows, rivals, ratio), figures.by_theta(results, THETAS), figures.causes(equal, ratio, EQUAL)],
        [
            f"At θ {THETA:g}, over {len(equal)} tensors, the rank correlation of FFT's error divided by top-k's with "
            f"the kurtosis of the elements is {number(tails, 2)}, and with the correlation of neighbours in memory "
            f"{number(smooth, 2)}: heavy tails favour the elements, smoothness the frequencies.",
            "At equal θ both send values in full. FFT's payload is then smaller by half of the indices: an index goes "
            "with two numbers.",
        ],
    )


def medians(rows: Iterable[Row]) -> list[Row]:
    """One row a net and tensor: medians over steps and seeds."""
    return [
        {**some[0], **{key: statistics.median(row[key] for row in some) for key in (*figures.CAUSES, "fft", "other")}}
        for some in grouped(rows, "net", "tensor").values()
    ]


# -- F2: θ in training ---------------------------------------------------------------------------


def training(results: Sequence[Result]) -> Report:
    """Does a large θ end worse than dense, does a diminishing one converge, a lower one recover?"""
    rows = [
        {
            "net": given["net"],
            "steps": given["steps"],
            "seed": result.unit.settings["seed"],
            "plan": next(name for name, plan in schedules(given).items() if plan == result.unit.settings["method"]),
            **result.found,
        }
        for result in results
        for given in [result.unit.settings["task"]]
    ]
    values = {(row["net"], row["plan"], row["seed"]): row["value"] for row in rows}
    large, lowered = f"constant {LARGE:g}", f"{LARGE:g}, then {HALVED:g}"
    cells: dict[tuple[str, str], list[bool]] = {}
    lines, back = [], []
    for (net,), some in grouped(rows, "net").items():
        seeds = sorted({row["seed"] for row in some})

        def gaps(plan: str, net: str = net, seeds: Sequence[int] = seeds) -> list[float]:
            return [values[net, plan, seed] - values[net, "none", seed] for seed in seeds]

        regained = [
            (values[net, lowered, s] - values[net, large, s]) / (values[net, "none", s] - values[net, large, s] or 1.0)
            for s in seeds
        ]
        back += regained
        worse = f"a constant θ {LARGE:g} ends more than {POINTS:g} point below dense"
        cells[worse, f"with {net}"] = [gap < -POINTS for gap in gaps(large)]
        for theta in (THETA, LARGE):
            plan = f"diminishing from {theta:g}"
            cells[f"θ {plan} converges", f"with {net}"] = [gap >= -POINTS for gap in gaps(plan)]
        cells["a lowered θ recovers", f"with {net}"] = [share >= REGAINED for share in regained]
        for (plan,), those in grouped(some, "plan").items():
            lines.append(
                {
                    "net": net,
                    "plan": plan,
                    "rate": rate_of(statistics.median(row["rate"] for row in those)),
                    "loss": spread([row["loss"] for row in those]),
                    "value": spread([row["value"] for row in those]),
                    "gap": MISSING if plan == "none" else spread(gaps(plan)),
                    "regained": spread(regained, percent) if plan == lowered else MISSING,
                }
            )
    columns = [
        text("net", "net", "left"),
        text("plan", "θ", "left"),
        text("rate", "ratio"),
        text("loss", "loss"),
        text("value", "held-out accuracy, %"),
        text("gap", "against dense, points"),
        text("regained", "of it regained"),
    ]

    def over(plan: str) -> str:
        return spread(
            [values[net, plan, s] - values[net, "none", s] for (net, one, s) in values if one == plan],
        )

    return Report(
        judge_by(cells, "no part of it is met in every seed"),
        f"Points against dense, over nets and seeds: constant θ {LARGE:g} {over(large)}, diminishing from {LARGE:g} "
        f"{over(f'diminishing from {LARGE:g}')}, from {THETA:g} {over(f'diminishing from {THETA:g}')}; lowered from "
        f"{LARGE:g} to {HALVED:g} halfway {over(lowered)}, which regains {spread(back, percent)}.",
        [
            Table(
                columns,
                lines,
                "The last twentieth's loss, and accuracy at the end: median over seeds, least to largest.",
            )
        ],
        [
            figures.losses([row for row in rows if row["net"] == net], net)
            for net in dict.fromkeys(r["net"] for r in rows)
        ],
        [
            "*recovery* is the method's own trigger: the density grows fourfold whenever a step's loss is more "
            "than half above the best so far. A single step's loss is noisy, so it acts often, and the ratio falls.",
            "*feedback* is not the paper's: what was not sent is kept and added to the next gradient.",
            f"Halfway, {percent(left_halfway(results[0].unit.settings['task']))} of the sum of the learning rates is "
            "still to come (a cosine): with that a lowered θ can recover.",
        ],
    )


def left_halfway(given: Row) -> float:
    """The share of the sum of a training's learning rates that belongs to its second half."""
    training = Task.model_validate({"label": given["task"], **given})
    rates = [loop.learning_rate(training, step) for step in range(training.steps)]
    return sum(rates[training.steps // 2 :]) / sum(rates)


# -- F3: number formats --------------------------------------------------------------------------

DATA = {"raw": "gradients", "kept": "kept frequencies"}


def rival_kind(name: str) -> str:
    """What a format competes as."""
    if name.startswith("e3"):
        return "floats with 3 bits of exponent"
    return "uniform codes" if name == "uniform" else "floats with 4 or 5 bits of exponent"


def numbers(results: Sequence[Result]) -> Report:
    """Do range floats err less than other formats of as many bits?"""
    rows = [
        {"net": r.unit.settings["task"]["net"], "seed": r.unit.settings["seed"], **row}
        for r in results
        for row in r["formats"]
        if not row["format"].startswith(f"rangefloat{row['bits']}m")
    ]
    judged = [row for row in rows if row["bits"] in measures.formats.BITS]
    found = {
        key: {what: statistics.median(row[what] for row in some) for what in DATA}
        for key, some in grouped(judged, "bits", "format", "net", "seed").items()
    }
    cells: dict[tuple[str, str], list[bool]] = {}
    tally: dict[str, dict[str, list[bool]]] = {}
    nets, seeds = ({key[place]: None for key in found} for place in (2, 3))
    for bits, name in grouped(judged, "bits", "format"):
        ours = f"rangefloat{bits}"
        if name == ours:
            continue
        for what, words in DATA.items():
            better = [
                all(found[bits, ours, net, seed][what] < found[bits, name, net, seed][what] for net in nets)
                for seed in seeds
            ]
            place = (f"than {rival_kind(name)} on {words}", f"at {bits} bits")
            cells[place] = [a and b for a, b in zip(better, cells.get(place, [True] * len(better)), strict=True)]
            wins = tally.setdefault(place[0], {}).setdefault(f"{bits} bits", [])
            wins += [found[bits, ours, *at][what] < found[bits, name, *at][what] for at in product(nets, seeds)]
    verdict = judge_by(cells, "some other format errs less at every number of bits")
    lines = [
        {
            "bits": bits,
            "format": name,
            **{what: spread(over_seeds(some, lambda row, what=what: row[what])) for what in DATA},  # type: ignore[misc]
        }
        for (bits, name), some in grouped(rows, "bits", "format").items()
    ]
    middle = {(r["bits"], r["format"]): r for r in lines}
    shown = {"rangefloat8": "range floats", "uniform": "the uniform code", "e3m4": "the float e3m4"}
    told = "; ".join(
        f"on {words} " + ", ".join(f"{middle[8, name][what]} with {label}" for name, label in shown.items())
        for what, words in DATA.items()
    )
    wins_of = [
        {"rival": rival, **{bits: f"{sum(wins)} of {len(wins)}" for bits, wins in by_bits.items()}}
        for rival, by_bits in tally.items()
    ]
    return Report(
        verdict,
        f"Error at 8 bits: {told}.",
        [
            Table(
                [
                    text("rival", "less", "left"),
                    *(text(f"{bits} bits", f"{bits} bits") for bits in measures.formats.BITS),
                ],
                wins_of,
                "How often the range float errs less: nets, seeds and formats of that kind.",
            ),
            Table(
                [
                    text("bits", "bits"),
                    text("format", "format", "left"),
                    text("raw", "error on gradients"),
                    text("kept", "error on kept frequencies"),
                ],
                lines,
                "‖decoded − x‖/‖x‖ over all tensors of a step: median over steps and nets, then over seeds (least to "
                "largest). Formats of 16 bits are not judged.",
            ),
        ],
        [figures.formats(judged, what, words) for what, words in DATA.items()],
        [
            "Other floats eEmM are scaled so that the largest value is their largest number, and have subnormal "
            "numbers: below the smallest exponent they go on in even steps, where a range float has nothing but zero. "
            "Gradients span many octaves, most of their values are far below the largest one, and there it counts.",
            "A range float chooses its mantissa from a sample of the data, one per tensor.",
        ],
    )


# -- F4: AlexNet's exchange ----------------------------------------------------------------------


def alexnet(results: Sequence[Result]) -> Report:
    """Is AlexNet's exchange faster with FFT?"""
    codecs = [result for result in results if result.unit.measure is exchange.codecs]
    parts = [
        {**result.unit.settings, "primitive": name, "seconds": seconds}
        for result in results
        if result.unit.measure is exchange.primitives
        for name, seconds in result["seconds"].items()
    ]
    hosts = {"this core": 1.0, f"a codec {FASTER:g} times as fast": FASTER}
    rows = [
        {"seed": result.unit.settings["seed"], "host": host, "rate": rate, "method": label, "seconds": seconds}
        for result in codecs
        for host, faster in hosts.items()
        for rate, found in exchange.exchanges(
            NET, {label: (plan, result[label]) for label, plan in EXCHANGED.items()}, RATES, WORLD, faster
        ).items()
        for label, seconds in found.items()
    ]
    cells: dict[tuple[str, str], list[bool]] = {}
    lines = []
    for (host, rate), some in grouped(rows, "host", "rate").items():
        took = {(row["method"], row["seed"]): row["seconds"] for row in some}
        seeds = sorted({row["seed"] for row in some})
        speed = str(Rate.parse(rate))
        line = {"host": host, "rate": speed}
        for label in dict.fromkeys(row["method"] for row in some):
            line[label] = spread([took[label, seed] for seed in seeds], seconds_of)
            if label != "fft":
                words = f"than {'dense' if label == 'none' else label}"
                cells[words, f"at {speed} with {host}"] = [took["fft", s] < took[label, s] for s in seeds]
        lines.append(line)
    labels = ["none", *EXCHANGED]
    of_codecs = [
        {
            "method": label,
            "seconds": spread([result[label]["seconds"] for result in codecs], seconds_of),
            **{
                part: spread([result[label]["parts"][part] for result in codecs], seconds_of) for part in exchange.PARTS
            },
            "further": spread([result[label]["further"] for result in codecs], seconds_of),
        }
        for label in EXCHANGED
    ]
    names = list(dict.fromkeys(row["primitive"] for row in parts))
    sizes = [
        {
            "n": f"{n:,}",
            **{
                name: spread([row["seconds"] for row in some if row["primitive"] == name], seconds_of) for name in names
            },
        }
        for (n,), some in grouped(parts, "n").items()
    ]
    ten = {line["host"]: line for line in lines if line["rate"] == str(Rate.parse("10gbit"))}
    told = "; ".join(
        f"with {host} {line['fft']}, and "
        + ", ".join(f"{'dense' if m == 'none' else m} {line[m]}" for m in labels if m != "fft")
        for host, line in ten.items()
    )
    middle = exchange.fitted().held_out["a method, in turn"]["median"]
    return Report(
        judge_by(cells, "FFT is predicted to be slower than every other method"),
        f"Predicted: {WORLD} ranks at 10 Gbit/s; {told}.",
        [
            Table(
                [text("host", "codec", "left"), text("rate", "link", "left"), *(text(m, m) for m in labels)],
                lines,
                f"**Model, not measured:** seconds of AlexNet's exchange among {WORLD} ranks.",
            ),
            Table(
                [
                    text("method", "method", "left"),
                    text("seconds", "codec, two ranks"),
                    *(text(part, part) for part in exchange.PARTS),
                    text("further", "each further rank"),
                ],
                of_codecs,
                "Measured: a rank's own work in AlexNet's exchange on one core, over seeds (least to largest).",
            ),
            Table(
                [text("n", "elements"), *(text(name, name) for name in names)],
                sizes,
                f"Measured: primitives on one core, blocks of 4096, θ {THETA:g}; medians of rounds, then of seeds.",
            ),
        ],
        [figures.exchanges(rows, RATES, labels, WORLD), figures.primitives(parts, names)],
        [
            "The model's seconds: messages, bytes on the link, collectives, and the codec's measured seconds times the "
            f"fitted factor {number(exchange.fitted().constants['codec'])}. Predictions of a method that the fit had "
            f"not seen are off by {percent(middle)} in the middle. Nothing is hidden behind the backward pass.",
            f"{FASTER:g} times as fast is about what a GPU's memory bandwidth is to one core's: an assumption, no "
            "measurement.",
        ],
    )
