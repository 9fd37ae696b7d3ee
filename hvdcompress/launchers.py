"""What launchers tell the processes that they start, by environment variables: horovodrun, mpirun, torchrun, srun."""

from __future__ import annotations

import os
import re
from typing import NamedTuple


class Launcher(NamedTuple):
    """The variables of one launcher.

    Attributes:
        rank: variable with the rank.
        world_size: variable with the number of ranks.
        local_size: variable with the number of ranks on this host; empty if there is none.
        driver: "Horovod" (over MPI or Gloo) or "DDP": what connects such ranks.
    """

    rank: str
    world_size: str
    local_size: str
    driver: str = "Horovod"


#: Slurm comes last, because mpirun and torchrun inside a Slurm job set their own variables, too.
LAUNCHERS = (
    Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # also under horovodrun
    Launcher("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),  # horovodrun over Gloo
    Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),  # other MPIs
    Launcher("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "DDP"),  # torchrun
    Launcher("PMIX_RANK", "SLURM_STEP_NUM_TASKS", ""),  # srun --mpi=pmix; PMIx itself has no variable of how many
    Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ""),  # srun
)
#: variables with an address of the master host
MASTERS = ("MASTER_ADDR", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "OMPI_MCA_orte_hnp_uri", "SLURM_LAUNCH_NODE_IPADDR")
#: variables of the launchers that are the parents of the processes that they start
PARENTS = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "HOROVOD_RANK")


class Started(NamedTuple):
    """A process that a launcher started."""

    driver: str
    rank: int
    world_size: int


def started() -> Started | None:
    """Return this process's rank; None if no launcher started it, or it is the only task of a Slurm step."""
    for each in LAUNCHERS:
        if each.rank not in os.environ or (each.driver == "DDP" and "MASTER_ADDR" not in os.environ):
            continue
        found = Started(each.driver, int(os.environ[each.rank]), int(os.environ.get(each.world_size, "1")))
        if each.rank != "SLURM_PROCID" or found.world_size > 1:  # a batch script and `srun --pty bash` have it, too
            return found
    return None


def is_first() -> bool:
    """Return whether this process is rank 0, or no rank at all."""
    place = started()
    return place is None or place.rank == 0


def is_elastic() -> bool:
    """Return whether Horovod's elastic launcher started this process."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def has_launcher_as_parent() -> bool:
    """Return whether the parent of this process is its launcher."""
    return any(name in os.environ for name in PARENTS)


def local_size() -> int:
    """Return the number of ranks on this host; 1 if it is not known."""
    found = (os.environ.get(each.local_size, "") for each in LAUNCHERS)
    return next((int(text) for text in found if text.isdecimal()), 1)


def is_one_host() -> bool:
    """Return whether a launcher tells that all ranks are on this host."""
    return any(os.environ.get(each.local_size, "-") == os.environ.get(each.world_size) for each in LAUNCHERS)


def master_hosts() -> list[str]:
    """Return the addresses and names of the master host that launchers tell."""
    known = [os.environ[name] for name in MASTERS if os.environ.get(name)]
    return [host for text in known for uri in re.findall(r"tcp://([\d.,]+)", text) or [text] for host in uri.split(",")]


def torchrun_location() -> list[int] | None:
    """Return node, number of nodes, local rank and local size, if torchrun started this process."""
    names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # torchrun's groups are nodes
    found = [os.environ.get(name, "") for name in names]
    return list(map(int, found)) if all(map(str.isdecimal, found)) else None
