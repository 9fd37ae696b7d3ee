"""Run cases one after another; what came of each is kept as it comes, so that a run can go on later."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.cluster.stopping import stoppable
from experiments.output import jsonl
from experiments.torture import report
from experiments.torture.faults import Case
from experiments.torture.judge import BUGS, judge
from experiments.torture.launch import launch

__all__ = ["prepare", "records", "run", "write"]

CONFIG = "config.yaml"  #: by this file a folder is known as one of results


def prepare(folder: Path, asked: dict[str, Any], resume: bool) -> None:
    """Make the folder, and write down what was asked for; JSON is YAML, too.

    Raises:
        ValueError: ``resume``, and something else was asked for before.
    """
    file = folder / CONFIG
    if resume and json.loads(file.read_text(encoding="utf-8")) != asked:
        raise ValueError(f"{folder} was made with other --seed, --driver or --only: {file.read_text().strip()}")
    if not resume and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asked) + "\n", encoding="utf-8")


def records(folder: Path) -> list[dict[str, Any]]:
    """What came of the cases that were run."""
    return jsonl.read(folder / "results.jsonl")


def run(folder: Path, cases: Sequence[Case], say: Callable[[str], None]) -> None:
    """Run the cases that have not been run; the folders of those that show a bug are kept.

    Raises:
        LaunchError: a launcher is not installed.
    """
    jsonl.end_line(folder / "results.jsonl")
    known = {(record["seed"], record["driver"], record["fault"]) for record in records(folder)}
    with stoppable():
        for case in cases:
            if (case.seed, case.driver, case.fault) in known:
                continue
            at = folder / "launches" / f"{case.seed}-{case.driver}-{case.fault}"
            shutil.rmtree(at, ignore_errors=True)
            at.mkdir(parents=True)
            verdict = judge(case, launch(case, at), at)
            jsonl.append(folder / "results.jsonl", {**asdict(case), "command": case.command, **asdict(verdict)})
            about = f"{case.ranks} ranks, {case.method}, step {case.step}, rank {case.victim}"
            say(f"{case.seed}: {case.fault}, {case.driver}, {about}: {verdict.outcome} after {verdict.seconds} s")
            if verdict.outcome not in BUGS:
                shutil.rmtree(at)


def write(folder: Path, command: str) -> list[Path]:
    """Write ``table.md``, with every bug and the command that shows it again."""
    found = records(folder)
    parts = [f"```\n{command}\n```\n", report.table(found).markdown()]
    if said := report.bugs(found):
        parts.append(f"```\n{said}\n```\n")
    (folder / "table.md").write_text("\n".join(parts), encoding="utf-8")
    return [folder / "table.md", folder / "results.jsonl"]
