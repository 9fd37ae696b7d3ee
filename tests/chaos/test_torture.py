"""The torture: cases come from their seeds, the judge sees what it is there to see, and a few faults are survived."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from experiments.torture import report, run
from experiments.torture.faults import Case
from tests.installed import needs


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("driver,module", [("mpi", "mpi4py"), ("ddp", "torch")])
def test_faults_are_survived(driver: str, module: str, tmp_path: Path) -> None:
    needs(module)
    if driver == "mpi" and not shutil.which("mpirun"):
        pytest.skip("mpirun is not installed")
    folder = tmp_path / "torture"
    run.prepare(folder, {}, resume=False)
    cases = [Case.drawn(seed, [driver], [fault]) for seed, fault in enumerate(("killed", "decode", "nan", "plan"))]
    run.run(folder, cases, print)
    found = run.records(folder)
    assert len(found) == len(cases) and not report.bugs(found), report.bugs(found)
    run.run(folder, cases, lambda words: pytest.fail(f"run a second time: {words}"))
