"""The README and the examples say what is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from installed import needs

ROOT = Path(__file__).resolve().parents[2]


TOOLS = [
    "update_readme",
    "write_evidence",
    "write_house",
    "write_interactions",
    "write_methods",
    "write_papers",
    "write_promises",
]


CHECKS = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
stale = []
for tool in sys.argv[1:]:
    sys.argv = [tool, "--check"]
    try:
        runpy.run_module(tool, run_name="__main__")
    except SystemExit as end:
        stale += [f"{tool}: {end.code}"] if end.code else []
sys.exit("\\n".join(stale) or 0)
"""


def test_what_is_generated_is_up_to_date() -> None:
    """One process runs all tools: most of what each takes is to import the package."""
    line = [sys.executable, "-c", CHECKS, str(ROOT / "tools"), *TOOLS]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_plan_example_loads(tmp_path: Path) -> None:
    import hvdcompress
    from hvdcompress.method import TensorSpec

    page = ROOT / "docs" / "guides" / "plans.md"  # README links to it
    (block,) = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S)
    (tmp_path / "plan.yaml").write_text(block)
    plan = hvdcompress.load(tmp_path / "plan.yaml")
    assert plan.program_of(TensorSpec("conv1.weight", (64, 3, 7, 7))).main.id == "none"
    conv = plan.program_of(TensorSpec("layer2.conv.weight", (64, 64, 3, 3)))
    assert (conv.at(0).id, conv.at(5 * 391).id, conv.main.density) == ("none", "scalecom", 0.0025)


@pytest.mark.parallel
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "kind,kind_of_launch,names",
    [
        ("torch", "mpi-2", ["compressed"]),
        ("ddp", "torchrun-2", ["compressed"]),
        pytest.param("torch", "horovodrun-2", ["plain", "compressed"], marks=pytest.mark.slow),
        pytest.param("ddp", "torchrun-2", ["plain", "compressed"], marks=pytest.mark.slow),
    ],
)
def test_the_torch_examples_train(kind: str, kind_of_launch: str, names: list[str]) -> None:
    needs("torch", *(["horovod"] if kind == "torch" else []))
    sys.path.insert(0, str(ROOT / "tests" / "drivers"))
    from launching import launch

    found = {}
    for name in names:
        done = launch(kind_of_launch, ROOT / "examples" / f"{kind}_{name}.py", seconds=90)
        assert done.returncode == 0, done.stdout[-2000:]
        found[name] = float(re.search(r"accuracy ([\d.]+)%", done.stdout)[1])
    assert found.get("plain", 100) > 93 and found["compressed"] > 92, found
    assert np.ptp([*found.values()]) <= 3, found


@pytest.mark.parallel
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "name",
    [
        "tensorflow_compressed",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("tensorflow_plain", "keras_compressed")),
    ],
)
def test_the_tensorflow_examples_train(name: str) -> None:
    needs("tensorflow", "horovod")
    sys.path.insert(0, str(ROOT / "tests" / "drivers"))
    from launching import launch

    done = launch("mpi-2", ROOT / "examples" / f"{name}.py", seconds=150)
    assert done.returncode == 0, done.stdout[-2000:]
    assert float(re.search(r"accuracy ([\d.]+)%", done.stdout)[1]) > 92
