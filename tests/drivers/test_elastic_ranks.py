"""Horovod's elastic mode, with ranks of its own: one is killed, the others go on, and another takes its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from door_launches import MODULES
from launching import launch

HERE = Path(__file__).parent
NAMES = ("w", "b")


def read(folder: Path, stem: str, ranks: int) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(folder / "kept" / f"{stem}-{rank}.npz")) for rank in range(ranks)]


@pytest.mark.slow  # two minutes, most of which is waiting
@pytest.mark.parallel
@pytest.mark.alone  # a step that takes half a minute is stuck
@pytest.mark.timeout(400)
@pytest.mark.parametrize("door,script", [("torch", "elastic_ranks.py"), ("tensorflow", "elastic_ranks_tf.py")])
def test_others_go_on_without_a_lost_rank_and_with_its_successor(door: str, script: str, tmp_path: Path) -> None:
    """Nothing that was committed is lost: what the ranks of each world gave is what they received, or the last keep."""
    for module in MODULES[door]:
        pytest.importorskip(module)
    (tmp_path / "kept").mkdir()
    (tmp_path / "hosts").write_text("localhost:2\n127.0.0.1:1\n")  # a host of which a rank fails is not asked again
    discover = tmp_path / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    discover.chmod(0o755)
    done = launch("elastic-3", HERE / script, str(tmp_path), seconds=300, DISCOVER=str(discover))
    ends = sorted((tmp_path / "kept").glob("*-end-*.npz"))
    assert len(ends) == 3, done.stdout[-4000:]
    begun = int(ends[0].name.split("-")[0])
    assert begun > 6, "the lost rank's successor came before there was a commit without it"
    last = read(tmp_path, f"{begun}-end", 3)
    worlds = [read(tmp_path, "0-6", 3), read(tmp_path, f"6-{begun}", 2), last]
    for name in NAMES:
        given = sum(one[f"pending.{name}"] for world in worlds for one in world)
        kept = sum(one[f"residual.{name}"].astype(np.float64) for one in last)
        assert np.abs(kept).max() > 0
        np.testing.assert_allclose(kept, given, 1e-4, 1e-3)
        for one in last:
            np.testing.assert_array_equal(one[f"parameters.{name}"], last[0][f"parameters.{name}"])
