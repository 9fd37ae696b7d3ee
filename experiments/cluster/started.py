"""What started this process: launchers tell their ranks by variables of the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Started", "is_first", "started"]

#: The variable of a rank's number, that of how many there are, and by what ranks so started find each other.
#: Slurm's come last: mpirun and torchrun inside a job set their own, too.
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
    """A process that a launcher started.

    Attributes:
        driver: by what its ranks find each other: "Horovod" (over MPI or Gloo) or "DDP".
        rank: its number.
        world_size: how many there are.
    """

    driver: str
    rank: int
    world_size: int


def started() -> Started | None:
    """As which rank this process was started; None if no launcher did, or it is the only task of a Slurm step."""
    for number, count, driver in _LAUNCHERS:
        if number not in os.environ or (driver == "DDP" and "MASTER_ADDR" not in os.environ):
            continue
        found = Started(driver, int(os.environ[number]), int(os.environ.get(count, "1")))
        if number != "SLURM_PROCID" or found.world_size > 1:  # a batch script and `srun --pty bash` have it, too
            return found
    return None


def is_first() -> bool:
    """Whether this process is alone, or the first of the ranks that a launcher started."""
    place = started()
    return place is None or place.rank == 0
