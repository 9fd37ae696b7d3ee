"""What launchers tell: the rank of a process, by the environment variables of launchers."""

from __future__ import annotations

import pytest

from hvdcompress.launchers import Started, is_first, started

SLURM = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
#: environment variables by launcher, and which rank that is
LAUNCHERS: dict[str, tuple[dict[str, str], Started | None]] = {
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
    # no launcher has started these
    "a shell": ({}, None),
    "a batch script of Slurm": ({"SLURM_PROCID": "0"}, None),
    "srun --pty bash": ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
    "a RANK that no launcher set": ({"RANK": "7", "WORLD_SIZE": "8"}, None),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_rank_of_a_process(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (name for given, _ in LAUNCHERS.values() for name in given):
        monkeypatch.delenv(variable, raising=False)
    given, rank = LAUNCHERS[launcher]
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    assert started() == rank and is_first() == (rank is None or rank.rank == 0)
