"""The torture: cases are drawn from their seeds, the judge sees every kind of bug, and a few faults are survived."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.chaos import __main__ as command
from tests.chaos import judge as judging
from tests.chaos import soak
from tests.chaos.faults import DRIVERS, FAULTS, INJECTED, SHAPES, STEPS, Case
from tests.chaos.judge import BUGS, Launched, judge
from tests.installed import needs

CASE = replace(Case.drawn(4, ["mpi"], ["compress"]), world_size=2, victim=1, catches=False)
WELL, ENDED = Launched(0, True, 1.0), Launched(1, True, 1.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("driver,module", [("mpi", "mpi4py"), ("ddp", "torch")])
def test_faults_are_survived(driver: str, module: str, tmp_path: Path) -> None:
    needs(module)
    if driver == "mpi" and not shutil.which("mpirun"):
        pytest.skip("mpirun is not installed")
    faults = ("killed", "decode", "nan", "plan", "garbage")
    found = command.run([Case.drawn(seed, [driver], [fault]) for seed, fault in enumerate(faults)], tmp_path)
    assert list(found["fault"]) == [*faults] and not found["outcome"].isin(BUGS).any(), found["why"]
    assert command.table(found)["launches"].sum() == len(faults) and (tmp_path / "chaos.json").exists()


def test_a_case_is_drawn_from_its_seed() -> None:
    number = len(DRIVERS) * len(FAULTS)
    cases = [Case.drawn(seed) for seed in range(number)]
    assert {(case.driver, case.fault) for case in cases} == {(driver, fault) for driver in DRIVERS for fault in FAULTS}
    for case in cases:
        assert Case.drawn(case.seed, [case.driver], [case.fault]) == case, "the command would show another case"
        assert 0 <= case.victim < case.world_size and 0 < case.step < STEPS - 1
        assert case.may_recover or case.may_end, case
    assert len({(case.method, case.world_size, case.step) for case in cases}) > number / 2


def ended(folder: Path, residual: float = 2.0, digest: str = "a", log: str = "", done: int = STEPS - 1) -> Path:
    """Write the files of two ranks that gave 1 and 3, received 1 on average, and keep ``residual`` in all."""
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
    folder, seen = ended(tmp_path), set()

    def outcome(launched: Launched = WELL, case: Case = CASE) -> str:
        found = judge(case, launched, folder).outcome
        seen.add(found)
        return found

    assert outcome(Launched(None, True, 15.0)) == "hang"
    assert outcome(Launched(0, True, 1.0, ["process 7"])) == "leftover"
    assert outcome(Launched(0, False, 1.0)) == "unclear"
    assert outcome(case=replace(CASE, fault="plan")) == "unclear", "ranks with different plans continued"
    ended(folder, done=STEPS - 2)
    assert outcome() == "unclear", "two steps were skipped after one fault"
    ended(folder, residual=1.9)
    assert outcome() == "loss"
    ended(folder, digest="b")
    assert outcome() == "difference"
    (folder / "rank-1.json").unlink()
    assert outcome(ENDED) == "difference", "one rank continued to its end"
    (folder / "rank-0.json").unlink()
    assert outcome(ENDED) == "unclear", "no error names the fault"
    assert seen == BUGS.keys()
    (folder / "log.txt").write_text(f"$ line\nRuntimeError: {INJECTED} in compress\n", encoding="utf-8")
    assert outcome(ENDED) == "error"
    assert outcome(ENDED, replace(CASE, fault="nan")) == "unclear", "a NaN must not end a training"


HANGS = """
import faulthandler, json, os, signal, sys, time
from pathlib import Path
faulthandler.register(signal.SIGUSR1)
folder = Path(sys.argv[1])
(folder / "rank-0.json").write_text(json.dumps({"pid": os.getpid()}))
(folder / "fault.json").write_text(json.dumps({"time": time.monotonic(), "pid": os.getpid()}))
def waits_for_ever():
    time.sleep(100)
waits_for_ever()
"""


def test_where_a_launch_hangs_is_in_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "PATIENCE", 0.5)
    monkeypatch.setattr(judging, "STARVED", 0.0)
    assert judging.run(CASE, tmp_path, [[sys.executable, "-c", HANGS, str(tmp_path)]]).status is None
    assert "waits_for_ever" in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_what_grows_in_a_soak_is_named() -> None:
    """PowerSGD's own residuals grow, by Alg. 2, if the ranks' gradients differ for good; their mean does not."""
    found = soak.soak("powersgd", 600)
    assert found["equal"] and found["own_residual_per_step"] > 0.1 > 20 * abs(found["residual_per_step"])
    well = {**found, "memory_per_step": 0.0, "residual_per_step": 0.0, "seconds_first": 1.0, "seconds_last": 1.0}
    assert not soak.wrong(well)
    for what, change in {
        "ranks differ": {"equal": False},
        "memory grows": {"memory_per_step": 1e4},
        "the residual grows": {"residual_per_step": 1.0},
        "steps become slower": {"seconds_last": 2.0},
    }.items():
        assert soak.wrong({**well, **change}) == what
