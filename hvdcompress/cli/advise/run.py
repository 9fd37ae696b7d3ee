"""``hvdcompress advise`` on one rank, from joining the others to the verdict; only rank 0 prints."""

from __future__ import annotations

import logging
import os
import signal
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import typer
import yaml

from hvdcompress.cli.advise import verdict
from hvdcompress.cli.advise.losses import Curve
from hvdcompress.cli.advise.measure import Measured, Measurements
from hvdcompress.cli.advise.ranks import ALONE, DENSE, AdviseError, Contender, Ranks, UserError, contenders
from hvdcompress.cli.advise.workload import Workload
from hvdcompress.cli.console import fail, print_table
from hvdcompress.cli.numbers import bits_of, duration, number, size
from hvdcompress.cli.started import is_first

PATIENCE = 2.0  #: seconds within which a launcher ends the other ranks when one has failed


class Effort(NamedTuple):
    """How much is measured: turns of steps, and trainings of so many seconds with so many seeds."""

    rounds: int
    seconds: float
    seeds: int


def advise(
    functions: Mapping[str, str], methods: str, effort: Effort, link: str | None, plan: Path | None, debug: bool
) -> None:
    """Measure, and print the verdict; every rank calls it. The arguments are the command's options."""
    logging.getLogger("hvdcompress").addHandler(logging.NullHandler())  # or it describes each plan in its first step
    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, _end)
    try:
        rate = bits_of(link) if link else 0.0
        asked, ranks = contenders(methods), Ranks()
    except Exception:  # the same on all ranks
        if is_first():
            raise
        raise typer.Exit(2) from None
    try:
        found, best, untrained, exchange = _measure(ranks, functions, asked, effort)
        if ranks.rank == 0:
            _print_table(found, effort.seconds, link, verdict.predict(found, rate) if rate else {})
            _print_verdict(found, best, untrained, ranks.driver, plan)
            if exchange:
                print(f"\n{verdict.local_steps(found, best, exchange)}")
        ranks.leave()
    except Exception as error:
        is_shared = isinstance(error, AdviseError)
        # If this is a consequence of an error on another rank, the launcher ends this process before it prints
        time.sleep(0.0 if isinstance(error, UserError | AdviseError) else PATIENCE)
        if debug and (error.__context__ or not is_shared):
            traceback.print_exc()
        name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        if ranks.rank == 0 or not is_shared:
            fail(f"{name}{error}{'' if is_shared else f' (on rank {ranks.rank})'}")
        sys.stderr.flush()
        if not is_shared:  # the others wait for this rank, which must not wait for them
            os._exit(1 if name else 2)
        ranks.leave()
        raise typer.Exit(2) from None


def _end(number: int, frame: FrameType | None) -> None:
    """End this rank at once, on a signal; Python's own way would wait for ranks that are ending, too."""
    if is_first() and number == signal.SIGINT:
        os.write(2, b"interrupted\n")  # print() must not be entered twice, and a launcher may repeat the signal
    os._exit(128 + number)


def _measure(
    ranks: Ranks, functions: Mapping[str, str], asked: list[Contender], effort: Effort
) -> tuple[list[Measured], Measured, str, float]:
    """Return all contenders, the best one, why no losses were compared, and the seconds of an exchange of parameters.

    The exchange is measured only if it is worth knowing, and is 0 otherwise.
    """
    with ranks.together():
        workload = Workload(functions)
    sizes = workload.check(ranks)
    here = socket.gethostname()
    threads = sum(count for host, count in ranks.share((here, torch.get_num_threads())) if host == here)
    if ranks.rank == 0:
        about = f"{len(sizes)} tensors, {sum(sizes):,} elements; {ranks.world_size} ranks under {ranks.driver}"
        sys.stderr.write(f"{functions['--model']}: {about}\n")  # in one piece: launchers put a prefix before each
        if threads > (cores := os.cpu_count() or 1):
            advice = "unless your training does so, too, set OMP_NUM_THREADS=1 and measure again"
            sys.stderr.write(f"warning: {threads} threads on {cores} cores: {advice}\n")
    measurements = Measurements(ranks, workload)
    own = Contender(f"{ranks.driver}'s own fp16")
    found = measurements.steps([Contender(ALONE), Contender(DENSE), own, *asked], effort.rounds)
    untrained = "--seconds is 0" if not effort.seconds else ""
    untrained = untrained or ("" if "--optimizer" in functions else "--optimizer is not given")
    dense: dict[int, Curve] = {}
    while True:  # until the fastest of those that are left does not lose
        best = verdict.named(found, ranks.share(verdict.choose(found).label)[0])
        if best.label == DENSE or best.trial or untrained:
            break
        best.trial = measurements.trial(best.contender, effort.seconds, effort.seeds, dense)
    exchange = measurements.exchange(verdict.EXCHANGE) if verdict.is_far(found, best) else 0.0
    return found, best, untrained, exchange


def _print_table(found: list[Measured], seconds: float, link: str | None, predicted: Mapping[str, float]) -> None:
    dense, trials = verdict.named(found, DENSE), [one.trial for one in found if one.trial]
    rows = []
    for one in found:
        low, middle, high = map(duration, one.quartiles)
        row = {"contender": one.label, "step": middle, "quartiles": f"{low} – {high}"}
        row["vs dense"] = "" if one is dense else f"{-100 * one.gain(dense):+.0f} %"
        row["sent per step"] = size(one.sent) if one.sent else ""
        row["ratio"] = f"{number(one.dense_bytes / one.sent)}x" if one.sent else ""
        if predicted:
            row[f"predicted at {link}"] = duration(predicted[one.label])
        if curves := one.trial.curves if one.trial else trials[0].dense if trials and one is dense else ():
            row[f"loss after {seconds:g} s"] = number(statistics.fmean(curve.loss for curve in curves))
            row["steps"] = f"{statistics.fmean(len(curve.losses) for curve in curves):.0f}"
        rows.append(row)
    print_table(rows, are_numbers=True)
    if predicted:
        fastest = min((one for one in found if one.label != ALONE), key=lambda one: predicted[one.label]).label
        when = f"if each rank had a link of {link}, and the exchange did not overlap with the backward pass"
        print(f"\nPredicted, not measured: {fastest} would have the shortest step {when}.")


def _print_verdict(found: list[Measured], best: Measured, untrained: str, driver: str, plan: Path | None) -> None:
    print(f"\nVerdict: {verdict.explain(found, best, untrained)}")
    if lines := verdict.how_to(best, driver):
        print("\nIn your script:", *lines.splitlines(), sep="\n    ")
    if plan and best.contender.plan:
        text = yaml.safe_dump(best.contender.settings, sort_keys=False, allow_unicode=True)
        plan.write_text(f"# {best.label}: recommended by `hvdcompress advise`\n{text}", encoding="utf-8")
    if plan:
        print(f"\n{plan} was {'written' if best.contender.plan else 'not written: the verdict needs no plan'}.")
