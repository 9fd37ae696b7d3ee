"""Saved states on disk: bit-exact, complete or not at all, and re-sharded for another number of ranks."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from hvdcompress.engine.saving import checkpoint
from hvdcompress.loopback import Loopback
from tests.unit.engine.helpers import state_dicts, trained

SHAPES = {"a": (20, 7), "b.c": (33,)}


def train(world_size: int, steps: int) -> Loopback:
    return trained("topk", world_size, steps, SHAPES, density=0.1, min_elements=1)


def save(net: Loopback, folder: Path, num_ranks: int | None = None) -> list[Path]:
    """Save the state of the first ranks, by default of all."""
    return [checkpoint.save(saved, folder) for saved in state_dicts(net)[:num_ranks]]


def load_all(folder: Path, world_size: int) -> list[dict[str, Any]]:
    return [checkpoint.load(folder, rank, world_size) for rank in range(world_size)]


def loaded_steps(folder: Path, *world_sizes: int) -> set[int]:
    """Return the steps of the tensors in what all ranks load, for some numbers of ranks."""
    loaded = [saved for world_size in world_sizes for saved in load_all(folder, world_size)]
    return {step for saved in loaded for step in saved["steps"].values()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- several files in a folder ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_number_of_ranks_loads_the_newest_set(tmp_path: Path, world_size: int) -> None:
    save(train(world_size=2, steps=2), tmp_path)
    newer = train(world_size=3, steps=5)
    save(newer, tmp_path)
    assert loaded_steps(tmp_path, world_size) == {5}
    for name in SHAPES:
        total = sum(saved["state"][name]["residual"] for saved in load_all(tmp_path, world_size))
        want = sum(newer.residual(name, rank).ravel() for rank in range(3))
        np.testing.assert_allclose(total, want, rtol=1e-5, atol=1e-6)


def test_the_set_that_was_saved_last_is_the_newest(tmp_path: Path) -> None:
    save(train(world_size=2, steps=5), tmp_path)
    save(train(world_size=2, steps=2), tmp_path)  # training was started again
    assert loaded_steps(tmp_path, 2) == {2}
    for number, path in enumerate(sorted(tmp_path.iterdir())):  # a copy of the folder may have other times
        os.utime(path, (10**9 - number, 10**9 - number))
    assert loaded_steps(tmp_path, 2) == {2}


def test_a_missing_rank_is_an_error(tmp_path: Path) -> None:
    save(train(world_size=4, steps=1), tmp_path, num_ranks=3)
    for world_size in (2, 4):  # also for a rank whose own file is there
        with pytest.raises(FileNotFoundError, match="rank-3-of-4"):
            checkpoint.load(tmp_path, 0, world_size)
    with pytest.raises(FileNotFoundError, match="no saved state"):
        checkpoint.load(tmp_path / "nowhere", 0, 2)


def test_a_rank_loads_its_own_file_from_a_local_disk(tmp_path: Path) -> None:
    net = train(world_size=2, steps=3)
    save(net, tmp_path, num_ranks=1)
    np.testing.assert_equal(checkpoint.load(tmp_path, 0, 2), net.ranks[0].state_dict())
    for rank, world_size in ((1, 2), (0, 3)):
        with pytest.raises(FileNotFoundError, match="rank-1-of-2"):
            checkpoint.load(tmp_path, rank, world_size)


def test_a_folder_keeps_two_sets(tmp_path: Path) -> None:
    for steps in (1, 2, 3):
        save(train(world_size=3, steps=steps), tmp_path)
    assert names(tmp_path) == [f"step-{step}-rank-{rank}-of-3.safetensors" for step in (2, 3) for rank in range(3)]
    for steps in (5, 6):  # rank 2 no longer exists
        save(train(world_size=2, steps=steps), tmp_path)
    assert names(tmp_path) == [f"step-{step}-rank-{rank}-of-2.safetensors" for step in (5, 6) for rank in range(2)]


def test_an_incomplete_set_is_named_and_the_earlier_one_loaded(tmp_path: Path) -> None:
    older = save(train(world_size=2, steps=2), tmp_path)
    path = save(train(world_size=2, steps=4), tmp_path)[1]
    path.unlink()
    for rank, world_size in ((0, 2), (1, 2), (0, 1)):  # all ranks decide alike
        with pytest.warns(UserWarning, match=rf"{path.name}.*step 2"):
            assert set(checkpoint.load(tmp_path, rank, world_size)["steps"].values()) == {2}
    for each in older:
        each.unlink()
    with pytest.raises(FileNotFoundError, match=path.name):
        checkpoint.load(tmp_path, 1, 2)


@pytest.mark.parametrize("damage", ["truncated", "empty", "foreign", "other format"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, damage: str) -> None:
    net = train(world_size=2, steps=4)
    path = save(net, tmp_path)[1]
    if damage == "other format":
        checkpoint.save({**net.ranks[1].state_dict(), "format": 99}, tmp_path / "folder").rename(path)
    elif damage == "foreign":
        save_file({"w": np.ones(3, np.float32)}, path)
    else:
        path.write_bytes(b"" if damage == "empty" else path.read_bytes()[:-10])
    for rank, world_size in ((1, 2), (0, 1)):
        with pytest.raises(ValueError, match=path.name):
            checkpoint.load(tmp_path, rank, world_size)


def test_a_state_of_another_format_names_a_way_out() -> None:
    saved = train(world_size=1, steps=1).ranks[0].state_dict()
    with pytest.raises(ValueError, match=r"format 99.*reads format 1.*version of hvdcompress that saved it, or start"):
        checkpoint.from_bytes(checkpoint.to_bytes({**saved, "format": 99}))


@pytest.mark.parametrize(
    "name", ["step-1-rank-x-of-2", "step-1-rank-0-of-", "step-1-rank--1-of-2", "step-1-rank-0-of-2-copy", "rank-0-of-2"]
)
def test_files_with_other_names_are_ignored(tmp_path: Path, name: str) -> None:
    save(train(world_size=2, steps=3), tmp_path)
    (tmp_path / f"{name}.safetensors").write_bytes(b"something")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert loaded_steps(tmp_path, 2) == {3}


def test_a_name_with_a_billion_ranks_takes_no_time(tmp_path: Path) -> None:
    (path,) = save(train(world_size=1, steps=1), tmp_path)
    path.rename(tmp_path / "step-1-rank-0-of-1000000000.safetensors")
    with pytest.raises(FileNotFoundError, match="lacks step-1-rank-1-of-1000000000"):
        checkpoint.load(tmp_path, 0, 1)


# -- the contents of a file ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "line\nbreak", "\n", "Größe/λ"])
def test_any_name_of_a_tensor_is_restored(name: str) -> None:
    saved = trained(steps=1, shapes={name: (20, 7), f"{name}\nother": (9,)}, min_elements=1).ranks[0].state_dict()
    np.testing.assert_equal(checkpoint.from_bytes(checkpoint.to_bytes(saved)), saved)


@pytest.mark.parametrize("head", ["[]", "3", "{}", "null", "[" * 9999, '{"format": 1, "steps": 3}'])
def test_a_malformed_header_is_refused(tmp_path: Path, head: str) -> None:
    path = tmp_path / "step-3-rank-0-of-1.safetensors"
    save_file({"w\nresidual": np.ones(3, np.float32)}, path, metadata={checkpoint.METADATA: head})
    with pytest.raises(ValueError, match="not a state saved by hvdcompress"):
        checkpoint.load(tmp_path, 0, 1)
    with pytest.raises(ValueError, match="not a state saved by hvdcompress"):
        checkpoint.from_bytes(path.read_bytes())


# -- writing ------------------------------------------------------------------------------------------------------


def test_what_a_killed_rank_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "rank-0.tmp").mkdir()
    (tmp_path / "rank-0.tmp" / "step-1").write_bytes(b"part of a file")
    save(train(world_size=1, steps=7), tmp_path)
    assert names(tmp_path) == ["step-7-rank-0-of-1.safetensors"]


@pytest.mark.parametrize(
    "function,error", [("save_file", SafetensorError("full")), ("_to_disk", OSError(errno.ENOSPC, "full"))]
)
def test_a_full_disk_is_an_error_and_earlier_files_stay(
    tmp_path: Path, function: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(train(world_size=1, steps=2), tmp_path)
    monkeypatch.setattr(checkpoint, function, Mock(side_effect=error))
    with pytest.raises(OSError, match=r"cannot save.*step-4-rank-0.*full.*earlier files are unchanged"):
        save(train(world_size=1, steps=4), tmp_path)
    assert names(tmp_path) == ["step-2-rank-0-of-1.safetensors"]
    assert loaded_steps(tmp_path, 1) == {2}
