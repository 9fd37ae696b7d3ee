"""Horovod's timeline shows our collectives under names that say whose they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from door_launches import MODULES
from launching import launch

pytestmark = pytest.mark.parallel
HERE = Path(__file__).parent
NAMES = {
    "torch": {
        "allreduce.hvdcompress.set0.compressor0.layer1.weight.round0",  # a broadcast, sent as a sum
        "allreduce.hvdcompress.set0.compressor0.layer1.weight.round1",
        "allreduce.hvdcompress.set0.compressor0.status.round0",
    },
    "tensorflow": {
        "hvdcompress.tf.set0.compressor0.layer1.weight.round0.Broadcast",
        "hvdcompress.tf.set0.compressor0.layer1.weight.round1.AllReduce",
    },
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("door", NAMES)
def test_names_in_horovods_timeline(door: str, tmp_path: Path) -> None:
    for module in MODULES[door]:
        pytest.importorskip(module)
    file = tmp_path / "timeline.json"
    done = launch("mpi-2", HERE / "timeline.py", str(tmp_path), seconds=120, DOOR=door, HOROVOD_TIMELINE=str(file))
    assert done.returncode == 0, done.stdout[-3000:]
    shown = set(re.findall(r'"process_name".*?"name": "([^"]*)"', file.read_text()))
    assert shown >= NAMES[door], sorted(shown)
