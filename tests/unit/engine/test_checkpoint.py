"""State on disk: bit-exact, whole or not at all, and re-sharded for another number of ranks."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hvdcompress.engine.saving import checkpoint, snapshot
from hvdcompress.loopback import Loopback


def trained(world_size: int = 4, steps: int = 3, **settings) -> Loopback:
    net = Loopback("topk", world_size=world_size, density=0.1, min_elements=1, **settings)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        one = {"a": rng.normal(size=(20, 7)).astype("f"), "b.c": rng.normal(size=33).astype("f")}
        net.allreduce_many([one] * world_size)
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
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-3-rank-{r}-of-4.safetensors" for r in range(4)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_another_world_keeps_the_sum_of_residuals(tmp_path: Path, world_size: int) -> None:
    net = trained()
    for worker in net.ranks:
        checkpoint.save(worker.state_dict(), tmp_path)
    for name in ("a", "b.c"):
        before = sum(net.residual(name, rank).astype(np.float64).ravel() for rank in range(4))
        after = sum(
            checkpoint.load(tmp_path, rank, world_size)["state"][name]["residual"].astype(np.float64)
            for rank in range(world_size)
        )
        np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-6)


def test_a_missing_rank_is_an_error(tmp_path: Path) -> None:
    net = trained()
    for worker in net.ranks[:3]:
        checkpoint.save(worker.state_dict(), tmp_path)
    with pytest.raises(FileNotFoundError, match="rank-3-of-4"):
        checkpoint.load(tmp_path, 0, 2)
    with pytest.raises(FileNotFoundError, match="rank-3-of-4"):  # also those whose file is there
        checkpoint.load(tmp_path, 0, 4)
    with pytest.raises(FileNotFoundError, match="no saved state"):
        checkpoint.load(tmp_path / "nowhere", 0, 2)


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    path = checkpoint.save(trained(world_size=1).ranks[0].state_dict(), tmp_path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="not a state saved by hvdcompress"):
        checkpoint.load(tmp_path, 0, 1)


def test_what_is_kept_is_not_summed() -> None:
    from hvdcompress.engine.saving.snapshot import reshard

    head = {"world": 2, "steps": {"w": 3}, "merge": {"w": {"basis": "keep", "residual": "sum"}}}
    slots = {"basis": np.ones(3, np.float32), "residual": np.ones(3, np.float32)}
    (one,) = reshard([{**head, "rank": rank, "state": {"w": slots}} for rank in range(2)], 1)
    assert one["state"]["w"]["basis"].tolist() == [1, 1, 1] and one["state"]["w"]["residual"].tolist() == [2, 2, 2]


# -- sets: what all ranks have saved after one step --------------------------------------------------------


def save_all(net: Loopback, folder: Path, ranks: range | None = None) -> list[Path]:
    return [checkpoint.save(net.ranks[rank].state_dict(), folder) for rank in ranks or range(net.world_size)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps_of(saved: dict[str, Any]) -> set[int]:
    return set(saved["steps"].values())


def test_the_newest_complete_set_is_loaded_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    save_all(trained(world_size=2, steps=2), tmp_path)
    newer = trained(world_size=3, steps=5)
    save_all(newer, tmp_path)
    for world_size in (1, 2, 3, 4):
        loaded = [checkpoint.load(tmp_path, rank, world_size) for rank in range(world_size)]
        assert all(steps_of(one) == {5} for one in loaded), world_size
        total = sum(one["state"]["a"]["residual"].astype(np.float64) for one in loaded)
        want = sum(newer.residual("a", rank).astype(np.float64).ravel() for rank in range(3))
        np.testing.assert_allclose(total, want, rtol=1e-6, atol=1e-6)


def test_what_was_saved_last_is_the_newest_even_of_fewer_steps(tmp_path: Path) -> None:
    save_all(trained(world_size=2, steps=5), tmp_path)
    save_all(trained(world_size=2, steps=2), tmp_path)  # training was begun again
    assert steps_of(checkpoint.load(tmp_path, 0, 2)) == {2}
    for number, path in enumerate(sorted(tmp_path.iterdir())):  # as a copy of the folder may have them
        os.utime(path, (10**9 - number, 10**9 - number))
    assert steps_of(checkpoint.load(tmp_path, 0, 2)) == {2}


def test_files_of_different_steps_are_never_one_state(tmp_path: Path) -> None:
    older, newer = trained(world_size=2, steps=2), trained(world_size=2, steps=4)
    save_all(older, tmp_path)
    save_all(newer, tmp_path, range(1))  # rank 1 was ended before it had saved
    for world_size in (1, 2, 3):
        with pytest.warns(UserWarning, match=r"step-4-rank-1-of-2.*step 2"):
            loaded = [checkpoint.load(tmp_path, rank, world_size) for rank in range(world_size)]
        assert all(steps_of(one) == {2} for one in loaded)


def test_files_of_earlier_versions_are_read_but_not_mixed(tmp_path: Path) -> None:
    older, newer = trained(world_size=2, steps=2), trained(world_size=2, steps=4)
    for net, rank in ((older, 0), (older, 1)):
        (path,) = save_all(net, tmp_path, range(rank, rank + 1))
        path.rename(tmp_path / f"rank-{rank}-of-2.safetensors")
    assert steps_of(checkpoint.load(tmp_path, 1, 2)) == steps_of(checkpoint.load(tmp_path, 0, 3)) == {2}
    (path,) = save_all(newer, tmp_path, range(1))
    path.rename(tmp_path / "rank-0-of-2.safetensors")
    for rank, world_size in ((0, 2), (1, 2), (0, 3)):
        with pytest.raises(ValueError, match="different steps"):
            checkpoint.load(tmp_path, rank, world_size)


def test_a_rank_alone_on_its_disk_loads_its_own(tmp_path: Path) -> None:
    net = trained(world_size=2)
    save_all(net, tmp_path, range(1))
    np.testing.assert_array_equal(
        checkpoint.load(tmp_path, 0, 2)["state"]["a"]["residual"], net.residual("a", 0).ravel()
    )
    with pytest.raises(FileNotFoundError, match="rank-1-of-2"):
        checkpoint.load(tmp_path, 1, 2)
    with pytest.raises(FileNotFoundError, match="rank-1-of-2"):
        checkpoint.load(tmp_path, 0, 3)


def test_a_folder_keeps_two_sets(tmp_path: Path) -> None:
    for steps in (1, 2, 3, 4):
        save_all(trained(world_size=3, steps=steps), tmp_path)
    assert names(tmp_path) == [f"step-{step}-rank-{rank}-of-3.safetensors" for step in (3, 4) for rank in range(3)]
    for steps in (5, 6):  # rank 2 is no more
        save_all(trained(world_size=2, steps=steps), tmp_path)
    assert names(tmp_path) == [f"step-{step}-rank-{rank}-of-2.safetensors" for step in (5, 6) for rank in range(2)]


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "newer", "other rank"])
def test_a_bad_file_is_named_and_the_last_good_state_found(tmp_path: Path, damage: str) -> None:
    save_all(trained(world_size=2, steps=2), tmp_path)
    net = trained(world_size=2, steps=4)
    paths = save_all(net, tmp_path)
    if damage in ("newer", "other rank"):
        saved = {**net.ranks[1].state_dict(), **({"format": 99} if damage == "newer" else {"rank": 0})}
        (tmp_path / "there").mkdir()
        checkpoint.save(saved, tmp_path / "there").rename(paths[1])
        (tmp_path / "there").rmdir()
    elif damage == "foreign":
        save_file({"w": np.ones(3, np.float32)}, paths[1])
    else:
        paths[1].write_bytes(b"" if damage == "empty" else paths[1].read_bytes()[:-10])
    for rank, world_size in ((0, 2), (1, 2), (0, 1)):  # all ranks alike, whosever file it is
        with pytest.warns(UserWarning, match=paths[1].name):
            assert steps_of(checkpoint.load(tmp_path, rank, world_size)) == {2}
    for path in tmp_path.glob("step-2-*"):
        path.unlink()
    with pytest.raises(ValueError, match=paths[1].name):
        checkpoint.load(tmp_path, 0, 2)


@pytest.mark.parametrize(
    "name", ["rank-x-of-2", "rank-0-of-", "rank--1-of-2", "step-1-rank-0-of-2-copy", "rank-0-of-2"]
)
def test_files_of_odd_names_are_no_states_or_refused_by_name(tmp_path: Path, name: str) -> None:
    save_all(trained(world_size=2), tmp_path)
    (tmp_path / f"{name}.safetensors").write_bytes(b"something")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert steps_of(checkpoint.load(tmp_path, 1, 2)) == {3}


def test_a_name_that_speaks_of_a_billion_ranks_costs_nothing(tmp_path: Path) -> None:
    (path,) = save_all(trained(world_size=1), tmp_path)
    path.rename(tmp_path / "rank-0-of-1000000000.safetensors")
    with pytest.raises(ValueError, match="rank 0 of 1"):
        checkpoint.load(tmp_path, 0, 1)


# -- what is in a file -------------------------------------------------------------------------------------


@given(st.text(max_size=20), st.text(max_size=5))
def test_any_name_comes_back(name: str, other: str) -> None:
    net = Loopback("topk", world_size=1, density=0.5, min_elements=1)
    net.allreduce_many([{f"{name}\n{other}": np.float32([1, 2, 3, 4])}])
    saved = net.ranks[0].state_dict()
    back = checkpoint.from_bytes(checkpoint.to_bytes(saved))
    assert back["steps"] == saved["steps"] and back["state"].keys() == saved["state"].keys()


@pytest.mark.parametrize("key", ["format", "plan", "world", "rank", "metrics", "steps", "restarts", "merge"])
def test_a_header_that_lacks_a_key_is_refused_by_its_name(tmp_path: Path, key: str) -> None:
    net = trained(world_size=1)
    saved = net.ranks[0].state_dict()
    head = {k: v for k, v in saved.items() if k not in (key, "state")}
    arrays = {f"{n}\n{s}": array for n, slots in saved["state"].items() for s, array in slots.items()}
    path = tmp_path / "rank-0-of-1.safetensors"
    save_file(arrays, path, metadata={checkpoint.METADATA: json.dumps(head)})
    for run in (lambda: checkpoint.load(tmp_path, 0, 1), lambda: checkpoint.from_bytes(path.read_bytes())):
        with pytest.raises(ValueError, match=key):
            run()
    del saved[key]
    with pytest.raises(ValueError, match=key):
        net.ranks[0].load_state_dict(saved)


@pytest.mark.parametrize("head", ["[]", "3", "{}", "null", "[" * 9999, '{"format": 1, "steps": 3}'])
def test_a_header_that_is_something_else_is_refused(tmp_path: Path, head: str) -> None:
    path = tmp_path / "rank-0-of-1.safetensors"
    save_file({"w\nresidual": np.ones(3, np.float32)}, path, metadata={checkpoint.METADATA: head})
    with pytest.raises(ValueError, match="not a state saved by hvdcompress"):
        checkpoint.load(tmp_path, 0, 1)


@pytest.mark.parametrize("bad", ["nan", "inf", "int32", "float64", "short"])
def test_an_array_that_is_not_what_it_should_be_is_refused(bad: str) -> None:
    net = trained(world_size=1)
    saved = net.ranks[0].state_dict()
    before = net.residual("a", 0).copy()
    residual = saved["state"]["a"]["residual"]
    if bad in ("nan", "inf"):
        residual[3] = float(bad)
    else:
        saved["state"]["a"]["residual"] = residual[:-1] if bad == "short" else residual.astype(bad)
    with pytest.raises(ValueError, match="'residual' of 'a'"):
        net.ranks[0].load_state_dict(saved)
    np.testing.assert_array_equal(net.residual("a", 0), before)


# -- writing -----------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, time
import numpy as np
from hvdcompress.engine.saving import checkpoint
from hvdcompress.loopback import Loopback
net = Loopback("topk", world_size=1, density=0.01)
net.allreduce_many([{"w": np.ones(4_000_000, np.float32)}])
saved = net.ranks[0].state_dict()
for seconds in (0.005, 0.01, 0.02, 0.03):
    rank = os.fork()  # starting another Python would take a second
    while not rank:
        checkpoint.save(saved, sys.argv[1])
    time.sleep(seconds)
    os.kill(rank, signal.SIGKILL)
    assert os.waitpid(rank, 0)[1] == signal.SIGKILL
"""


def test_a_rank_that_is_killed_while_it_saves_leaves_nothing_for_long(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True, timeout=60)
    (tmp_path / "rank-0-of-1.4711.tmp").write_bytes(b"half of it")  # as earlier versions left them
    (tmp_path / "rank-0-of-3.tmp").mkdir()
    (tmp_path / "rank-0-of-3.tmp" / "half").write_bytes(b"of it")  # among another number of ranks
    save_all(trained(world_size=1, steps=7), tmp_path)
    assert set(names(tmp_path)) <= {f"step-{step}-rank-0-of-1.safetensors" for step in (1, 7)}
    assert steps_of(checkpoint.load(tmp_path, 0, 1)) == {7}


def test_a_full_disk_is_one_error_and_the_old_state_stays(tmp_path: Path) -> None:
    save_all(trained(world_size=1, steps=2), tmp_path)
    saved, before = trained(world_size=1, steps=4).ranks[0].state_dict(), names(tmp_path)
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))  # a file cannot grow, as on a full disk
    try:
        with pytest.raises(OSError, match=r"cannot save.*step-4-rank-0.*earlier files are unchanged"):
            checkpoint.save(saved, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert names(tmp_path) == before
    assert steps_of(checkpoint.load(tmp_path, 0, 1)) == {2}


def test_an_error_in_the_last_moment_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(trained(world_size=1, steps=2), tmp_path)

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_all(trained(world_size=1, steps=4), tmp_path)
    assert names(tmp_path) == ["step-2-rank-0-of-1.safetensors"]


def test_names_may_differ_by_what_is_before_a_slash() -> None:
    """As Keras' paths do, of a model before and after it was saved; never where two could be meant."""
    saved = {table: {"net/a/w": 1, "net/b/w": 2, "c": 3} for table in snapshot.TABLES}
    renamed = snapshot.renamed(saved, ["a/w", "b/w", "c"])
    assert all(renamed[table] == {"a/w": 1, "b/w": 2, "c": 3} for table in snapshot.TABLES)
    back = snapshot.renamed(renamed, ["net/a/w", "net/b/w", "c"])
    assert all(back[table] == saved[table] for table in snapshot.TABLES)
    for names in (["w", "c"], ["x/net/a/w", "y/net/a/w", "net/b/w", "c"], [], ["aw", "bw"], list(saved["steps"])):
        assert snapshot.renamed(saved, names) == saved


@pytest.mark.parametrize(
    "table,entry", [("restarts", [1, 2]), ("restarts", [1, 2, -3]), ("restarts", 3), ("steps", -1), ("steps", True)]
)
def test_an_entry_that_is_malformed_is_refused_by_its_table(table: str, entry: Any) -> None:
    net = trained(world_size=1)
    saved = net.ranks[0].state_dict()
    saved[table] = {**saved[table], "a": entry}
    with pytest.raises(ValueError, match=f"'{table}'"):
        net.ranks[0].load_state_dict(saved)
