"""Emulated hosts: namespaces come and go, links have their rates, and the ledger is what crosses them. Needs root."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.cluster import hosts, launch, rates
from experiments.cluster.hosts import Hosts
from experiments.report import results
from hvdcompress.cli.numbers import HEADERS
from tests import ROOT, SMALL_EXPERIMENT
from tests.installed import needs, python_path, without_tensorflow
from tests.launched.test_training import start, wait_for_step

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def possible():
    if reason := hosts.problem():
        assert "Without emulated hosts" in reason, f"a fault of the script, no want of the machine: {reason}"
        pytest.skip(" ".join(reason.split()))


@pytest.fixture
def nothing_left(possible):
    """Whatever the test does, this is what it must leave."""

    def ours():
        spaces = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout.split()
        folders = [path for root in (hosts.STATES, "/etc/netns") for path in Path(root).glob("*")]
        return {*(name for name in spaces if name.startswith("hvdc-")), *map(str, folders)}

    before = ours()
    yield
    deadline = time.monotonic() + 15
    while ours() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not ours() - before


def on(network, host, *words):
    return subprocess.run(
        network.command(host, *words), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    ).stdout


def test_a_command_on_hosts(nothing_left):
    line = [ROOT / "launch" / "hosts.sh", "--hosts", "3", "--rate", "100mbit", "--"]
    code = "hostname; ssh host2 hostname; cat /etc/hosts; exit 3"
    done = subprocess.run([*line, "bash", "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 3 and done.stdout.startswith("host0\nhost2\n127.0.0.1 localhost\n"), done
    assert os.uname().nodename not in ("host0", "host2")


def test_two_users_do_not_meet(nothing_left):
    with Hosts(2, "100mbit") as one, Hosts(3, "10mbit") as other:
        assert len(one.sent()) == 2 and len(other.sent()) == 3
        assert on(one, "host1", "cat", "/etc/hosts").count("host") == 3  # localhost, host0, host1


@pytest.mark.parametrize("pin", [True, False])
def test_hosts_keep_to_their_share_of_the_processors_unless_told_otherwise(nothing_left, pin):
    mine = os.sched_getaffinity(0)
    code = "import os; print(*os.sched_getaffinity(0))"
    with Hosts(2, "1gbit", pin=pin) as two:
        shares = [set(map(int, on(two, name, sys.executable, "-c", code).split())) for name in two.names]
    if not pin:
        assert shares == [mine, mine]
    elif len(mine) > 1:
        assert not shares[0] & shares[1] and all(share < mine for share in shares)


def test_ranks_of_all_hosts_are_in_one_session(nothing_left):
    """Linux before 6.18.45 lets one session starve another: two sessions on a processor stood still for minutes."""
    pytest.importorskip("mpi4py")  # with it there is an mpirun
    code = "import os; os.write(1, f'{os.uname().nodename} {os.getsid(0)}\\n'.encode())"  # in one piece
    with Hosts(3, "1gbit") as network:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        line = network.command(
            "host0", "env", f"PATH={path}", "mpirun", "-H", network.slots, sys.executable, "-c", code
        )
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    said = re.findall(r"(host\d) (\d+)", done.stdout)  # lines of several ranks may come as one
    assert sorted(name for name, _ in said) == ["host0", "host1", "host2"], done.stderr
    assert {int(session) for _, session in said} == {os.getsid(0)}


def test_hosts_end_with_their_owner_and_take_their_processes_along(nothing_left):
    code = (
        "import signal, subprocess, time\nfrom experiments.cluster.hosts import Hosts\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job's is to ignore it
        "with Hosts(2, '1gbit') as h:\n"
        "    p = subprocess.Popen(h.command('host1', 'sleep', '1000'))\n"
        "    print(p.pid, flush=True); time.sleep(1000)\n"
    )
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        quiet = subprocess.DEVNULL
        owner = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=quiet, text=True, cwd=ROOT
        )
        try:
            assert owner.stdout
            sleeper = int(owner.stdout.readline())
            owner.send_signal(number)
            owner.wait(30)
        finally:
            owner.kill()
            owner.communicate()
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline and "sleep" in _command_of(sleeper):
            time.sleep(0.1)
        assert "sleep" not in _command_of(sleeper)


def _command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_what_a_killed_holder_leaves_is_swept(nothing_left):
    network = Hosts(2, "1gbit").__enter__()
    assert network._holder
    network._holder.kill()
    network._holder.wait(10)
    assert network.bin.exists()
    with Hosts(2, "1gbit"):
        assert not network.bin.exists()
    network.__exit__()


def test_links_have_their_rates(nothing_left):
    with Hosts(3, "50mbit") as network:
        stream = (sys.executable, HERE / "stream.py", 3, 4.0)  # TCP takes its time to find a rate
        lines = [network.command(name, *map(str, stream)) for name in network.names]
        running = [subprocess.Popen(line, stdout=subprocess.PIPE) for line in lines]
        reached = [float(process.communicate(timeout=60)[0]) for process in running]
        sent = network.sent()
    assert all(0.6 * 50e6 < bits < 50e6 for bits in reached)
    assert min(sent) > 0.9 * 4 * 0.6 * 50e6 / 8


METHODS = ["none", "topk:density=0.05", "scalecom:density=0.05", "qsgd"]


@pytest.fixture(scope="session")
def truth(possible, tmp_path_factory):
    """What three ranks wrote: their ledgers' bytes, and their interfaces'."""
    needs("torch", "horovod")
    folder = tmp_path_factory.mktemp("truth")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with Hosts(3, "100mbit") as network:
        done = subprocess.run(
            network.command(
                "host0", "mpirun", "-H", network.slots, sys.executable, HERE / "hosts_truth.py", folder, *METHODS
            ),
            env={**os.environ, **rates.ring(3), "PATH": path, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


def bounds(on_wire: float, idle: float, collectives: int = 0) -> tuple[float, float]:
    """The least and the most that an interface may send for ``on_wire`` bytes of a ledger.

    Least: the payload with its headers (half a percent less, for what sat in TCP's buffers when the reading began).
    Most: acknowledgements on top, twice what Horovod's own negotiation sends when ``idle`` (bytes, in the same time),
    and 500 bytes for each collective, whose short messages have a frame each.
    """
    least = 0.995 * (1 + HEADERS) * on_wire
    return least, (1 + 1.5 * HEADERS) * on_wire + 2 * idle + 500 * collectives


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", METHODS)
def test_the_ledger_is_what_the_interface_sent(truth, method):
    for rank, found in enumerate(truth):
        one, idle = found[method], found["idle"]["sent"] / found["idle"]["seconds"]
        least, most = bounds(one["ledger"], idle * one["seconds"], one["collectives"])
        assert least <= one["sent"] <= most, f"rank {rank}: {one}, idle {idle:.0f} bytes/s"
        assert most < 1.25 * least, "bounds this wide would show nothing"


@pytest.mark.timeout(300)
def test_the_rate_limits(truth):
    for found in truth:
        dense = found["none"]
        assert dense["seconds"] >= 0.99 * 8 * dense["sent"] / 100e6
        assert dense["seconds"] < 4 * 8 * dense["sent"] / 100e6, "far slower than the link"
        assert found["scalecom:density=0.05"]["seconds"] < dense["seconds"] / 2


@pytest.mark.timeout(120)
def test_two_levels_save_what_the_interface_sends(nothing_left):
    needs("torch", "psutil")
    with Hosts(2, "1gbit", ranks_per_host=2) as network:
        output = launch.run([str(HERE / "two_levels.py")], 4, "ddp", hosts=network, timeout=100)
    found = json.loads(output.splitlines()[-1])
    one, two = found["0"], found["auto"]
    assert two["interface"] < 0.5 * one["interface"]
    # The ranks of a host exchange dense gradients with each other, and none of that crosses the link
    assert (1 + HEADERS) * two["ledger"] < two["interface"] < 1.5 * two["ledger"]


def within(seconds, holds):
    """Wait until something holds; returns whether it does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not holds():
        time.sleep(0.1)
    return holds()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_slow_link_is_waited_for_and_a_cut_one_ends_every_rank(nothing_left, tmp_path):
    pytest.importorskip("mpi4py")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    steps, said = tmp_path / "steps", [tmp_path / f"said-{rank}" for rank in range(3)]

    def done():
        return int(steps.read_text()) if steps.exists() else 0

    def have_said():
        return all(file.exists() and "has waited" in file.read_text() for file in said)

    with Hosts(3, "100mbit") as network:
        line = network.command(
            "host0", "mpirun", "-H", network.slots, sys.executable, HERE / "cut_off.py", str(tmp_path)
        )
        with subprocess.Popen(
            line,
            env={**os.environ, "PATH": path, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
        ) as mpirun:  # fmt: skip
            try:
                assert within(60, lambda: done() >= 3)
                slower = "qdisc replace dev eth0 root handle 1: tbf rate 200kbit burst 3100 limit 48100"
                subprocess.run(network.command("host2", "tc", *slower.split()), check=True)
                before = done()
                assert within(60, lambda: done() >= before + 5) and not have_said()
                cut = time.monotonic()
                subprocess.run(["ip", "-n", f"hvdc-{network.id}-switch", "link", "set", "host2", "down"], check=True)
                assert within(60, have_said), [file.read_text() for file in said]
                assert time.monotonic() - cut < 28, "`end_after` is 12 s, and asking the others takes 3"
            finally:
                mpirun.kill()
    for rank, file in enumerate(said):
        gone = [0, 1] if rank == 2 else [2]
        text = file.read_text()
        assert f"hvdcompress: rank {rank} has waited" in text and "in step" in text, text
        assert all(re.search(rf"rank {other} on \S+ \(\S+\) does not answer", text) for other in gone), text


@pytest.mark.timeout(280)
@pytest.mark.parametrize("driver", ["horovod", "ddp", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_run_on_hosts(nothing_left, config, driver):
    needs("horovod", "torch", "sklearn", "psutil")
    run = start(config, "--hosts", "2", "--rate", "100mbit", "--driver", driver, **without_tensorflow())
    output, _ = run.communicate(timeout=240)
    assert run.returncode == 0, output
    assert "2 emulated hosts, 100 Mbit/s each (network namespaces, tbf)" in output
    records = results.load("records", config.parent / "out").set_index("method")
    assert set(records["link"]) == {str(Hosts(2, "100mbit"))}
    dense = records.loc["none"]
    assert dense["step_s"] > 0.7 * 8 * dense["wire_bytes"] / 100e6  # the link's speed shows; half may be in flight


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_ctrl_c_takes_the_hosts_down(nothing_left, config):
    needs("horovod", "torch", "sklearn", "psutil")
    config.write_text(SMALL_EXPERIMENT.replace("steps: 20", "steps: 100000, log_every: 2"))
    run = start(config, "--hosts", "2", "--rate", "1gbit", **without_tensorflow())
    wait_for_step(config.parent, "digits.none.0")
    assert subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout.count(f"hvdc-p{run.pid}x1-") == 3
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGINT, output
    assert "every rank has ended" in output and "Traceback" not in output
