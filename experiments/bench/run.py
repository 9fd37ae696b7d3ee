"""``python -m experiments bench``: from a checked benchmark to its JSON, table and picture."""

from __future__ import annotations

import shutil
from pathlib import Path

from experiments.bench import report
from experiments.bench.config import Bench
from experiments.bench.measure import measure, read
from experiments.cluster.launch import Stopped, stoppable
from experiments.report import plots, results


def prepare(folder: Path, bench: Bench, resume: bool) -> None:
    """Make a benchmark's folder ready: empty, or with the turns of an earlier attempt.

    Args:
        folder: made if it does not exist.
        bench: what is to be measured; its configuration is written there.
        resume: keep the turns that were taken.

    Raises:
        ValueError: they were taken with another configuration.
    """
    config = folder / "config.yaml"
    if resume:
        before, now = Bench.open(config).model_dump(), bench.model_dump()
        if changed := [key for key in now if now[key] != before[key]]:
            raise ValueError(f"{folder} was measured with another {', '.join(changed)}: leave out --resume")
        return
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    bench.save(config)


def run(bench: Bench, folder: Path) -> int:
    """Measure what is missing, print the tables, and write ``bench-NAME.json`` and a picture.

    Returns:
        The exit status: 0; 1 if a turn failed; 128 plus the number of the signal that stopped it.
    """
    code = 0
    try:
        with stoppable():
            measure(bench, folder, lambda text: print(text, flush=True))
    except Stopped as stopped:
        code = stopped.code
        print("stopped: ranks and hosts are gone; --resume goes on")
    turns = read(folder)
    records = report.summarize(turns)
    if not records.empty:
        report.show(records)
        links = {turn["rate"]: f"{turn['link']}; {turn.get('reached', 'no network')}" for turn in turns}
        sets = {one.label: str(one) for one in bench.sets}
        conditions = f"others {'awake' if bench.awake else 'stopped'}, ranks {'pinned' if bench.pin else 'on any core'}"
        about = {"hosts": bench.hosts, "conditions": conditions, "sets": sets, "links": links}
        written = results.save(f"bench-{bench.name}", records, folder, **about)
        print(f"written: {written}, {plots.save(report.speed_ups(records), written.with_suffix('.svg'))}")
    failed = [turn for turn in turns if "failed" in turn]
    for turn in failed:
        print(f"{turn['contender']} on {turn['set']} at {turn['rate']}: {turn['failed']}")
    return code or bool(failed)
