"""The launches of each driver."""

from __future__ import annotations

import re

#: driver -> launch -> its kind. A test runs in launches of two ranks, and in others if it says ``also(kind)`` or
#: ``only(kind)``. The ranks of "threads-N" are threads of one process; ``tests/launching.py`` explains the others.
LAUNCHES: dict[str, dict[str, str]] = {
    "loopback": {"threads-2": "two ranks", "threads-3": "three ranks", "threads-2x2": "two levels"},
    "torch": {
        "mpi-2": "two ranks",
        "mpi-3": "three ranks",
        "mpi-4": "four ranks",
        "gloo-2": "gloo",
        "mpi-2x2": "two levels",
    },
    "ddp": {
        "torchrun-2": "two ranks",
        "torchrun-3": "three ranks",
        "torchrun-4": "four ranks",
        "torchrun-2x2": "two levels",
    },
    "tensorflow": {"mpi-2": "two ranks", "mpi-3": "three ranks", "gloo-2": "gloo"},
    "keras2": {"mpi-2": "Keras 2"},
    "mpi": {
        "mpirun-2": "two ranks",
        "alone": "one rank",
        "mpirun-3": "three ranks",
        "mpirun-4": "four ranks",
        "mpirun-2x2": "two levels",
    },
}

#: what each driver needs
PACKAGES: dict[str, tuple[str, ...]] = {
    "loopback": (),
    "torch": ("torch", "horovod"),
    "ddp": ("torch",),
    "tensorflow": ("tensorflow", "horovod"),
    "keras2": ("tf_keras", "horovod"),
    "mpi": ("mpi4py",),
}

#: Tried with --slow only. The ranks of other launches go through the same code: three ranks are tried with MPI and the
#: loopback, two levels with MPI, DDP and the loopback.
SLOW = {
    ("torch", "mpi-3"),
    ("torch", "mpi-4"),
    ("torch", "mpi-2x2"),
    ("ddp", "torchrun-3"),
    ("ddp", "torchrun-4"),
    ("tensorflow", "mpi-3"),
    ("tensorflow", "gloo-2"),
    ("keras2", "mpi-2"),
    ("mpi", "mpirun-4"),
}

#: Longest time of a launch and of one test in seconds, on a machine with other work to do
SECONDS = 1200
SECONDS_PER_TEST = 150

_PROCESSES = "|".join(f"{driver}-{name}" for driver, launches in LAUNCHES.items() for name in launches)


def launch_of(nodeid: str) -> str:
    """Return the driver and the launch of a test, such as "ddp-torchrun-2"; empty if it runs in this process."""
    found = re.search(rf"\[({_PROCESSES})[]-]", nodeid)
    return found[1] if found and not found[1].startswith("loopback") else ""
