"""Launch short trainings with one fault each, at a moment drawn from a seed, and judge their outcomes.

    python -m tests.chaos --driver mpi,ddp --faults 24
    python -m tests.chaos --driver ddp --only killed,nan --seed 17 --faults 2
    python -m tests.chaos --soak 10000

A training must recover with nothing lost, or end with one clear error on every rank within 15 s. Everything else is a
bug, which is printed with the command that shows it again, and whose launch stays in OUT/launches. --soak runs every
method for many steps in one process instead, and looks for what grows.

Exit status: 0; 1 if there was a bug; 2 for bad options; 130 after Ctrl-C, when OUT/chaos.json has the cases so far.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from experiments.cluster.launch import LaunchError, Stopped, stoppable
from experiments.report import results, tables
from tests.chaos import judge, soak
from tests.chaos.faults import DRIVERS, FAULTS, Case

COMMAND = shlex.join(["python", "-m", "tests.chaos", *sys.argv[1:]])


def run(cases: Sequence[Case], folder: Path) -> pd.DataFrame:
    """Run cases one after another, and write ``folder/chaos.json``: one record per case."""
    records: list[dict] = []
    try:
        with stoppable():
            for case in cases:
                at = folder / "launches" / f"{case.seed}-{case.driver}-{case.fault}"
                shutil.rmtree(at, ignore_errors=True)
                at.mkdir(parents=True)
                launched = judge.run(case, at)
                outcome, why = judge.judge(case, launched, at)
                found = {"outcome": outcome, "seconds": launched.seconds, "why": why, "command": case.command}
                records.append({**asdict(case), **found})
                about = f"{case.world_size} ranks, {case.method}, step {case.step}, rank {case.victim}"
                print(f"{case.seed}: {case.fault}, {case.driver}, {about}: {outcome} after {launched.seconds} s")
                if outcome in judge.BUGS:
                    print(f"  {judge.BUGS[outcome]}\n  {case.command}\n  {why.strip()}", file=sys.stderr)
                else:
                    shutil.rmtree(at)
    finally:
        if records:
            results.save("chaos", records, folder, command=COMMAND)
    return pd.DataFrame(records)


def table(records: pd.DataFrame) -> pd.DataFrame:
    """Count outcomes by fault and driver; "slowest error" is from the fault to the launch's end."""
    by = ["fault", "driver"]
    found = pd.crosstab([records[column] for column in by], records["outcome"])
    found.insert(0, "launches", found.sum(axis=1))
    slowest = records[records["outcome"] == "error"].groupby(by)["seconds"].max().rename("slowest error [s]")
    about = {name: fault.about for name, fault in FAULTS.items()}
    return found.join(slowest).reset_index().replace({"fault": about})


def main() -> int:
    """Run what the command line asks for, and return the exit status."""

    def known(words: str, names: Sequence[str]) -> list[str]:
        for word in words.split(","):
            if word not in names:
                parser.error(f"{word!r} is not known; known: {', '.join(names)}")
        return words.split(",")

    parser = argparse.ArgumentParser(
        "python -m tests.chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--driver", default=",".join(DRIVERS), help="drivers to try (default: %(default)s)")
    parser.add_argument("--only", default=",".join(FAULTS), help="faults to try (default: all)")
    parser.add_argument("--faults", type=int, default=48, help="number of launches (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first launch; the others follow (default: 0)")
    parser.add_argument("--soak", type=int, metavar="STEPS", help="steps of every method (10000 take 15 minutes)")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="folder of results (default: %(default)s)")
    asked = parser.parse_args()
    if asked.soak:
        return soak.main(asked.soak, asked.out, COMMAND)
    drivers, faults = known(asked.driver, DRIVERS), known(asked.only, tuple(FAULTS))
    cases = [Case.drawn(seed, drivers, faults) for seed in range(asked.seed, asked.seed + asked.faults)]
    try:
        records = run(cases, asked.out)
    except LaunchError as error:
        parser.error(str(error))
    except Stopped as stopped:
        return stopped.code
    bugs = int(records["outcome"].isin(judge.BUGS).sum())
    tables.show(table(records), f"\n{len(records)} faults, {bugs} bugs\n")
    return 1 if bugs else 0


if __name__ == "__main__":
    sys.exit(main())
