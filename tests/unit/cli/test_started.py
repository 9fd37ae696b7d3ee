"""Which rank a process is, by what launchers tell theirs."""

from __future__ import annotations

import pytest

from hvdcompress.cli.started import Started, is_first, started

SLURM = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
#: what launchers give their ranks
OF_RANKS: dict[str, tuple[dict[str, str], Started]] = {
    "mpirun": ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, Started("Horovod", 0, 1)),
    "mpirun in a job of Slurm": (
        {**SLURM, "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
        Started("Horovod", 2, 4),
    ),
    "horovodrun --gloo": ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "3"}, Started("Horovod", 1, 3)),
    "torchrun": ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, Started("DDP", 1, 2)),
    "torchrun in a job of Slurm": (
        {**SLURM, "RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "node1"},
        Started("DDP", 1, 8),
    ),
    "MPICH": ({"PMI_RANK": "3", "PMI_SIZE": "4"}, Started("Horovod", 3, 4)),
    "srun": (SLURM, Started("Horovod", 0, 2)),
    "srun --mpi=pmix": ({**SLURM, "SLURM_PROCID": "1", "PMIX_RANK": "1"}, Started("Horovod", 1, 2)),
}
#: what looks like a rank, and is none
ALONE: dict[str, dict[str, str]] = {
    "a shell": {},
    "a batch script of Slurm": {"SLURM_PROCID": "0"},
    "srun --pty bash": {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "a RANK that no launcher set": {"RANK": "7", "WORLD_SIZE": "8"},
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (name for given, _ in OF_RANKS.values() for name in given):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("launcher", OF_RANKS)
def test_a_rank_knows_its_place(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, place = OF_RANKS[launcher]
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert started() == place and is_first() == (place.rank == 0)


@pytest.mark.parametrize("where", ALONE)
def test_what_no_launcher_started_is_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ALONE[where].items():
        monkeypatch.setenv(name, value)
    assert started() is None and is_first()
