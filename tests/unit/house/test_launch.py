"""Launch files: scripts parse, and what Kubernetes gets has the fields that the operators' documentation asks for."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from tests import ROOT

LAUNCH = ROOT / "launch"
SCRIPTS = [*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch", ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    if shutil.which("shellcheck"):
        line = ["shellcheck", "-x", "-S", "warning", "-P", str(LAUNCH), "-e", "SC2034", str(script)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_every_test_is_in_a_folder_that_is_run() -> None:
    """By launch/test.sh."""
    folders = {file.relative_to(ROOT / "tests").parts[0] for file in (ROOT / "tests").rglob("test_*.py")}
    assert folders == {"unit", "launched", "hosts", "chaos"}


@pytest.mark.parametrize("words", [["srun"], ["nothing", "x.py"], []])
def test_the_slurm_script_says_what_it_lacks(words: list[str]) -> None:
    env = {
        "PATH": "/usr/bin:/bin",
        **({"SLURM_NTASKS": "2", "SLURM_NNODES": "1"} if words == ["nothing", "x.py"] else {}),
    }
    line = ["bash", str(LAUNCH / "slurm.sbatch"), *words]
    done = subprocess.run(line, capture_output=True, text=True, env=env, check=False)
    assert done.returncode != 0
    assert re.search("within a Slurm job|none of srun|give srun", done.stderr), done.stderr


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Metadata(Strict):
    name: str
    labels: dict[str, str] = {}


class Container(Strict):
    """https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#Container"""

    name: str
    image: str
    command: list[str] = []
    args: list[str] = []
    resources: dict[str, dict[str, str]] = {}
    readinessProbe: dict[str, Any] = {}


class PodSpec(Strict):
    containers: list[Container] = Field(min_length=1)


class Pod(Strict):
    spec: PodSpec


class Replicas(Strict):
    replicas: int = Field(ge=1)
    template: Pod


class MPIJobSpec(Strict):
    """https://github.com/kubeflow/mpi-operator, API v2beta1"""

    slotsPerWorker: int = Field(ge=1)
    mpiImplementation: Literal["OpenMPI", "Intel", "MPICH"]
    runPolicy: dict[str, str]
    mpiReplicaSpecs: dict[Literal["Launcher", "Worker"], Replicas]


class MPIJob(Strict):
    apiVersion: Literal["kubeflow.org/v2beta1"]
    kind: Literal["MPIJob"]
    metadata: Metadata
    spec: MPIJobSpec


def test_the_mpi_job() -> None:
    job = MPIJob.model_validate(yaml.safe_load((LAUNCH / "kubernetes" / "mpijob.yaml").read_text()))
    launcher, worker = (job.spec.mpiReplicaSpecs[name] for name in ("Launcher", "Worker"))
    arguments = launcher.template.spec.containers[0].args
    ranks = int(arguments[arguments.index("-np") + 1])
    assert ranks == worker.replicas * job.spec.slotsPerWorker and launcher.replicas == 1
    assert (ROOT / arguments[-1]).is_file()


def test_the_trainer_runtime_and_its_job() -> None:
    runtime, job = yaml.safe_load_all((LAUNCH / "kubernetes" / "trainer.yaml").read_text())
    assert {one["apiVersion"] for one in (runtime, job)} == {"trainer.kubeflow.org/v1alpha1"}
    assert (runtime["kind"], job["kind"]) == ("ClusterTrainingRuntime", "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    names = [one["name"] for one in runtime["spec"]["template"]["spec"]["replicatedJobs"]]
    assert names == ["node", "launcher"] and runtime["spec"]["mlPolicy"]["mpi"]["mpiImplementation"] == "OpenMPI"
    assert (ROOT / job["spec"]["trainer"]["args"][-1]).is_file()


def test_conda_has_what_the_package_needs() -> None:
    import configparser

    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = f"{setup['options']['install_requires']}\n{setup['options.extras_require']['cli']}".split("\n")
    needed = {re.split("[><=]", line)[0].lower() for line in lines if line and not line.startswith("#")}
    listed = yaml.safe_load((LAUNCH / "environment.yml").read_text())["dependencies"]
    assert needed <= {re.split("[><=]", one)[0] for one in listed}


def test_the_ray_script_parses_and_attaches() -> None:
    tree = ast.parse((ROOT / "examples" / "ray_compressed.py").read_text())
    assert "ddp.attach" in ast.unparse(tree)


def test_every_launch_file_is_in_the_page() -> None:
    page = (ROOT / "docs" / "launch.md").read_text()
    inner = {"lib.sh", "hosts.sh", "release.sh"}
    for file in LAUNCH.rglob("*"):
        if file.is_file() and file.suffix in (".sh", ".sbatch", ".yaml", ".yml", ".def") and file.name not in inner:
            assert file.name in page, file.name
