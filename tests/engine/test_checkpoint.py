"""State on disk: bit-exact, whole or not at all, and re-sharded for another number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hvdcompress.engine import checkpoint
from hvdcompress.loopback import Loopback


def trained(world: int = 4, **settings) -> Loopback:
    net = Loopback("topk", world=world, density=0.1, min_elements=1, **settings)
    rng = np.random.default_rng(0)
    for _ in range(3):
        one = {"a": rng.normal(size=(20, 7)).astype("f"), "b.c": rng.normal(size=33).astype("f")}
        net.allreduce_many([one] * world)
    return net


def test_round_trip_is_exact(tmp_path: Path) -> None:
    net = trained()
    for worker in net.ranks:
        checkpoint.save(worker.state_dict(), tmp_path)
    for worker in net.ranks:
        saved, loaded = worker.state_dict(), checkpoint.load(tmp_path, worker.rank, 4)
        assert {k: v for k, v in saved.items() if k != "state"} == {k: v for k, v in loaded.items() if k != "state"}
        for name, slots in saved["state"].items():
            for slot, array in slots.items():
                np.testing.assert_array_equal(loaded["state"][name][slot], array)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"rank-{r}-of-4.safetensors" for r in range(4)]


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_another_world_keeps_the_sum_of_residuals(tmp_path: Path, world: int) -> None:
    net = trained()
    for worker in net.ranks:
        checkpoint.save(worker.state_dict(), tmp_path)
    for name in ("a", "b.c"):
        before = sum(net.residual(name, rank).astype(np.float64).ravel() for rank in range(4))
        after = sum(
            checkpoint.load(tmp_path, rank, world)["state"][name]["residual"].astype(np.float64)
            for rank in range(world)
        )
        np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-6)


def test_a_missing_rank_is_an_error(tmp_path: Path) -> None:
    net = trained()
    for worker in net.ranks[:3]:
        checkpoint.save(worker.state_dict(), tmp_path)
    with pytest.raises(FileNotFoundError, match="rank-3-of-4"):
        checkpoint.load(tmp_path, 0, 2)
    with pytest.raises(FileNotFoundError, match="no saved state"):
        checkpoint.load(tmp_path / "nowhere", 0, 2)


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    path = checkpoint.save(trained(world=1).ranks[0].state_dict(), tmp_path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="no state saved by hvdcompress"):
        checkpoint.load(tmp_path, 0, 1)


def test_what_is_kept_is_not_summed() -> None:
    from hvdcompress.engine.snapshot import reshard

    head = {"world": 2, "steps": {"w": 3}, "merge": {"w": {"basis": "keep", "residual": "sum"}}}
    slots = {"basis": np.ones(3, np.float32), "residual": np.ones(3, np.float32)}
    (one,) = reshard([{**head, "rank": rank, "state": {"w": slots}} for rank in range(2)], 1)
    assert one["state"]["w"]["basis"].tolist() == [1, 1, 1] and one["state"]["w"]["residual"].tolist() == [2, 2, 2]
