"""``hvdcompress advise`` on one rank, from joining the others to the verdict; only rank 0 prints."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from types import FrameType

import torch
import typer

from hvdcompress.cli.advise import verdict
from hvdcompress.cli.advise.measure import Measured, measure_steps
from hvdcompress.cli.advise.ranks import ALONE, DENSE, AdviseError, Contender, Ranks, UserError, contenders
from hvdcompress.cli.advise.workload import Workload
from hvdcompress.cli.console import fail, print_table
from hvdcompress.cli.numbers import bits_of, duration, number, size
from hvdcompress.launchers import is_first

PATIENCE = 2.0  #: seconds within which a launcher ends the other ranks when one has failed


def advise(functions: Mapping[str, str], methods: str, rounds: int, link: str | None, debug: bool) -> None:
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
        workload = _prepare(ranks, functions)
        own = Contender(f"{ranks.driver}'s own fp16")
        found = measure_steps(ranks, workload, [Contender(ALONE), Contender(DENSE), own, *asked], rounds)
        if ranks.rank == 0:
            _print_table(found, link, verdict.predict(found, rate) if rate else {})
            _print_verdict(found, ranks.driver)
        ranks.leave()
    except Exception as error:
        is_shared = isinstance(error, AdviseError)
        # If this is a consequence of an error on another rank, the launcher ends this process before it prints
        time.sleep(0.0 if isinstance(error, UserError | AdviseError) else PATIENCE)
        if debug and (error.__cause__ or not is_shared):
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


def _prepare(ranks: Ranks, functions: Mapping[str, str]) -> Workload:
    """Return the user's training, after a first step; rank 0 prints its size, and warns of too many threads."""
    with ranks.together():
        workload = Workload(functions)
    sizes = workload.check(ranks)
    here = socket.gethostname()
    threads = sum(count for host, count in ranks.share((here, torch.get_num_threads())) if host == here)
    if ranks.rank == 0:
        sys.stderr.write(  # in one piece: launchers put a prefix before each
            f"{functions['--model']}: {len(sizes)} tensors, {sum(sizes):,} elements; {ranks.world_size} ranks under "
            f"{ranks.driver}\n"
        )
        if threads > (cores := os.cpu_count() or 1):
            advice = "unless your training does so, too, set OMP_NUM_THREADS=1 and measure again"
            sys.stderr.write(f"warning: {threads} threads on {cores} cores: {advice}\n")
    return workload


def _print_table(found: list[Measured], link: str | None, predicted: Mapping[str, float]) -> None:
    dense = verdict.named(found, DENSE)
    rows = []
    for one in found:
        low, middle, high = map(duration, one.quartiles)
        row = {"contender": one.label, "step": middle, "quartiles": f"{low} – {high}"}
        row["vs dense"] = "" if one is dense else f"{-100 * one.gain(dense):+.0f} %"
        row["sent per step"] = size(one.sent) if one.sent else ""
        row["ratio"] = f"{number(one.dense_bytes / one.sent)}x" if one.sent else ""
        if predicted:
            row[f"predicted at {link}"] = duration(predicted[one.label])
        rows.append(row)
    print_table(rows, are_numbers=True)
    if predicted:
        fastest = min((one for one in found if one.label != ALONE), key=lambda one: predicted[one.label]).label
        when = f"if each rank had a link of {link}, and the exchange did not overlap with the backward pass"
        print(f"\nPredicted, not measured: {fastest} would have the shortest step {when}.")


def _print_verdict(found: list[Measured], driver: str) -> None:
    best = verdict.choose(found)
    print(f"\nVerdict: {verdict.explain(found, best)}")
    if lines := verdict.how_to(best, driver):
        print("\nIn your script:", *lines.splitlines(), sep="\n    ")
    if words := verdict.local_steps(found, best, driver):
        print(f"\n{words}")
