"""What all ranks do for ``hvdcompress advise``: measure profiles, and real steps to hold against predicted ones.

    horovodrun … python -m experiments.advise.ranks JOB.json OUT.jsonl

``hvdcompress advise --hosts …`` builds that line. Rank 0 appends to OUT a line {"say": words} before each measurement,
and one for each case: its profile, and measured steps by plan.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from experiments.advise import check, run
from experiments.advise import measure as profiling
from experiments.advise.fabric import join, launched
from experiments.advise.job import Found, Job
from experiments.advise.profile import MeasuredCodec, Profile
from experiments.advise.training import Trainings, with_trials
from experiments.advise.workload import of
from experiments.configfile import MethodEntry
from experiments.output import jsonl

__all__ = ["measure"]


def measure(job: Job, say: Callable[[str], None], keep: Callable[[Found], None] = lambda case: None) -> list[Found]:
    """Measure a job's cases; every rank calls it, or a process that is alone and checks nothing.

    Args:
        job: what.
        say: called on rank 0 with what is done next.
        keep: called on rank 0 with each case.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # ranks share processors
    fabric = join() if launched() else None
    say = say if fabric is None or fabric.rank == 0 else lambda words: None
    entries = [MethodEntry.model_validate(given) for given in job.entries]
    known = {name: MeasuredCodec.model_validate(given) for name, given in job.codecs.items()}
    found = []
    for named in job.workloads:
        workload = of(named)
        mine = profiling.profile(workload, [entry.plan.program.main for entry in entries], known, fabric, say)
        profile = Profile.open(fabric.share(mine.to_dict())[0]) if fabric else mine
        known = dict(profile.codecs)
        advised, verdict, plans = "", "", {}
        if fabric:
            report = run.report_of(profile, entries, error=job.error, say=say) if fabric.rank == 0 else None
            rivals = fabric.share(run.rivals(report) if report else {})[0]
            profile = profiling.with_rivals(profile, rivals, workload, fabric, say)
        if fabric and job.check != "no":
            if report:
                report = run.decided(report, profile)
                advised, verdict = report.advice.best.label, report.advice.verdict
                plans = run.plans_to_check(report, everything=job.check == "all")
            advised, verdict, plans = fabric.share((advised, verdict, plans))[0]
        stages = check.stages(plans)
        measured = check.measure(fabric, workload, stages, job.rounds, job.seconds, say) if fabric and stages else {}
        untrained = workload.untrained if job.training else ""
        if fabric and job.training and not untrained:
            profile = with_trials(profile, report, Trainings(fabric, workload, job.training, job.seeds, say))
        found.append(Found(profile, measured, plans, advised, verdict, untrained))
        if fabric is None or fabric.rank == 0:
            keep(found[-1])
    return found


def main() -> None:
    """One rank."""
    job, out = Job.open(Path(sys.argv[1])), Path(sys.argv[2])
    measure(job, lambda words: jsonl.append(out, {"say": words}), lambda case: jsonl.append(out, case.to_dict()))


if __name__ == "__main__":
    main()
