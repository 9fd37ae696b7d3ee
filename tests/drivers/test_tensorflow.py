"""The TensorFlow driver behind the stock tape and optimizers, launched as a user launches it; what is checked is in
``tf_cases.py`` (the driver), ``keras_cases.py`` (Keras 3) and ``keras2_cases.py`` (the stock optimizer of Keras 2)."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import case_names, check, outcomes

pytest.importorskip("tensorflow")
pytest.importorskip("horovod")
pytestmark = pytest.mark.parallel

HERE = Path(__file__).parent
TENSORFLOW, KERAS, KERAS_2, TORCH = (
    HERE / f"{name}.py" for name in ("tf_cases", "keras_cases", "keras2_cases", "cases")
)
SECONDS = 540
# over Gloo, ranks that share cores are slow: a few cases that together use every collective
OVER_GLOO = (
    "equals_loopback_with_sum",
    "eager_execution",
    "steps_in_a_loop_inside_one_function",
    "a_trigger_on_one_rank_restarts_all",
    "different_plans",
    "a_rank_that_raises_inside_the_codec",
)


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("kind", ["mpi-2", "mpi-3"])
@pytest.mark.parametrize("name", case_names(TENSORFLOW))
def test_case(kind: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(kind, name, outcomes(kind, TENSORFLOW, tmp_path_factory.mktemp(kind), seconds=SECONDS))


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("name", OVER_GLOO)
def test_case_over_gloo(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = outcomes("gloo-2", TENSORFLOW, tmp_path_factory.mktemp("gloo"), *OVER_GLOO, seconds=SECONDS)
    check("gloo-2", name, found)


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("kind", ["mpi-2", "mpi-3"])
@pytest.mark.parametrize("name", case_names(KERAS))
def test_keras(kind: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(kind, name, outcomes(kind, KERAS, tmp_path_factory.mktemp(kind), seconds=SECONDS))


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("name", case_names(KERAS_2))
def test_keras_2(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check("mpi-2", name, outcomes("mpi-2", KERAS_2, tmp_path_factory.mktemp("keras2"), seconds=SECONDS))


@pytest.mark.timeout(2 * SECONDS)
def test_torch_and_tensorflow_send_the_same_bytes(tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("torch")
    case = "payloads_for_the_other_driver_to_equal"
    folder = tmp_path_factory.mktemp("torch")
    torch, log = outcomes("mpi-2", TORCH, folder, case)
    check("mpi-2", case, (torch, log))
    tensorflow, _ = outcomes("mpi-2", TENSORFLOW, tmp_path_factory.mktemp("mpi-2"), seconds=SECONDS)
    for rank, (a, b) in enumerate(zip(torch, tensorflow, strict=True)):
        wanted = {key: value for key, value in a["numbers"].items() if key.startswith("payloads")}
        assert wanted and wanted == {key: b["numbers"][key] for key in wanted}, f"rank {rank}"
