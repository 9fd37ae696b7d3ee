"""``python -m tests.chaos``: drawing cases, judging launches, and a few faults."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.chaos import __main__ as command
from tests.chaos import soak
from tests.chaos.faults import DRIVERS, FAULTS, INJECTED, SHAPES, STEPS, Case
from tests.chaos.files import write_arrays
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
    cases = [Case.drawn(seed) for seed in range(len(DRIVERS) * len(FAULTS))]
    assert {(case.driver, case.fault) for case in cases} == {(driver, fault) for driver in DRIVERS for fault in FAULTS}
    for case in cases:
        assert Case.drawn(case.seed, [case.driver], [case.fault]) == case, "the command would show another case"
        assert 0 <= case.victim < case.world_size and 0 < case.step < STEPS - 1
        assert case.may_recover or case.may_end, case


def write_ranks(
    folder: Path, ranks: int = 2, residual: float = 2.0, digest: str = "a", log: str = "", done: int = STEPS - 1
) -> None:
    """Write the files of ranks that gave 1 and 3, received 1 on average, and keep ``residual`` in all."""
    (folder / "log.txt").write_text(f"$ line\n{log}\n", encoding="utf-8")
    for rank in range(ranks):
        given = {name: np.full(shape, 1.0 + 2 * rank) for name, shape in SHAPES.items()}
        received = {name: np.ones(shape) for name, shape in SHAPES.items()}
        kept = {name: np.full(shape, residual / 2) for name, shape in SHAPES.items()}
        write_arrays(folder / f"rank-{rank}.npz", given=given, received=received, residual=kept)
        said = {"ended": "done", "done": done, "digest": digest if rank else "a"}
        (folder / f"rank-{rank}.json").write_text(json.dumps(said), encoding="utf-8")


@pytest.mark.parametrize(
    "outcome,launched,case,files",
    [
        ("recovered", WELL, {}, {}),
        ("hang", Launched(None, True, 15.0), {}, {}),
        ("leftover", Launched(0, True, 1.0, ["process 7"]), {}, {}),
        ("unclear", Launched(0, False, 1.0), {}, {}),  # the fault did not come
        ("unclear", WELL, {"fault": "plan"}, {}),  # ranks with different plans continued
        ("unclear", WELL, {}, {"done": STEPS - 2}),  # two steps were skipped after one fault
        ("loss", WELL, {}, {"residual": 1.9}),
        ("difference", WELL, {}, {"digest": "b"}),
        ("difference", ENDED, {}, {"ranks": 1}),  # one rank continued to its end
        ("unclear", ENDED, {}, {"ranks": 0}),  # no error names the fault
        ("error", ENDED, {}, {"ranks": 0, "log": f"RuntimeError: {INJECTED} in compress"}),
        ("unclear", ENDED, {"fault": "nan"}, {"ranks": 0, "log": INJECTED}),  # a NaN must not end a training
    ],
)
def test_outcomes_of_launches(outcome: str, launched: Launched, case: dict, files: dict, tmp_path: Path) -> None:
    write_ranks(tmp_path, **files)
    assert judge(replace(CASE, **case), launched, tmp_path).outcome == outcome


def test_a_soak_names_what_grows() -> None:
    """PowerSGD's own residuals grow, by Alg. 2, if the ranks' gradients differ for good; their mean does not."""
    found = soak.soak("powersgd", 300)
    assert found["equal"] and found["own_residual_per_step"] > 0.1 > 20 * abs(found["residual_per_step"])
    assert soak.wrong({**found, "equal": False}).startswith("ranks differ")
