"""The README and the examples say what is so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests import ROOT
from tests.installed import python_path

TOOLS = [
    "update_readme",
    "write_house",
    "write_methods",
    "write_papers",
    "write_promises",
]


CHECKS = """
import runpy, sys
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
    environment = {**os.environ, "PYTHONPATH": python_path(str(ROOT / "tools"))}
    line = [sys.executable, "-c", CHECKS, *TOOLS]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=200)
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
