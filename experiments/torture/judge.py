"""Say what came of a launch: recovered, one clear error, or a bug."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cluster import launcher
from experiments.torture.faults import FAULTS, STEPS, Case
from experiments.torture.launch import PATIENCE, Launched
from experiments.torture.trainings import SHAPES
from hvdcompress.engine.saving import checkpoint

__all__ = ["BUGS", "OUTCOMES", "Verdict", "judge"]

BUGS = {
    "hang": f"the launch went on for more than {PATIENCE:.0f} s after the fault, and had processors",
    "difference": "ranks ended with different parameters, or some went on while others had failed",
    "loss": "what ranks gave is not what they received and kept",
    "leftover": "processes outlived their launcher",
    "unclear": "no error, or one that does not name the fault",
}
OUTCOMES = ("recovered", "error", *BUGS)
TOLERANCE = 1e-4  #: of the largest number that was given: sums are in float32


@dataclass(frozen=True)
class Verdict:
    """What came of a launch: one of :data:`OUTCOMES`, why, and the seconds from the fault to the launch's end."""

    outcome: str
    why: str
    seconds: float


def judge(case: Case, launched: Launched, folder: Path) -> Verdict:
    """Say what came of a case that was launched in ``folder``."""
    ranks = [_json(folder / f"rank-{rank}.json") for rank in range(case.ranks)]
    log = folder / "log.txt"

    def verdict(outcome: str, why: str) -> Verdict:
        return Verdict(outcome, why, round(launched.seconds, 2))

    done = [rank for rank, said in enumerate(ranks) if said.get("ended") == "done"]
    if not launched.fired:
        return verdict("unclear", f"the launch ended before the fault: {launcher.tail(log)}")
    if launched.status is None:
        return verdict("hang", f"ranks {done} had ended; {launcher.tail(log)}")
    if launched.left:
        return verdict("leftover", "; ".join(launched.left))
    if len(done) == case.ranks:
        return verdict(*_recovered(case, launched, ranks, folder))
    if done:
        return verdict("difference", f"ranks {done} went on to the end, the others did not; {launcher.tail(log)}")
    said = "\n".join([log.read_text(encoding="utf-8", errors="replace"), *(one.get("error", "") for one in ranks)])
    ends = FAULTS[case.fault].ends
    if not case.can_end:
        return verdict("unclear", f"it ended, and should have gone on: {launcher.tail(log)}")
    if launched.status == 0 or not re.search(ends, said):
        return verdict("unclear", f"exit status {launched.status}, and nothing matches {ends}: {launcher.tail(log)}")
    if lost := _lost_on_disk(case, folder):
        return verdict("loss", lost)
    words = [one["error"] for one in ranks if "error" in one] or [launcher.tail(log, 2)]
    return verdict("error", words[0])


def _recovered(case: Case, launched: Launched, ranks: Sequence[Mapping[str, Any]], folder: Path) -> tuple[str, str]:
    if not case.can_recover:
        return "unclear", "it went on as if nothing had happened"
    if launched.status != 0:
        return "unclear", f"all ranks ended well, and the launch with {launched.status}"
    if len({(one["digest"], one["done"]) for one in ranks}) > 1:
        return "difference", f"parameters or steps differ: {[one['done'] for one in ranks]} steps"
    if ranks[0]["done"] < STEPS - 1:
        return "unclear", f"it went on without an error, and took {ranks[0]['done']} of {STEPS} steps"
    sums = [dict(np.load(folder / f"rank-{rank}.npz")) for rank in range(case.ranks)]
    if lost := _lost(sums) or _lost_on_disk(case, folder):
        return "loss", lost
    return "recovered", f"after {ranks[0]['done']} steps"


def _lost_on_disk(case: Case, folder: Path) -> str:
    """What the newest complete state on disk lacks of what was given up to it; empty if nothing."""
    state = folder / "state"
    if not any(state.glob(f"step-*-rank-{case.ranks - 1}-of-*.safetensors")):
        return ""  # nothing was saved by all ranks
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a newer set is not complete
            saved = [checkpoint.load(state, rank, case.ranks) for rank in range(case.ranks)]
    except FileNotFoundError:
        return ""
    except ValueError as error:
        return f"what was saved cannot be loaded: {error}"
    sums = []
    for rank, one in enumerate(saved):
        known = dict(np.load(folder / "sums" / f"{max(one['steps'].values())}-{rank}.npz"))
        kept = {name: one["state"].get(name, {}).get("residual", np.zeros(SHAPES[name])) for name in SHAPES}
        sums.append({**known, **{f"residual.{name}": array for name, array in kept.items()}})
    lost = _lost(sums)
    return lost and f"on disk: {lost}"


def _lost(sums: Sequence[Mapping[str, Any]]) -> str:
    """Whether all that ranks gave was received or is kept; says which tensor lacks something, or is empty."""
    for name, shape in SHAPES.items():
        given = sum(one[f"given.{name}"] for one in sums)
        kept = sum(one[f"residual.{name}"].reshape(shape) for one in sums)
        there = len(sums) * sums[0][f"received.{name}"] + kept
        error = float(np.abs(given - there).max() / np.abs(given).max())
        if not error <= TOLERANCE:
            return f"tensor {name!r}: {error:.2g} of the largest sum is neither received nor kept"
    return ""


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
