"""Start ranks as a user does, and read what each of them wrote."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.installed import python_path, without_tensorflow

SECONDS = 240
MORE = 60  #: what a test may take beyond its launch


def untraced() -> dict[str, str]:
    """Our environment, without traces of an MPI that we may have been started by, or that runs in this process."""
    traces = ("OMPI_", "PMIX_", "PMI_")
    return {name: value for name, value in os.environ.items() if not name.startswith(traces)}


#: more ranks than cores, not bound to any, which yield while they wait: Open MPI 4 and 5, Intel MPI, MPICH
MPI_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "I_MPI_WAIT_MODE": "1",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1",
}


def environment(kind: str, **more: str) -> dict[str, str]:
    """Ranks share two cores: one thread each, and MPI yields while it waits."""
    return {
        **(untraced() if kind.startswith(("alone", "mpi")) else os.environ),
        "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"],
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
        "HVDCOMPRESS_THREADS": "1",
        **MPI_SETTINGS,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **({"NODES": str(num_nodes_of(kind)), "HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if num_nodes_of(kind) else {}),
        **(without_tensorflow() if more.get("DRIVER") == "torch" else {}),
        **more,
    }


def world_size_of(kind: str) -> int:
    """The ranks of "alone", "mpirun-3", "mpi-2" (Horovod's), "horovodrun-2" (the same), "gloo-2", "torchrun-2"
    or "elastic-3" (Horovod's, at first; ``DISCOVER`` in the environment says which hosts there are). "mpirun-2x2" has 2
    nodes of 2 ranks, which exchange with two levels."""
    return 1 if kind == "alone" else math.prod(map(int, kind.split("-")[1].split("x")))


def num_nodes_of(kind: str) -> int:
    """The nodes of a launch whose exchanges have two levels; 0 for one level."""
    return int(kind.split("-")[1].split("x")[0]) if "x" in kind else 0


def launch(
    kind: str, script: Path, *arguments: str, seconds: float = SECONDS, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a script on every rank, with ``more`` in its environment; ends all its processes when it takes too long."""
    world_size = str(world_size_of(kind))
    elastic = ("--gloo-timeout-seconds", "20", "--host-discovery-script", more.get("DISCOVER", ""))
    mpirun = ["mpiexec", "-n", world_size]
    start = {
        "alone": [],
        "mpirun": mpirun,
        "mpi": [*mpirun, "-map-by", "slot", "-mca", "pml", "ob1", "-mca", "btl", "^openib"],  # horovodrun's own line
        "horovodrun": ["horovodrun", "-np", world_size, "--mpi"],  # it imports every framework: five seconds
        "gloo": ["horovodrun", "-np", world_size, "--gloo"],
        "elastic": ["horovodrun", "-np", world_size, "--min-np", "2", "--max-np", world_size, "--gloo", *elastic],
        "torchrun": ["torchrun", "--standalone", "--no-python", "--nproc-per-node", world_size],
    }[kind.split("-")[0]]
    line = [*start, sys.executable, str(script), *arguments]
    with subprocess.Popen(
        line,
        env=environment(kind, **more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # horovodrun and mpirun end their ranks
            output, _ = process.communicate(timeout=30)
            pytest.fail(f"{' '.join(line)} took more than {seconds} s\n{output[-6000:]}")
    return subprocess.CompletedProcess(line, process.returncode, output)
