"""``python -m experiments bench`` on emulated hosts."""

from __future__ import annotations

import pytest

from experiments.report import results
from tests.hosts.commands import namespaces, start_experiments
from tests.installed import needs

CONFIG = """
name: tiny
hosts: 2
rates: [200mbit]
rounds: 1
repeats: 2
sets: [{net: resnet32, label: small}]
methods:
  - {label: scalecom, method: scalecom, density: 0.05, bucket_elements: 5000}
  - {label: in ddp, over: ddp, method: scalecom, density: 0.05}
  - {label: over mpi4py, over: mpi4py, method: scalecom, density: 0.05}
baselines: [none ring]
"""
GRADIVEQ = "{label: gradiveq, method: gradiveq, slice_elements: 768, matrix_rank: 4, dense_steps: 6, alone: 6}"
ALL = CONFIG.replace("methods:", f"methods:\n  - {GRADIVEQ}").replace(
    "none ring", "none ring, none gloo, none ddp, fp16 mpi, powersgd ddp"
)


@pytest.mark.parametrize("config", [CONFIG, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_benchmark_on_hosts(tmp_path, config):
    needs("horovod", "torch", "psutil")
    (tmp_path / "tiny.yaml").write_text(config)
    run = start_experiments(tmp_path, "bench", "tiny.yaml", "--out", "out")
    output, _ = run.communicate(timeout=280)
    assert run.returncode == 0, output
    assert not namespaces(f"hvdc-p{run.pid}x")
    rows = results.load("bench-tiny", tmp_path / "out").set_index("contender")
    assert len(rows) == (9 if config == ALL else 4)
    dense, payload = rows.loc["none ring"], 4 * 464_154
    assert dense["sent"] == payload and dense["on_wire"] == payload  # 2(p − 1)/p with 2 ranks
    assert 1.04 * payload < dense["interface"] < 1.3 * payload, "with headers, and Horovod's own messages"
    assert dense["least"] > 0.9 * 8 * payload / 200e6, "not faster than the link"
    for name, row in rows[rows["sent"].notna()].iterrows():
        assert row["interface"] > row["on_wire"], f"{name}: the ledger's bytes left the host"
        expected = {"none": payload, "fp16": payload / 2}.get(name.split()[0])
        assert row["sent"] == expected if expected else row["sent"] < 0.2 * payload
    assert (tmp_path / "out" / "bench-tiny.svg").exists()
