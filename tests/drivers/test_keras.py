"""Keras 3's optimizer and callbacks (``keras_cases.py``), and the stock optimizer of Keras 2 (``keras2_cases.py``)."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import MORE, case_names, check, outcomes

pytest.importorskip("tensorflow")
pytest.importorskip("horovod")
pytestmark = pytest.mark.parallel

KERAS, KERAS_2 = (Path(__file__).parent / f"{name}.py" for name in ("keras_cases", "keras2_cases"))
SECONDS = 540


@pytest.mark.timeout(SECONDS + MORE)
@pytest.mark.parametrize("kind", ["mpi-2", pytest.param("mpi-3", marks=pytest.mark.slow)])  # as of the driver below
@pytest.mark.parametrize("name", case_names(KERAS))
def test_keras(kind: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(kind, name, outcomes(kind, KERAS, tmp_path_factory.mktemp(kind), seconds=SECONDS))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + MORE)
@pytest.mark.parametrize("name", case_names(KERAS_2))
def test_keras_2(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check("mpi-2", name, outcomes("mpi-2", KERAS_2, tmp_path_factory.mktemp("keras2"), seconds=SECONDS))
