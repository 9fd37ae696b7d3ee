"""The examples of PyTorch and TensorFlow train."""

from __future__ import annotations

import re

import pytest

from tests import ROOT
from tests.installed import needs
from tests.launching import launch


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("kind_of_launch", "example"),
    [
        pytest.param("torchrun-2", "ddp_compressed", marks=pytest.mark.slow),  # Lightning's is not
        ("mpi-2", "torch_compressed"),
        pytest.param("mpi-2", "tensorflow_compressed", marks=pytest.mark.slow),
        pytest.param("torchrun-2", "ddp_plain", marks=pytest.mark.slow),
        pytest.param("horovodrun-2", "torch_plain", marks=pytest.mark.slow),
        pytest.param("horovodrun-2", "torch_compressed", marks=pytest.mark.slow),
        pytest.param("mpi-2", "tensorflow_plain", marks=pytest.mark.slow),
        pytest.param("mpi-2", "keras_compressed", marks=pytest.mark.slow),
        pytest.param("torchrun-2", "keras_ddp", marks=pytest.mark.slow),
    ],
)
def test_an_example_trains(kind_of_launch: str, example: str) -> None:
    if kind_of_launch.startswith("torchrun"):
        needs("torch", *(["keras"] if "keras" in example else []))
    else:
        needs("horovod", "torch" if "torch" in example else "tensorflow")
    done = launch(kind_of_launch, ROOT / "examples" / f"{example}.py", seconds=150)
    assert done.returncode == 0, done.stdout[-2000:]
    accuracy = float(re.search(r"accuracy ([\d.]+)%", done.stdout)[1])
    assert accuracy > (93 if example in ("ddp_plain", "torch_plain") else 92)
