"""Every promise under mpi4py, and what the driver alone has; see ``promise_launches.py``."""

from __future__ import annotations

import re

import pytest

from tests.launched.promise_launches import SECONDS, launched_tests, outcome
from tests.launching import MORE
from tests.promises.table import DRIVERS, is_slow

test_promise, test_case = launched_tests("mpi")
QUIET = "sums_are_the_loopbacks"  #: what is tried in the launches whose log must be clean


@pytest.mark.timeout(SECONDS["mpi"] + MORE)
@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(launch, marks=[pytest.mark.slow] if is_slow("mpi", launch, QUIET) else [])
        for launch in DRIVERS["mpi"].launches
    ],
)
def test_ranks_end_well_and_in_silence(launch: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    _, log, status = outcome("mpi", launch, QUIET, tmp_path_factory)
    assert status == 0, log[-3000:]
    assert "Traceback" not in log and not re.search(r"\berror\b", log.lower()), log[-3000:]
