"""The examples of PyTorch and TensorFlow train."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from tests import ROOT
from tests.installed import needs


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "kind,kind_of_launch,names",
    [
        ("torch", "mpi-2", ["compressed"]),
        ("ddp", "torchrun-2", ["compressed"]),
        pytest.param("torch", "horovodrun-2", ["plain", "compressed"], marks=pytest.mark.slow),
        pytest.param("ddp", "torchrun-2", ["plain", "compressed"], marks=pytest.mark.slow),
    ],
)
def test_the_torch_examples_train(kind: str, kind_of_launch: str, names: list[str]) -> None:
    needs("torch", *(["horovod"] if kind == "torch" else []))
    sys.path.insert(0, str(ROOT / "tests" / "drivers"))
    from tests.launching import launch

    found = {}
    for name in names:
        done = launch(kind_of_launch, ROOT / "examples" / f"{kind}_{name}.py", seconds=90)
        assert done.returncode == 0, done.stdout[-2000:]
        found[name] = float(re.search(r"accuracy ([\d.]+)%", done.stdout)[1])
    assert found.get("plain", 100) > 93 and found["compressed"] > 92, found
    assert np.ptp([*found.values()]) <= 3, found


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "name",
    [
        "tensorflow_compressed",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("tensorflow_plain", "keras_compressed")),
    ],
)
def test_the_tensorflow_examples_train(name: str) -> None:
    needs("tensorflow", "horovod")
    sys.path.insert(0, str(ROOT / "tests" / "drivers"))
    from tests.launching import launch

    done = launch("mpi-2", ROOT / "examples" / f"{name}.py", seconds=150)
    assert done.returncode == 0, done.stdout[-2000:]
    assert float(re.search(r"accuracy ([\d.]+)%", done.stdout)[1]) > 92
