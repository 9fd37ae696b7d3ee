"""A rank that is killed, ends or has joined ends the others, with the cause in words."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.installed import needs
from tests.launching import environment, launch

HERE = Path(__file__).parent


@pytest.mark.timeout(150)
@pytest.mark.parametrize("kind", ["mpi-2", pytest.param("mpi-2x2", marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_others_under_horovod(kind: str, tmp_path: Path) -> None:
    needs("torch", "horovod")
    began = time.monotonic()
    done = launch(kind, HERE / "killed.py", str(tmp_path), seconds=120)
    assert done.returncode != 0
    assert (tmp_path / "before").exists(), done.stdout[-3000:]
    assert not (tmp_path / "survivor").exists(), "the other rank went on as if nothing had happened"
    assert time.monotonic() - began < 110


@pytest.mark.timeout(80)
def test_all_reduces_that_start_while_a_peer_ends_raise(tmp_path: Path) -> None:
    """Without the fix in launch/horovod-0.28.1.patch, Horovod waits for a lock of its own with the GIL held."""
    needs("torch", "horovod")
    done = launch("mpi-2", HERE / "peer_ends.py", str(tmp_path), seconds=60, DRIVER="torch")
    assert "raised on purpose" in done.stdout
    assert (tmp_path / "error").exists(), done.stdout[-3000:]
    assert "Horovod has been shut down" in (tmp_path / "error").read_text()


@pytest.mark.timeout(100)
@pytest.mark.parametrize("method", [pytest.param("none", marks=pytest.mark.slow), "randomk"])
def test_a_rank_that_has_joined_is_named_as_the_cause(method: str, tmp_path: Path) -> None:
    """Of methods that gather, Horovod itself ends all ranks, with an error of its own: it cannot gather then."""
    needs("torch", "horovod")
    done = launch("mpi-2", HERE / "joined.py", str(tmp_path), method, seconds=80)
    assert done.returncode != 0
    assert (tmp_path / "error").exists(), done.stdout[-3000:]
    assert "hvd.join()" in (tmp_path / "error").read_text()


def by_hand(words: list[str], world_size: int, **more: str) -> list[subprocess.Popen[str]]:
    """Start ranks of a script without a launcher, each with what it prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(world_size)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [
        subprocess.Popen([sys.executable, *words], env=environment("alone", RANK=str(rank), **place, **more), **options)
        for rank in range(world_size)
    ]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "world_size,num_nodes,killed",
    [
        (2, 0, [1]),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((3, 0, [1]), (4, 0, [1]), (4, 2, [1]), (4, 2, [2, 3]))  # also a whole node
        ),
    ],
)
def test_a_killed_rank_is_an_error_on_all_others_under_ddp(
    world_size: int, num_nodes: int, killed: list[int], tmp_path: Path
) -> None:
    """Ranks are started by hand, as torchrun would end the others before they can say anything."""
    words = [str(HERE / "ddp_killed.py"), str(tmp_path), *map(str, killed)]
    ranks = by_hand(words, world_size, NODES=str(num_nodes))
    try:
        status = [rank.wait(100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert (tmp_path / "before").exists() and not (tmp_path / "survivor").exists()
    assert status == [-signal.SIGKILL if rank in killed else 1 for rank in range(world_size)]
    for rank in set(range(world_size)) - set(killed):
        seconds, words = (tmp_path / f"error-{rank}").read_text().split(maxsplit=1)
        assert float(seconds) < 10, f"rank {rank} waited {seconds} s; the process group's timeout is 60 s"
        assert f"the process group has failed on rank {rank}" in words


@pytest.mark.timeout(120)
def test_local_steps_end_with_a_killed_rank_and_go_on_from_the_last_exchange_under_ddp(tmp_path: Path) -> None:
    for status in [1, -signal.SIGKILL], [0, 0]:
        ranks = by_hand([str(HERE / "local_killed.py"), str(tmp_path)], 2, DRIVER="ddp")
        try:
            texts = [rank.communicate(timeout=100)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == status, texts
    seconds, words = (tmp_path / "error-0").read_text().split(maxsplit=1)
    assert float(seconds) < 10 and "the process group has failed on rank 0" in words


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_local_steps_go_on_from_the_last_exchange_when_torchrun_restarts_all_ranks(tmp_path: Path) -> None:
    line = ["torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    line += [str(HERE / "local_killed.py"), str(tmp_path)]
    # As for elastic training: see docs/guides/checkpoints.md
    given = environment("torchrun-2", DRIVER="ddp", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    done = subprocess.run(line, env=given, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert all((tmp_path / name).exists() for name in ("killed", "end-0", "end-1"))


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_local_steps_go_on_from_the_last_exchange_under_horovod(tmp_path: Path) -> None:
    """mpirun ends all ranks when one is killed; started again, they go on."""
    needs("torch", "horovod")
    killed, again = (
        launch("mpi-2", HERE / "local_killed.py", str(tmp_path), seconds=60, DRIVER="torch") for _ in range(2)
    )
    assert killed.returncode != 0 and (tmp_path / "killed").exists(), killed.stdout[-3000:]
    assert again.returncode == 0 and (tmp_path / "end-0").exists(), again.stdout[-3000:]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "kind,status",
    [
        ("error", 1),
        pytest.param("exit", 3, marks=pytest.mark.slow),
        pytest.param("interrupt", -signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_an_exception_in_the_backward_pass_ends_every_rank(kind: str, status: int) -> None:
    """At once, with the rank's own traceback; and not after the plan's ``end_after`` or the process group's."""
    ranks = by_hand([str(HERE / "ddp_ends.py"), kind], 2)
    try:
        texts = [rank.communicate(timeout=100)[0] for rank in ranks]  # `end_after` is 300 s
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, status], texts
    assert "rank 1: a backward pass ended before all of its gradients" in texts[0]
    assert kind != "error" or "ValueError: made by the test" in texts[1]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("kind", ["mpirun-2", pytest.param("mpirun-2x2", marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_others_under_mpi(kind: str, tmp_path: Path) -> None:
    began = time.monotonic()
    done = launch(kind, HERE / "mpi_killed.py", str(tmp_path), seconds=120)
    assert done.returncode != 0
    assert (tmp_path / "before").exists(), done.stdout[-3000:]
    assert not (tmp_path / "survivor").exists(), "the other rank went on as if nothing had happened"
    assert time.monotonic() - began < 60
