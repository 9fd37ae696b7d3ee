"""Emulated hosts: setting them up and removing them, rates of links, and the bytes that leave a host. Needs root."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from experiments.cluster import launch
from experiments.cluster.hosts import Hosts
from experiments.report import results
from hvdcompress.cli.numbers import HEADERS
from tests import ROOT
from tests.hosts.commands import namespaces, start_experiments, wait_until
from tests.installed import needs, python_path

HERE = Path(__file__).parent
SEARCH_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(scope="module")
def network() -> Iterator[Hosts]:
    with Hosts(3, "100mbit") as network:
        yield network


@pytest.fixture(scope="module")
def unpinned() -> Iterator[Hosts]:
    """Another network at the same time, with two ranks on a host."""
    with Hosts(2, "1gbit", ranks_per_host=2, pin=False) as network:
        yield network


def start_on(network: Hosts, host: str, *words: str | Path, **more: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PATH": SEARCH_PATH, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **more}
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(network.command(host, *words), env=env, **options)


def run_on(network: Hosts, host: str, *words: str | Path, **more: str) -> str:
    """Run a command on a host, and return its output."""
    with start_on(network, host, *words, **more) as process:
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output[-3000:]
    return output


def test_a_command_on_hosts():
    line = [ROOT / "launch" / "hosts.sh", "--hosts", "2", "--rate", "100mbit", "--"]
    code = "hostname; ssh host1 hostname; cat /etc/hosts; exit 3"
    done = subprocess.run([*line, "bash", "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 3 and done.stdout.startswith("host0\nhost1\n127.0.0.1 localhost\n"), done
    assert os.uname().nodename not in ("host0", "host1")


def test_two_networks_at_a_time_are_separate(network, unpinned):
    assert len(network.sent()) == 3 and len(unpinned.sent()) == 2
    assert run_on(network, "host1", "cat", "/etc/hosts").count("host") == 4  # localhost, host0, host1, host2
    assert run_on(unpinned, "host1", "cat", "/etc/hosts").count("host") == 3


def test_hosts_share_the_processors_unless_told_otherwise(network, unpinned):
    mine = os.sched_getaffinity(0)
    code = "import os; print(*os.sched_getaffinity(0))"
    pinned, free = (
        [set(map(int, run_on(each, name, sys.executable, "-c", code).split())) for name in ("host0", "host1")]
        for each in (network, unpinned)
    )
    assert free == [mine, mine]
    if len(mine) > 1:
        assert not pinned[0] & pinned[1] and all(share < mine for share in pinned)


def test_ranks_of_all_hosts_are_in_one_session(network):
    """Linux before 6.18.45 lets one session starve another: two sessions on a processor stood still for minutes."""
    needs("mpi4py")  # with it there is an mpirun
    code = "import os; os.write(1, f'{os.uname().nodename} {os.getsid(0)}\\n'.encode())"  # in one piece
    output = run_on(network, "host0", "mpirun", "-H", network.slots, sys.executable, "-c", code)
    found = re.findall(r"(host\d) (\d+)", output)  # lines of several ranks may come as one
    assert sorted(name for name, _ in found) == ["host0", "host1", "host2"], output
    assert {int(session) for _, session in found} == {os.getsid(0)}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_hosts_and_their_processes_end_with_their_owner(number):
    code = (
        "import signal, subprocess, time\nfrom experiments.cluster.hosts import Hosts\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job's is to ignore it
        "with Hosts(2, '1gbit') as h:\n"
        "    p = subprocess.Popen(h.command('host1', 'sleep', '1000'))\n"
        "    print(p.pid, flush=True); time.sleep(1000)\n"
    )
    line = [sys.executable, "-c", code]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as owner:
        sleeper = psutil.Process(int(owner.stdout.readline()))
        owner.send_signal(number)
    if number == signal.SIGKILL:
        assert namespaces(f"hvdc-p{owner.pid}x"), "the next hosts remove them"
        with Hosts(2, "1gbit"):
            pass
    assert wait_until(lambda: not namespaces(f"hvdc-p{owner.pid}x"), 15)
    assert wait_until(lambda: not sleeper.is_running(), 15)


RECEIVE = """
import socket, time
with socket.create_server(("", 5001)) as server:
    print("ready", flush=True)
    peer, _ = server.accept()
    total, began = 0, time.monotonic()
    while received := len(peer.recv(1 << 20)):
        total += received
    print(8 * total / (time.monotonic() - began))
"""
SEND = "import socket; socket.create_connection(('host0', 5001)).sendall(bytes(25_000_000))"


def test_links_have_their_rates(network):
    before = network.sent()[1]
    with start_on(network, "host0", sys.executable, "-c", RECEIVE) as receiver:
        receiver.stdout.readline()
        run_on(network, "host1", sys.executable, "-c", SEND)
        bits = float(receiver.stdout.readline())
    assert 0.6 * 100e6 < bits < 100e6
    assert network.sent()[1] - before > 25_000_000


SUMS = """
import numpy as np
from mpi4py import MPI
from hvdcompress.mpi import Compressor
with Compressor("none", MPI.COMM_WORLD) as compressor:
    for _ in range(4):
        assert (compressor.allreduce(np.ones(1 << 20, np.float32), name="w") == 1).all()
"""


def test_no_rank_of_three_sends_more_than_in_a_ring(network):
    """Open MPI 4.1.8's own sum makes the busiest rank send 2.0 times the array, where a ring takes 1.33."""
    needs("mpi4py")
    before = network.sent()
    run_on(network, "host0", "mpirun", "-H", network.slots, sys.executable, "-m", "mpi4py", "-c", SUMS)
    arrays = [(now - then) / (4 << 22) for then, now in zip(before, network.sent(), strict=True)]
    assert all(1.3 < sent < 1.5 for sent in arrays), arrays


METHODS = ["none", "topk", "scalecom"]


def measure(network, folder, driver, *cases):
    """Return what bytes_sent.py wrote on each rank."""
    needs(*{"torch": ("torch", "horovod"), "ddp": ("torch",), "mpi": ("mpi4py",)}[driver])
    words, num_ranks = map(json.dumps, cases), network.count * network.ranks_per_host
    script = [str(HERE / "bytes_sent.py"), str(folder), driver, *words]
    launch.run(script, num_ranks, "ddp" if driver == "ddp" else "mpi", hosts=network, timeout=200)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def bytes_sent(network, tmp_path_factory):
    """The bytes of three ranks, by their ledgers and by their interfaces."""
    settings = {"topk": {"density": 0.05}, "scalecom": {"density": 0.05}}
    return measure(network, tmp_path_factory.mktemp("bytes"), "torch", *([m, settings.get(m, {})] for m in METHODS))


@pytest.mark.parametrize("method", METHODS)
def test_interfaces_send_the_ledgers_bytes(bytes_sent, method):
    for rank, (*measured, idle) in enumerate(bytes_sent):
        one = measured[METHODS.index(method)]
        # The payload with its headers; half a percent may have been in TCP's buffers when the reading began
        least = 0.995 * (1 + HEADERS) * one["ledger"]
        # With acknowledgements, twice what Horovod's negotiation sends when idle, and frames of short messages
        negotiation = 2 * idle["interface"] * one["seconds"]
        most = (1 + 1.5 * HEADERS) * one["ledger"] + negotiation + 500 * one["collectives"]
        assert least <= one["interface"] <= most, f"rank {rank}: {one}, idle {idle}"
        assert most < 1.25 * least, "bounds this wide would show nothing"


@pytest.mark.parametrize("driver", ["mpi", pytest.param("ddp", marks=pytest.mark.slow)])
def test_two_levels_save_what_the_interface_sends(unpinned, tmp_path, driver):
    cases = [["topk", {"density": 0.01, "nodes": nodes}] for nodes in (0, "auto")]
    (one, two, _), (_, other, _), *_ = measure(unpinned, tmp_path, driver, *cases)
    assert two["interface"] < 0.5 * one["interface"]
    # The ranks of a host exchange dense gradients with each other, which do not cross the link
    ledger = two["ledger"] + other["ledger"]
    assert (1 + HEADERS) * ledger < two["interface"] < 1.5 * ledger


@pytest.mark.slow
def test_a_cut_link_ends_every_rank(tmp_path):
    needs("mpi4py")
    errors = [tmp_path / f"errors-{rank}" for rank in range(3)]

    def have_warned():
        return all(file.exists() and "has waited" in file.read_text() for file in errors)

    with Hosts(3, "100mbit") as network:
        words = ("mpirun", "-H", network.slots, sys.executable, HERE / "cut_off.py", tmp_path)
        with start_on(network, "host0", *words) as mpirun:
            try:
                assert wait_until((tmp_path / "three-steps").exists)
                cut = time.monotonic()
                subprocess.run(["ip", "-n", f"hvdc-{network.id}-switch", "link", "set", "host2", "down"], check=True)
                assert wait_until(have_warned), [file.read_text() for file in errors]
                assert time.monotonic() - cut < 28, "`end_after` is 12 s, and asking the others takes 3"
            finally:
                mpirun.kill()
    for rank, file in enumerate(errors):
        text = file.read_text()
        assert f"hvdcompress: rank {rank} has waited" in text and "in step" in text, text
        for other in [0, 1] if rank == 2 else [2]:
            assert re.search(rf"rank {other} on \S+ \(\S+\) does not answer", text), text


@pytest.mark.parametrize(
    "driver", ["horovod", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "gloo"))]
)
def test_a_run_on_hosts(tmp_path, config, driver):
    needs("horovod", "torch", "sklearn", "psutil")
    config.write_text("name: small\ntasks: [{task: digits, steps: 10}]\nmethods: [none]\n")
    options = ["--out", "out", "--hosts", "2", "--rate", "100mbit", "--driver", driver]
    run = start_experiments(tmp_path, "run", config, *options)
    output, _ = run.communicate(timeout=240)
    assert run.returncode == 0, output
    assert "2 emulated hosts, 100 Mbit/s each (network namespaces, tbf)" in output
    found = results.load("records", tmp_path / "out")
    (record,) = found.to_dict("records")
    assert found.attrs["link"] == str(Hosts(2, "100mbit"))
    assert record["step_s"] > 0.7 * 8 * record["wire_bytes"] / 100e6  # half of the bytes may be in flight
