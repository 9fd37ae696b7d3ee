"""What generates pages: run on a copy of the project, on results that are given."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from hvdcompress.lab.bench.config import Bench
from hvdcompress.lab.training.experiment import Experiment
from tests import ROOT


@pytest.fixture
def project(tmp_path):
    """A folder with the tools, and what they read and write."""
    pytest.importorskip("matplotlib")
    for name in ("tools", "docs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def run(project, tool, *words):
    line = [sys.executable, f"tools/{tool}.py", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=project, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def bench(folder):
    """A benchmark of one set at one rate: topk takes 1 s, dense over the ring 4 s, DDP 5 s."""
    folder.mkdir()
    baselines = ["none ring", "none ddp"]
    sets = [{"net": "resnet32", "label": "tiny", "only": ["layer1.0.*"]}]
    Bench.open({"name": "x", "sets": sets, "methods": ["topk"], "hosts": 2, "baselines": baselines}).save(
        folder / "config.yaml"
    )
    (folder / "launch.json").write_text(json.dumps({"command": "hvdcompress bench x", "machine": {"cores": 2}}))
    lines = [
        {"rate": "1gbit", "set": "tiny", "contender": label, "round": 0, "exchanges": [{"seconds": time}], "dense": 1.0}
        for label, time in (("none ring", 4.0), ("none ddp", 5.0), ("topk", 1.0))
    ]
    (folder / "results.jsonl").write_text("\n".join(map(json.dumps, lines)))


def training(folder):
    """A training of two methods whose loss falls to 1 in ten steps, in 2 s and in 1 s per step."""
    (folder / "metrics").mkdir(parents=True)
    experiment = Experiment.open({"name": "y", "tasks": [{"task": "digits", "steps": 10}], "methods": ["none", "topk"]})
    experiment.save(folder / "config.yaml")
    for each in experiment.runs():
        pace = 2.0 if each.method.label == "none" else 1.0
        steps = ({"step": n, "loss": 11.0 - n, "bytes_sent": n, "dense_bytes": n} for n in range(1, 11))
        lines = [{"event": "step", **step, "seconds": pace * step["step"]} for step in steps]
        (folder / "metrics" / f"{each.id}.jsonl").write_text("\n".join(map(json.dumps, lines)))


def test_bench_docs(project):
    bench(project / "bench-x")
    training(project / "y")
    before = (project / "docs" / "bench" / "gpt2.md").read_bytes()
    (project / "docs" / "bench.md").unlink()
    run(project, "write_bench_docs", "bench-x", "y", "digits=5")
    index, folder = (project / "docs" / "bench.md").read_text(), project / "docs" / "bench"
    page = (folder / "x.md").read_text()
    assert "\npython tools/write_bench_docs.py bench-x y digits=5\n" in index and "hvdcompress bench x" in page
    assert "(bench/x.md)" in index and "(bench/training.md)" in index
    assert "| Horovod none, ring (best dense) | 4.00 s |" in page and "| topk | 1.00 s |" in page
    assert "Times faster than Horovod none, ring: topk 4.00 (4.00 – 4.00)." in page
    assert page.index("![Times faster") < page.index("<details>") < page.index("| topk | 1.00 s |")  # a picture first
    assert "| digits, 5 | topk | 8.00 s | 50 % | 8 |" in (folder / "training.md").read_text()
    (plot,) = folder.glob("x-*.svg")
    assert f"]({plot.name})" in page and "--c1:" in plot.read_text()
    assert "| topk | 1.00 s (4.00x) |" in index
    assert "Version measured: " in page and (folder / "gpt2.md").read_bytes() == before and "(bench/gpt2.md)" in index
    run(project, "write_bench_docs", "y", "digits=4")  # what is not given again stays
    again = (project / "docs" / "bench.md").read_text()
    assert "| topk | 1.00 s (4.00x) |" in again and "write_bench_docs.py bench-x y digits=5 digits=4\n" in again


def test_scale_docs(project):
    folder = project / "scale-x"
    folder.mkdir()
    (folder / "scale.json").write_text(json.dumps({"name": "x", "command": "hvdcompress scale"}))
    (folder / "table.md").write_text("| a |\n")
    (folder / "seconds-1gbit.svg").write_text("<svg/>")
    (project / "workers_bytes.md").write_text("| b |\n")
    run(project, "write_scale_docs", "scale-x", "workers_bytes.md")
    page = (project / "docs" / "scale.md").read_text()
    assert "`python tools/write_scale_docs.py scale-x workers_bytes.md`" in page and "| a |" in page and "| b |" in page
    assert "![Seconds against workers](scale/scale-x-1gbit.svg)" in page


def test_readme(project):
    page = project / "docs" / "quickstart-table.md"
    table = page.read_text().partition("-->\n")[2].partition("<!--")[0]
    behind = re.findall(r"\| (\+\d\.\d{3}) \|", table)[-1]  # bits, of the last row that has any
    (project / "table.md").write_text(table.replace(f"| {behind} |", "| +9.876 |"))
    readme = project / "README.md"
    readme.write_text(readme.read_text().replace("[`topk`]", "[`tokp`]"))
    run(project, "update_readme", ".")
    assert "| +9.876 |" in page.read_text() and "[`topk`]" in readme.read_text()
    results = project / "docs" / "results.md"  # README's table is made from that page
    results.write_text(re.sub(r"(\| scalecom \| .* )\S+ \|\n", r"\1+9.875 |\n", results.read_text()))
    run(project, "update_readme")
    assert "+9.875 bits" in readme.read_text()
    run(project, "update_readme", "--check")
