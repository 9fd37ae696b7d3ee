"""The stock optimizer of Keras 2 (``keras2_cases.py``); ``test_promises_tensorflow.py`` has Keras 3."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.installed import needs
from tests.launching import MORE, case_names, check, outcomes

needs("tensorflow", "horovod")
pytestmark = pytest.mark.slow

KERAS_2 = Path(__file__).parent / "keras2_cases.py"
SECONDS = 540


@pytest.mark.timeout(SECONDS + MORE)
@pytest.mark.parametrize("name", case_names(KERAS_2))
def test_keras_2(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check("mpi-2", name, outcomes("mpi-2", KERAS_2, tmp_path_factory.mktemp("keras2"), seconds=SECONDS))
