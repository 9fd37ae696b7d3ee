"""Verdicts on GradiVeQ's claims: from what was measured to what the page says."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from operator import itemgetter

import numpy as np

from experiments.output.table import MISSING, Table
from experiments.report.numbers import num_bytes, number, percent, rate_of, seconds_of
from experiments.reproduce import gradiveq_figures as figures
from experiments.reproduce.claims import Kind, Report, Result, Verdict, judge, judge_by
from experiments.reproduce.gradiveq_measures import ENOUGH, MIXES
from experiments.reproduce.rows import Row, grouped, over_seeds, spread, text

CORRELATED = 0.3  #: the largest error of the best basis of rank n/8 for slices that count as correlated
SETTINGS = {"default": "the default", "paper": "the paper's"}
SMALL = 192  #: elements of a slice, far fewer than by default
LASTS = 1.2  #: times the oracle's error that a basis may have while it is used
POINTS = 1.0  #: of held-out accuracy, which count as no loss
FASTER = 5.0  #: times, for claims of speed and of the overall compression ratio
EARLY = 0.2  #: share of a training after which at the latest steps are compressed
CYCLE = (100, 400)  #: Lt and Lc of the paper


def rows_of(results: Sequence[Result], key: str) -> Iterator[Row]:
    """What watched trainings have under a key, with net and seed."""
    for result in results:
        settings = result.unit.settings
        for row in result[key]:
            yield {"net": settings["task"]["net"], "seed": settings["seed"], **row}


def method_of(result: Result) -> str:
    """The name of a training's method: its unit's, between the net and the seed."""
    words = result.unit.name.split()
    return " ".join(words[2:-2])


# -- V1: correlation -----------------------------------------------------------------------------


def correlated(results: Sequence[Result]) -> Report:
    """Do slices fit into an eighth of their dimensions?"""
    rows = list(rows_of(results, "spectra"))
    cells: dict[tuple[str, str], list[bool]] = {}
    lines = []
    for (net, tensor, order, size), some in grouped(rows, "net", "tensor", "order", "size").items():
        if some[0]["convolution"]:
            met = [max(row["error"] for row in one) < CORRELATED for one in grouped(some, "seed").values()]
            cells[f"in order {order}, slices of {size}:", f"{net} {tensor}"] = met
        line = {
            "tensor": f"{net} {tensor}{'' if some[0]['convolution'] else ' (a matrix)'}",
            "order": order,
            "size": f"{size}{' (default)' if some[0]['default'] else ''}",
            "samples": f"{some[0]['samples']:,}",
            "control": spread([row["control"] for row in some]),
        }
        line |= dict(zip(("first", "last"), _ends(some), strict=True))
        lines.append(line)
    nets = list(dict.fromkeys(row["net"] for row in rows))
    told = [f"{net} {_by_order([row for row in rows if row['net'] == net and row['convolution']])}" for net in nets]
    columns = [
        text("tensor", "layer", "left"),
        text("order", "order", "left"),
        text("size", "slice"),
        text("samples", "slices"),
        text("first", "error, first window"),
        text("last", "error, last window"),
        text("control", "elements shuffled"),
    ]
    return Report(
        judge_by(cells, f"the best basis of rank n/8 leaves {CORRELATED:g} or more of every layer in some seed"),
        f"Error of the best basis of rank n/8 for convolutions, slices of the default size with whole filters (oihw) "
        f"and in the paper's order (hwio), slices of {SMALL} and less, and the first with each slice's elements "
        f"shuffled: {'; '.join(told)}.",
        [Table(columns, lines, "Over all slices of a window's compressed steps; seeds' values, least to largest.")],
        [*[figures.spectra(rows, net) for net in nets], figures.by_slice(rows)],
        [
            "A basis fits few slices well whatever they are; the column *elements shuffled* shows how much of the fit "
            f"that explains. Sizes are left out where a layer has not {ENOUGH} times as many slices as the basis has "
            "vectors.",
        ],
    )


def _by_order(rows: Sequence[Row]) -> str:
    """The medians of a net's layers, for each kind of slice."""
    own = {order: [row for row in rows if row["default"] and row["order"] == order] for order in ("oihw", "hwio")}
    small = [row for row in rows if row["size"] <= SMALL]
    kinds = [(own["oihw"], "error"), (own["hwio"], "error"), (small, "error"), (own["oihw"], "control")]
    return ", ".join(spread(over_seeds(some, itemgetter(key))) if some else MISSING for some, key in kinds)


def _ends(rows: Sequence[Row]) -> list[str]:
    starts = sorted({row["start"] for row in rows})
    return [spread([row["error"] for row in rows if row["start"] == start]) for start in (starts[0], starts[-1])]


# -- V2: how long a basis lasts ------------------------------------------------------------------


def carries(results: Sequence[Result]) -> Report:
    """Is a basis of the dense steps as good as the oracle's in the steps that follow?"""
    rows = list(rows_of(results, "carried"))
    # where a layer has too few slices for a spectrum, the oracle's basis would fit each of them
    told = {(row["net"], row["tensor"], row["order"]) for row in rows_of(results, "spectra") if row["default"]}
    cells: dict[str, list[bool]] = {}
    lines, ratios = [], {}
    for (net, start), some in grouped(rows, "net", "start").items():
        for entry, order in (("default", "oihw"), ("paper", "hwio")):
            layers = sum((net, tensor, order) in told for tensor in {row["tensor"] for row in some})
            if not layers:
                continue
            per_seed, mine, best = [], [], []
            for one in grouped(some, "seed").values():
                found = {
                    tensor: {row["entry"]: float(np.nanmedian(row["errors"])) for row in each}
                    for (tensor,), each in grouped(one, "tensor").items()
                    if (net, tensor, order) in told
                }
                mine.append(statistics.median(each[entry] for each in found.values()))
                best.append(statistics.median(each[f"oracle {order}"] for each in found.values()))
                per_seed.append(statistics.median(each[entry] / each[f"oracle {order}"] for each in found.values()))
            name = f"{net}, dense from step {start} on, {entry}"
            cells[name] = [ratio <= LASTS for ratio in per_seed]
            ratios[net, start, entry] = per_seed
            lines.append(
                {
                    "net": net,
                    "start": start,
                    "entry": entry,
                    "layers": layers,
                    "mine": spread(mine),
                    "best": spread(best),
                    "ratio": spread(per_seed),
                }
            )
    columns = [
        text("net", "net", "left"),
        text("start", "dense from step"),
        text("entry", "settings", "left"),
        text("layers", "layers"),
        text("mine", "error"),
        text("best", "oracle's"),
        text("ratio", "ratio, median of layers"),
    ]
    late = [
        f"{spread(each)} for {net} with {SETTINGS[entry]} settings"
        for (net, start, entry), each in ratios.items()
        if start > 0
    ]
    least = min(statistics.median(each) for each in ratios.values())
    return Report(
        judge(cells, f"the error is at best {number(least)} times the oracle's"),
        f"Error over the oracle's, windows in the middle of training: {', '.join(late)}.",
        [Table(columns, lines, "Medians over steps and layers; seeds' values, least to largest.")],
        [figures.over_time(rows, net) for net in dict.fromkeys(row["net"] for row in rows)],
        [
            "The oracle is the best basis of rank n/8 for the steps themselves that are looked at, in the same order "
            "of weights. From one slice per dense step, as in the paper, come at most Lt − 1 components: where "
            "n/8 is more, its basis has fewer vectors than the oracle's.",
            "Dense from step 0 on, the first basis is made of gradients whose norm falls by the step: its samples are "
            "those of the first few.",
        ],
    )


# -- V3: training --------------------------------------------------------------------------------


def training(results: Sequence[Result]) -> Report:
    """Does compressing from a fifth of the training on cost accuracy?"""
    rows = []
    for result in results:
        settings = result.unit.settings
        method, steps = settings["method"], settings["task"]["steps"]
        warm = method.get("warmup", {}).get("steps", 0) + method.get("dense_steps", steps)
        row = {"net": settings["task"]["net"], "method": method_of(result), "seed": settings["seed"]}
        rows.append({**row, "from": warm / steps, "value": result["value"], "wire": result["wire"]})
    cells: dict[str, list[bool]] = {}
    lines = []
    fast: dict[tuple[str, str], tuple[float, list[float]]] = {}
    for (net,), some in grouped(rows, "net").items():
        dense = {row["seed"]: row["value"] for row in some if row["method"] == "dense"}
        for (method,), those in grouped(some, "method").items():
            gaps = [row["value"] - dense[row["seed"]] for row in those]
            rates = [row["wire"] for row in those if not math.isnan(row["wire"])] or [math.nan]
            rate = statistics.median(rates)
            kept = [gap >= -POINTS for gap in gaps]  # a training that diverged has no value, and none is kept
            if method in ("default", "paper"):
                cells[f"{net}, {method}"] = kept
            if method != "dense" and min(rates) >= FASTER and not any(map(math.isnan, gaps)):
                fast[net, method] = (rate, gaps)
            lines.append(
                {
                    "net": net,
                    "method": method,
                    "from": MISSING if method == "dense" else percent(those[0]["from"]),
                    "rate": rate_of(rate),
                    "value": spread([row["value"] for row in those]),
                    "gap": MISSING if method == "dense" else spread(gaps),
                }
            )
    columns = [
        text("net", "net", "left"),
        text("method", "method", "left"),
        text("from", "compressed from"),
        text("rate", "overall ratio"),
        text("value", "held-out accuracy, %"),
        text("gap", "against dense, points"),
    ]
    told = {line["net"] + " " + line["method"]: line for line in lines}
    nets = list(dict.fromkeys(row["net"] for row in rows))
    default = "; ".join(f"{told[f'{net} default']['gap']} for {net}" for net in nets)
    paper = "; ".join(f"{told[f'{net} paper']['gap']} for {net}" for net in nets)
    best = []
    for net in nets:
        found = {method: each for (its, method), each in fast.items() if its == net}
        within = {method: each for method, each in found.items() if min(each[1]) >= -POINTS}
        if not found:
            best.append(f"none for {net}")
            continue
        nearest = max(found.items(), key=lambda item: min(item[1][1]))
        name, (rate, gaps) = max(within.items(), key=lambda item: item[1][0]) if within else nearest
        said = f"“{name}”, {rate_of(rate)} at {spread(gaps)} points"
        best.append(f"{net} with {said}" if within else f"none for {net}, the nearest being {said}")
    return Report(
        judge(cells, f"with both settings at least one seed loses more than {POINTS:g} point"),
        f"Against dense, in points: default settings {default}; the paper's {paper}. The highest overall ratio within "
        f"{POINTS:g} point in every seed and of {FASTER:g}x at least, dense steps counted: {'; '.join(best)}.",
        [
            Table(
                columns,
                lines,
                "Median over seeds (least to largest); ratios by bytes on the wire, dense steps counted.",
            )
        ],
        [figures.accuracies(rows, net) for net in nets],
        [
            "Settings whose names begin with “default” or “paper” have a tenth of the training as dense warm-up, then "
            "cycles of a tenth dense (Lt) and four tenths compressed (Lc), the paper's ratio; the others a twentieth "
            "each of warm-up and dense steps, and then one basis to the end, or, “refreshed”, cycles of that ratio.",
            "By default a basis is trained again whenever the learning rate has halved (`retrain_drop: 0.5`). With the "
            "cosine to zero here, which halves for ever, that makes most late steps dense: it is shown once.",
            f"Of Lt dense and 4·Lt compressed steps at 8x, the overall ratio is {number(5 / (1 + 4 / 8))}x, whatever "
            f"the network: {FASTER:g}x overall needs quantized dense steps, fewer of them, or compressed steps "
            f"of a higher ratio.",
        ],
    )


# -- V4: the time of a cycle ---------------------------------------------------------------------

#: of each scheme: the ring of its dense steps, and of its compressed ones
SCHEMES = {
    "8x": ("dense", "gradiveq 8x"),
    "8x, 4-bit dense steps (the paper's)": ("qsgd4", "gradiveq 8x"),
    "8x and 8-bit values, 4-bit dense steps": ("qsgd4", "gradiveq 8x, qsgd8"),
    "compressed steps alone": ("", "gradiveq 8x"),
}


def ring_rows(results: Sequence[Result]) -> Iterator[Row]:
    """Every timed ring: place, seed and what it found."""
    for result in results:
        settings = result.unit.settings
        link = f"{_speed(settings['rate'])}, {settings['ranks']} ranks"
        net = result.unit.name.removeprefix("ring ").split(",")[0]
        yield {"net": net, "link": link, "rate": settings["rate"], "seed": settings["seed"], **result.found}


def _speed(rate: str | None) -> str:
    return "shared memory" if rate is None else rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


def cycle_seconds(row: Row, scheme: str, seconds: dict[str, float]) -> float:
    """Seconds of a step, the mean of a cycle: Lt dense steps, one fit, Lc compressed ones."""
    dense, compressed = SCHEMES[scheme]
    if not dense:
        return seconds[compressed]
    return (CYCLE[0] * seconds[dense] + row["fit"] + CYCLE[1] * seconds[compressed]) / sum(CYCLE)


def modelled(row: Row, bits: float) -> dict[str, float]:
    """A model's seconds of each ring: its codec's, and its bytes at a rate; nothing overlaps, no message waits."""
    return {name: row["codec"][name] + 8 * sent / bits for name, sent in row["sent"].items()}


def aggregation(results: Sequence[Result]) -> Report:
    """Is a whole cycle around the ring more than five times as fast as dense steps?"""
    rows = list(ring_rows(results))
    found = [
        {**row, "scheme": scheme, "speedup": row["seconds"]["dense"] / cycle_seconds(row, scheme, row["seconds"])}
        for row in rows
        for scheme in SCHEMES
    ]
    cells = {
        f"{net}, {link}, {scheme}": [row["speedup"] >= FASTER for row in some]
        for (net, link, scheme), some in grouped(found, "net", "link", "scheme").items()
        if SCHEMES[scheme][0]
    }
    steps = [
        {
            "net": net,
            "link": link,
            "ring": name,
            "seconds": spread([row["seconds"][name] for row in some], seconds_of),
            "sent": num_bytes(some[0]["sent"][name]),
            "codec": spread([row["codec"][name] for row in some], seconds_of),
        }
        for (net, link), some in grouped(rows, "net", "link").items()
        for name in ("dense", "qsgd4", "gradiveq 8x", "gradiveq 8x, qsgd8")
    ]
    cycles = [
        {"net": net, "scheme": scheme, **{link: spread([r["speedup"] for r in those], rate_of)
         for (link,), those in grouped(some, "link").items()}}
        for (net, scheme), some in grouped(found, "net", "scheme").items()
    ]  # fmt: skip
    slow, fast = 1e8, 1e10
    model = [
        {
            "net": net,
            "scheme": scheme,
            **{
                _bits(bits): spread(
                    [modelled(row, bits)["dense"] / cycle_seconds(row, scheme, modelled(row, bits)) for row in some],
                    rate_of,
                )
                for bits in (slow, 1e9, fast)
            },
        }
        for (net,), some in grouped(rows, "net").items()
        for scheme in SCHEMES
    ]
    links = list(dict.fromkeys(row["link"] for row in rows))
    best = max(
        (statistics.median(r["speedup"] for r in some), net, link, scheme)
        for (net, link, scheme), some in grouped(found, "net", "link", "scheme").items()
        if SCHEMES[scheme][0]
    )
    seeds = [r["speedup"] for r in found if (r["net"], r["link"], r["scheme"]) == best[1:]]
    fits = {net: spread([row["fit"] for row in some], seconds_of) for (net,), some in grouped(rows, "net").items()}
    plain = max(
        statistics.median(r["speedup"] for r in some)
        for (scheme, *_), some in grouped(found, "scheme", "net", "link").items()
        if scheme == "8x"
    )
    return Report(
        judge(cells, f"the fastest cycle is {rate_of(best[0])} as fast as dense"),
        f"The fastest cycle, {best[1]} at {best[2]} with {best[3]}: {spread(seeds, rate_of)} as fast as the dense "
        f"ring; with dense steps as they are {rate_of(plain)} at most.",
        [
            Table(
                [
                    text("net", "layers", "left"),
                    text("scheme", "scheme", "left"),
                    *(text(link, link) for link in links),
                ],
                cycles,
                "Times faster than the dense ring, measured; seeds' values, least to largest.",
            ),
            Table(
                [
                    text("net", "layers", "left"),
                    text("link", "link", "left"),
                    text("ring", "ring", "left"),
                    text("seconds", "a step"),
                    text("codec", "its codec alone"),
                    text("sent", "a rank sends"),
                ],
                steps,
                "One step of each ring, layer after layer; medians of rounds in turns, then of seeds.",
            ),
            Table(
                [
                    text("net", "layers", "left"),
                    text("scheme", "scheme", "left"),
                    *(text(_bits(bits), _bits(bits)) for bits in (slow, 1e9, fast)),
                ],
                model,
                "Not measured but a model: the same from measured bytes and codec seconds, without "
                "overlap and latency.",
            ),
        ],
        [figures.speedups(found, net) for net in dict.fromkeys(row["net"] for row in rows)],
        [
            f"Lt = {CYCLE[0]}, Lc = {CYCLE[1]}, as in the paper. With dense steps as they are no cycle can be more "
            f"than {number(sum(CYCLE) / CYCLE[0])} times as fast, and at 8x "
            f"{number(sum(CYCLE) / (CYCLE[0] + CYCLE[1] / 8))} times.",
            "The fit of all bases, once a cycle, takes the busiest rank "
            + ", ".join(f"{each} ({net})" for net, each in fits.items())
            + "; it is part of the cycle, the broadcast of its result is not.",
            "Each layer is a ring of its own: of many small layers the messages decide, not the bytes.",
        ],
    )


def _bits(bits: float) -> str:
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"


# -- V5: with QSGD -------------------------------------------------------------------------------


def together(results: Sequence[Result]) -> Report:
    """At an equal compression ratio, are both together better than either alone, in error and in time?"""
    seen = [result for result in results if "carried" in result.found]
    timed = list(ring_rows([result for result in results if "seconds" in result.found]))
    rates = {name: result["rates"][name] for result in seen for name in result["rates"]}
    errors = [
        {**row, "contender": row["entry"], "error": float(np.nanmedian(row["errors"])), "wire": rates[row["entry"]]}
        for row in rows_of(seen, "carried")
        if row["entry"] in rates
    ]
    kinds = {name: _kind(bool(rate), bool(bits)) for mixes in MIXES.values() for name, rate, bits in mixes}
    for row in errors:
        row["kind"] = kinds[row["contender"]]
    by_seed = {
        (name, seed): statistics.median(row["error"] for row in some)
        for (name, seed), some in grouped(errors, "contender", "seed").items()
    }
    cells: dict[str, list[bool]] = {}
    lines = []
    alone = {rate: [name for name, *_ in mixes if kinds[name] != BOTH] for rate, mixes in MIXES.items()}
    both = {rate: [name for name, *_ in mixes if kinds[name] == BOTH] for rate, mixes in MIXES.items()}
    for rate, mixes in MIXES.items():
        for (net, link), some in grouped(timed, "net", "link").items():
            cells[f"{rate}x, {net}, {link}"] = [
                any(
                    all(
                        by_seed[mix, row["seed"]] < by_seed[one, row["seed"]]
                        and row["seconds"][mix] < row["seconds"][one]
                        for one in alone[rate]
                    )
                    for mix in both[rate]
                )
                for row in some
            ]
        for name, *_ in mixes:
            line = {"rate": f"{rate}x", "name": name, "wire": rate_of(rates[name])}
            line["error"] = spread([each for (mine, _), each in by_seed.items() if mine == name])
            for (net, link), some in grouped(timed, "net", "link").items():
                line[f"{net}, {link}"] = spread([row["seconds"][name] for row in some], seconds_of)
            lines.append(line)
    places = list(dict.fromkeys(f"{row['net']}, {row['link']}" for row in timed))
    columns = [
        text("rate", "ratio"),
        text("name", "what is sent", "left"),
        text("wire", "measured ratio"),
        text("error", "error"),
        *(text(place, place) for place in places),
    ]
    lower = []
    for rate in MIXES:
        wins = [
            min(by_seed[name, seed] for name in both[rate]) < min(by_seed[name, seed] for name in alone[rate])
            for seed in sorted({seed for _, seed in by_seed})
        ]
        lower.append(f"at {rate}x in {sum(wins)} of {len(wins)} seeds")
    verdict = judge(cells, "no combination has both a lower error and a shorter step than each alone")
    if verdict.kind is Kind.FAILS:
        verdict = Verdict(
            Kind.FAILS, f"{verdict.because}; its error alone is the lower {', '.join(lower)}, but quantizing takes time"
        )
    told = {line["name"]: line["error"] for line in lines}
    return Report(
        verdict,
        f"Errors at 8x: GradiVeQ {told['gradiveq 8x']}, QSGD {told['qsgd4']}, both {told['gradiveq 2x, qsgd8']}. The "
        f"best of both has the lower error {', '.join(lower)}.",
        [
            Table(
                columns,
                lines,
                "Errors: medians over layers and the 40 steps after the fit; times: one step around the ring. Seeds' "
                "values, least to largest.",
            )
        ],
        [figures.mixes([{**row, "error": by_seed[row["contender"], row["seed"]]} for row in errors])],
        [
            "Ratios by bytes on the wire of compressed steps. At 32x QSGD has no counterpart: it has no "
            "fewer than 2 bits.",
            "Errors of both together are those of the method, whose sums are quantized twice; around the ring they are "
            "quantized once a hop, which is the same for 2 ranks.",
        ],
    )


BOTH = "both"


def _kind(projects: bool, quantizes: bool) -> str:
    return BOTH if projects and quantizes else "GradiVeQ alone" if projects else "QSGD alone"
