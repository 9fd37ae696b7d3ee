"""Launch files: scripts parse, and what Kubernetes gets has the fields that the operators' documentation asks for."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests import ROOT

LAUNCH = ROOT / "launch"
#: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#Container, the fields that we use
CONTAINER = {"name", "image", "command", "args", "resources", "readinessProbe"}
SCRIPTS = [*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch", ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    if shutil.which("shellcheck"):
        line = ["shellcheck", "-x", "-S", "warning", "-P", str(LAUNCH), "-e", "SC2034", str(script)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_every_test_is_in_a_folder_that_is_run() -> None:
    folders = {file.relative_to(ROOT).parts[1] for file in (ROOT / "tests").rglob("test_*.py")}
    paths = re.search(r"paths=\((tests/.*)\)", (LAUNCH / "test.sh").read_text())
    assert paths and {f"tests/{folder}" for folder in folders} == set(paths[1].split())


@pytest.mark.parametrize(
    "words,env,message",
    [
        ([], {}, "give srun"),
        (["srun"], {}, "within a Slurm job"),
        (["nothing", "x.py"], {"SLURM_NTASKS": "2", "SLURM_NNODES": "1"}, "none of srun"),
    ],
)
def test_the_slurm_script_says_what_is_missing(words: list[str], env: dict[str, str], message: str) -> None:
    line = ["bash", str(LAUNCH / "slurm.sbatch"), *words]
    done = subprocess.run(line, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **env}, check=False)
    assert done.returncode != 0 and message in done.stderr


def test_the_mpi_job() -> None:
    """https://github.com/kubeflow/mpi-operator, API v2beta1."""
    job = yaml.safe_load((LAUNCH / "kubernetes" / "mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec, replicas = job["spec"], job["spec"]["mpiReplicaSpecs"]
    assert spec.keys() == {"slotsPerWorker", "mpiImplementation", "runPolicy", "mpiReplicaSpecs"}
    assert replicas.keys() == {"Launcher", "Worker"}
    containers = [container for each in replicas.values() for container in each["template"]["spec"]["containers"]]
    assert all(each.keys() <= CONTAINER and each["image"] for each in containers)
    arguments = containers[0]["args"]
    ranks = replicas["Worker"]["replicas"] * spec["slotsPerWorker"]
    assert replicas["Launcher"]["replicas"] == 1 and arguments[arguments.index("-np") + 1] == str(ranks)
    assert (ROOT / arguments[-1]).is_file()


def test_the_trainer_runtime_and_its_job() -> None:
    runtime, job = yaml.safe_load_all((LAUNCH / "kubernetes" / "trainer.yaml").read_text())
    assert (runtime["kind"], job["kind"]) == ("ClusterTrainingRuntime", "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    names = [one["name"] for one in runtime["spec"]["template"]["spec"]["replicatedJobs"]]
    assert names == ["node", "launcher"] and runtime["spec"]["mlPolicy"]["mpi"]["mpiImplementation"] == "OpenMPI"
    assert (ROOT / job["spec"]["trainer"]["args"][-1]).is_file()


def test_conda_has_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["cli"]]
    needed = {re.split("[><=]", one)[0].lower() for one in required}
    listed = yaml.safe_load((LAUNCH / "environment.yml").read_text())["dependencies"]
    assert needed <= {re.split("[><=]", one)[0] for one in listed}


def test_every_launch_file_is_in_the_page() -> None:
    page = (ROOT / "docs" / "launch.md").read_text()
    inner = {"lib.sh", "hosts.sh", "release.sh"}
    names = {file.name for file in LAUNCH.rglob("*.*") if file.suffix in (".sh", ".sbatch", ".yaml", ".yml", ".def")}
    assert not [name for name in names - inner if name not in page]
