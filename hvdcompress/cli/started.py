"""Which launcher started this process: launchers set environment variables for their ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass

#: (variable of the rank, variable of the world size, driver that connects such ranks).
#: Slurm comes last, because mpirun and torchrun inside a Slurm job set their own variables, too.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Horovod"),  # Open MPI, also under horovodrun
    ("HOROVOD_RANK", "HOROVOD_SIZE", "Horovod"),  # horovodrun over Gloo
    ("PMI_RANK", "PMI_SIZE", "Horovod"),  # other MPIs
    ("RANK", "WORLD_SIZE", "DDP"),  # torchrun
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "Horovod"),  # srun --mpi=pmix; PMIx itself has no variable of how many
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "Horovod"),  # srun
)


@dataclass(frozen=True)
class Started:
    """A process that a launcher started."""

    driver: str  #: "Horovod" (over MPI or Gloo) or "DDP"
    rank: int
    world_size: int


def started() -> Started | None:
    """Return this process's rank; None if no launcher started it, or it is the only task of a Slurm step."""
    for number, count, driver in _LAUNCHERS:
        if number not in os.environ or (driver == "DDP" and "MASTER_ADDR" not in os.environ):
            continue
        found = Started(driver, int(os.environ[number]), int(os.environ.get(count, "1")))
        if number != "SLURM_PROCID" or found.world_size > 1:  # a batch script and `srun --pty bash` have it, too
            return found
    return None


def is_first() -> bool:
    """Return whether this process is rank 0, or no rank at all."""
    place = started()
    return place is None or place.rank == 0
