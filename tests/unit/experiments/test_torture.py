"""The torture's cases come from their seeds, and its judge sees every kind of bug."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.torture import launch as launching
from experiments.torture.faults import DRIVERS, FAULTS, INJECTED, STEPS, Case
from experiments.torture.judge import BUGS, judge
from experiments.torture.launch import Launched
from experiments.torture.trainings import SHAPES

CASE = replace(Case.drawn(4, ["mpi"], ["compress"]), ranks=2, victim=1, catches=False)


WELL = Launched(0, True, 1.0, ())


ENDED = Launched(1, True, 1.0, ())


def test_a_case_is_drawn_from_its_seed() -> None:
    number = len(DRIVERS) * len(FAULTS)
    cases = [Case.drawn(seed) for seed in range(number)]
    assert {(case.driver, case.fault) for case in cases} == {(driver, fault) for driver in DRIVERS for fault in FAULTS}
    for case in cases:
        assert Case.drawn(case.seed, [case.driver], [case.fault]) == case, "the command shows another case"
        assert 0 <= case.victim < case.ranks and 0 < case.step < STEPS - 1
        assert case.can_recover or case.can_end, case
    assert len({(case.method, case.ranks, case.step) for case in cases}) > number / 2


def ended(folder: Path, residual: float = 2.0, digest: str = "a", log: str = "", done: int = STEPS - 1) -> Path:
    """What two ranks leave that gave 1 and 3, received 1 on average, and keep ``residual`` in all."""
    (folder / "log.txt").write_text(f"$ line\n{log}\n", encoding="utf-8")
    for rank in range(2):
        arrays = {}
        for name, shape in SHAPES.items():
            arrays[f"given.{name}"] = np.full(shape, 1.0 + 2 * rank)
            arrays[f"received.{name}"], arrays[f"residual.{name}"] = np.ones(shape), np.full(shape, residual / 2)
        np.savez(folder / f"rank-{rank}.npz", **arrays)
        said = {"ended": "done", "done": done, "digest": digest if rank else "a"}
        (folder / f"rank-{rank}.json").write_text(json.dumps(said), encoding="utf-8")
    return folder


def test_a_training_that_keeps_everything_has_recovered(tmp_path: Path) -> None:
    assert judge(CASE, WELL, ended(tmp_path)).outcome == "recovered"


def test_every_kind_of_bug_is_seen(tmp_path: Path) -> None:
    folder, seen = ended(tmp_path), {}

    def outcome(launched: Launched = WELL, case: Case = CASE) -> str:
        found = judge(case, launched, folder)
        seen[found.outcome] = found.why
        return found.outcome

    assert outcome(Launched(None, True, 15.0, ())) == "hang"
    assert outcome(Launched(0, True, 1.0, ("process 7",))) == "leftover"
    assert outcome(Launched(0, False, 1.0, ())) == "unclear"
    assert outcome(case=replace(CASE, fault="plan")) == "unclear", "ranks with different plans went on"
    ended(folder, done=STEPS - 2)
    assert outcome() == "unclear", "two steps were left out after one fault"
    ended(folder, residual=1.9)
    assert outcome() == "loss"
    ended(folder, digest="b")
    assert outcome() == "difference"
    (folder / "rank-1.json").unlink()
    assert outcome(ENDED) == "difference", "one rank went on to its end"
    (folder / "rank-0.json").unlink()
    assert outcome(ENDED) == "unclear", "there is no word of what was wrong"
    assert seen.keys() == BUGS.keys()
    (folder / "log.txt").write_text(f"$ line\nRuntimeError: {INJECTED} in compress\n", encoding="utf-8")
    assert outcome(ENDED) == "error"
    assert outcome(ENDED, replace(CASE, fault="nan")) == "unclear", "a NaN must not end a training"


WAITS = """
import faulthandler, json, os, signal, sys, time
from pathlib import Path
faulthandler.register(signal.SIGUSR1)
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
(folder / "rank-0.json").write_text(json.dumps({"pid": os.getpid()}))
(folder / "fault.json").write_text(json.dumps({"time": time.monotonic(), "pid": os.getpid()}))
def waits_for_ever():
    time.sleep(seconds)
waits_for_ever()
"""


def waits(seconds: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Launch what goes on for so long after its fault, with a patience of half a second."""
    folder.mkdir()
    monkeypatch.setattr(launching, "line", lambda case, at: [sys.executable, "-c", WAITS, str(at), str(seconds)])
    monkeypatch.setattr(launching, "PATIENCE", 0.5)
    return launching.launch(CASE, folder)


def test_where_a_launch_hangs_is_in_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "STARVED", 0.0)
    assert waits(100.0, tmp_path / "hang", monkeypatch).status is None
    assert "waits_for_ever" in (tmp_path / "hang" / "log.txt").read_text(encoding="utf-8")
