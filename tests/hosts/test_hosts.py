"""Emulated hosts: what is asked for and refused, and (marked hosts, as root) real namespaces and what crosses them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from installed import needs, without_tensorflow
from test_cli import CONFIG, start, wait_for_step
from typer.testing import CliRunner

from hvdcompress import cli
from hvdcompress.lab.cluster import hosts, launcher, notes, rates
from hvdcompress.lab.cluster.hosts import Hosts, Traffic
from hvdcompress.lab.cluster.rates import Rate
from hvdcompress.lab.training import results

ROOT = Path(__file__).resolve().parents[2]
PARALLEL = Path(__file__).parents[1] / "drivers"


# -- what is asked for ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "up", "down"),
    [
        ("100mbit", 10**8, 10**8),
        ("1gbit", 10**9, 10**9),
        ("2.5gbit", 2_500_000_000, 2_500_000_000),
        ("64kbit/10mbit", 64_000, 10**7),
        ("250000bit", 250_000, 250_000),
    ],
)
def test_rates(text, up, down):
    assert Rate.parse(text) == Rate(up, down)
    assert Rate.parse(Rate(up, down).word) == Rate(up, down)


@pytest.mark.parametrize(
    "text", ["100", "100mb", "100Mbit/s", "fast", "", "-1mbit", "1mbit/", "1bit", "1mbit/1mbit/1mbit"]
)
def test_what_is_no_rate(text):
    with pytest.raises(ValueError, match="is not a rate"):
        Rate.parse(text)


def test_slow_hosts():
    assert rates.slow_hosts(["3=100mbit", "host1=1mbit/2mbit,2=1gbit"]) == {3: "100mbit", 1: "1mbit/2mbit", 2: "1gbit"}
    assert rates.slow_hosts([]) == {}
    for wrong, words in (("3", "write HOST=RATE"), ("x=1mbit", "write HOST=RATE"), ("3=fast", "is not a rate")):
        with pytest.raises(ValueError, match=words):
            rates.slow_hosts([wrong])


def test_hosts_name_their_links():
    assert str(Hosts(4, "100mbit")) == "4 emulated hosts, 100 Mbit/s each (network namespaces, tbf)"
    assert str(Hosts(3, "1gbit", {2: "10mbit/100mbit", 0: "5mbit"}, "1ms")) == (
        "3 emulated hosts, 1 Gbit/s each but host0 5 Mbit/s, host2 10 Mbit/s up and 100 Mbit/s down, 1ms delay "
        "(network namespaces, tbf)"
    )
    assert Hosts(3, "1gbit").slots == "host0:1,host1:1,host2:1"
    with pytest.raises(ValueError, match="there is no host4: the last is host3"):
        Hosts(4, "1gbit", {4: "1mbit"})
    with pytest.raises(ValueError, match="from 2 to 64"):
        Hosts(1, "1gbit")


def test_bounds_notice_a_ledger_that_is_wrong():
    """The figures of a run over real links, seen on 3 hosts at 100 Mbit/s: a tenth more or less must be noticed."""
    for ledger, sent, idle, collectives in (
        (106_668_373, 112_629_620, 550_000, 40),
        (20_315_307, 21_442_428, 186_000, 80),
    ):
        for error in (0.9, 1.0, 1.1):
            least, most = rates.bounds(error * ledger, idle, collectives)
            assert (least <= sent <= most) == (error == 1.0)


# -- what is refused -----------------------------------------------------------------------------


def script(*words, path=None):
    environment = {**os.environ, **({"PATH": str(path)} if path else {})}
    line = [str(hosts.SCRIPT), *words]
    return subprocess.run(line, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


TOOLS = ["awk", "bash", "dirname", "flock", "ip", "mkdir", "readlink", "rm", "sed", "stat", "taskset", "tc", "uname"]
TOOLS += ["unshare"]


def tools(folder, without=(), user=0):
    """A PATH with what the script calls, but for some; `id -u` says ``user``."""
    folder.mkdir()
    for name in TOOLS:
        if name not in without and (found := shutil.which(name)):
            (folder / name).symlink_to(found)
        elif name not in without:
            (folder / name).symlink_to(shutil.which("true"))
    (folder / "id").write_text(f"#!/bin/sh\necho {user}\n")
    (folder / "id").chmod(0o755)
    return folder


@pytest.mark.parametrize(
    "words", [["up", "--hosts", "4", "--rate", "1gbit"], ["down"], ["check"], ["exec", "host0", "x"]]
)
def test_without_root_it_says_what_to_do(tmp_path, words):
    done = script(*words, path=tools(tmp_path / "bin", user=1000))
    assert done.returncode == 1 and "need root" in done.stderr
    assert f"hosts.sh '{words[0]}'" in done.stderr and "sudo" in done.stderr
    assert "Without emulated hosts" in done.stderr and "say nothing about a network" in done.stderr


def test_without_iproute2_it_says_what_to_install(tmp_path):
    done = script("check", path=tools(tmp_path / "bin", without=("ip", "tc")))
    assert done.returncode == 1 and "apt-get install -y iproute2\n" in done.stderr
    assert "mpirun or horovodrun -np" in done.stderr


def test_help_needs_nothing(tmp_path):
    done = script("--help", path=tools(tmp_path / "bin", without=("ip", "tc", "unshare"), user=1000))
    assert done.returncode == 0 and "up --hosts N --rate RATE" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["up", "--hosts", "4"], "give --rate"),
        (["up", "--rate", "1gbit"], "give --hosts, from 2 to 64"),
        (["up", "--hosts", "1", "--rate", "1gbit"], "give --hosts, from 2 to 64"),
        (["up", "--hosts", "4", "--rate", "fast"], "fast is not a rate"),
        (["up", "--hosts", "4", "--rate", "1bit"], "too slow"),
        (["up", "--hosts", "4", "--rate", "1gbit,2gbit"], "--rate lists 2 rates for 4 hosts"),
        (["up", "--hosts", "4", "--rate", "1gbit", "--slow", "4=1mbit"], "there is no host4, the last is host3"),
        (["up", "--hosts", "4", "--rate", "1gbit", "--slow", "1mbit"], "write HOST=RATE"),
        (["up", "--hosts", "4", "--rate", "1gbit", "--delay", "1"], "1 is not a time"),
        (["up", "--hosts"], "--hosts needs a value"),
        (["exec", "host0"], "exec needs a host and a command"),
        (["exec", "host0", "true"], "there is no host0 among the hosts 'nobody'"),
        (["dwon"], "unknown command dwon"),
    ],
)
def test_the_script_refuses_by_name(tmp_path, words, message):
    done = script(words[0], "--id", "nobody", *words[1:], path=tools(tmp_path / "bin"))
    assert done.returncode == 1 and message in done.stderr, done.stderr


def test_ids_cannot_reach_other_namespaces():
    assert "small letters and digits" in script("down", "--id", "a/../b").stderr


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(CONFIG, encoding="utf-8")
    return tmp_path / "small.yaml"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "4", "--rate", "1gbit"], "need root. Try: sudo"),
        (["--hosts", "4"], "--hosts needs the links' speed"),
        (["--rate", "1gbit"], "give --hosts, too"),
        (["--hosts", "4", "--rate", "1gbit", "-np", "2"], "each host runs one rank, so leave out -np"),
        (["--hosts", "4", "--rate", "fast"], "'fast' is not a rate"),
        (["--hosts", "4", "--rate", "1gbit", "--slow", "7=1mbit"], "there is no host7: the last is host3"),
    ],
)
def test_run_refuses_before_anything_starts(config, monkeypatch, words, message):
    monkeypatch.setattr(hosts, "problem", lambda: "Emulated hosts need root. Try: sudo …")
    monkeypatch.setattr(launcher, "Ranks", lambda *_: pytest.fail("ranks were started"))
    result = CliRunner().invoke(cli.app, ["run", str(config), *words], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and message in result.output, result.output
    assert not Path("runs").exists()


def test_a_script_that_fails_is_an_error(monkeypatch, tmp_path):
    fake = tmp_path / "hosts.sh"
    fake.write_text("#!/bin/sh\necho 'no bridges here' >&2; exit 1\n")
    monkeypatch.setattr(hosts, "SCRIPT", fake)  # without its executable bit, as some installers leave it
    assert hosts.problem() == "no bridges here"
    with pytest.raises(hosts.HostsError, match="no bridges here"), Hosts(2, "1gbit"):
        pass
    monkeypatch.setattr(hosts, "script", lambda *words: [str(fake), *words])
    with pytest.raises(hosts.HostsError, match="cannot be run"), Hosts(2, "1gbit"):
        pass


# -- the line, the notes, the agent --------------------------------------------------------------


def test_the_line_that_launches_on_hosts(monkeypatch):
    monkeypatch.setattr(launcher, "horovodrun", lambda: str(ROOT / "bin" / "horovodrun"))
    monkeypatch.chdir(ROOT)
    network = Hosts(3, "1gbit")
    line = launcher.command(3, "mpi", "x.py", hosts=network)
    assert line[:5] == ["bash", "hvdcompress/lab/cluster/hosts.sh", "exec", "--id", network.id]
    assert line[5:10] == ["host0", "bin/horovodrun", "-np", "3", "--mpi"] and "host0:1,host1:1,host2:1" in line
    ring, plain = launcher.environment(3, network), launcher.environment(3)
    assert ring["OMPI_MCA_coll_tuned_allreduce_algorithm"] == "4"
    assert not any("coll_tuned" in key for key in plain)


def test_results_over_two_links_never_share_a_folder(tmp_path):
    notes.check_link(tmp_path, "shared memory")  # nothing there yet
    (tmp_path / "launch.json").write_text(json.dumps({"link": notes.link("mpi", Hosts(2, "1gbit"))}))
    notes.check_link(tmp_path, str(Hosts(2, "1gbit")))
    with pytest.raises(launcher.LaunchError, match="over 2 emulated hosts, 1 Gbit/s each.*would go over shared memory"):
        notes.check_link(tmp_path, notes.link("mpi"))


def test_the_report_names_the_link():
    launch = {"folder": "x", "ranks": 2, "command": "…", "machine": {"cores": 8, "cpu": "A"}}
    emulated = {**launch, "link": str(Hosts(2, "100mbit")), "reached": ["94.1 Mbit/s", "93.9 Mbit/s"]}
    (note,) = results._notes([emulated], [])
    assert note.startswith(
        "2 ranks on 2 emulated hosts, 100 Mbit/s each (network namespaces, tbf) of one machine (8 cores, A)"
    )
    assert "94.1 Mbit/s, 93.9 Mbit/s" in note and "shared memory" not in note
    (plain,) = results._notes([launch], [])
    assert "over shared memory" in plain and "times do not" in plain


def test_the_agent_reads_its_words_as_ssh_does(tmp_path):
    shutil.copy(hosts.SCRIPT.with_name("netns_agent.sh"), tmp_path)
    (tmp_path / "hosts.sh").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (tmp_path / "hosts.sh").chmod(0o755)
    for words in (
        ["host1", "cd /x ;", "env A='b c' true"],  # mpirun
        ["-o", "A=no", "-x", "-p", "22", "host1", "-o", "ConnectTimeout=3", "cd /x ; env A='b c' true"],  # horovodrun
    ):
        done = subprocess.run([tmp_path / "netns_agent.sh", *words], capture_output=True, text=True, timeout=20)
        assert done.stdout == "exec|host1|bash|-c|cd /x ; env A='b c' true|", done.stderr


# -- real ones -----------------------------------------------------------------------------------


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
        folders = [path for root in ("/run/hvdcompress", "/etc/netns") for path in Path(root).glob("*")]
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


@pytest.mark.hosts
def test_up_and_down_as_often_as_you_like(nothing_left):
    up = ["up", "--id", "test", "--hosts", "3", "--rate", "100mbit", "--slow", "2=10mbit/20mbit"]
    try:
        assert script(*up).stdout == "up\n"
        assert script(*up).stdout == "up already\n"
        lines = script("status").stdout
        assert "test:\n  host0  10.77.0.1  sends at 100 Mbit/s" in lines
        assert "host2  10.77.0.3  sends at 10 Mbit/s (0.0 MB so far), receives at 20 Mbit/s" in lines
        assert script(*up[:-2]).stdout == "up\n"  # something else: made again
        assert "host2  10.77.0.3  sends at 100 Mbit/s" in script("status").stdout
        assert (
            script("exec", "--id", "test", "host1", "bash", "-c", "hostname; ssh host2 'hostname'").stdout
            == "host1\nhost2\n"
        )
        assert os.uname().nodename not in ("host1", "host2")
    finally:
        down = script("down", "--id", "test")
    assert down.returncode == 0, down.stderr
    assert script("down", "--id", "test").returncode == 0


@pytest.mark.hosts
def test_a_delay_that_the_kernel_cannot_make_leaves_nothing(nothing_left):
    done = script("up", "--id", "test", "--hosts", "3", "--rate", "100mbit", "--delay", "20ms")
    try:
        if done.returncode:
            assert "cannot make links with a delay (leave out --delay)" in done.stderr and "sch_netem" in done.stderr
            return  # nothing_left sees that nothing is, without a `down`
        code = "import socket, time; t = time.time(); socket.socket().connect_ex(('host1', 9)); print(time.time() - t)"
        taken = script("exec", "--id", "test", "host0", sys.executable, "-c", code).stdout
        assert 0.04 < float(taken) < 0.5  # there and back
    finally:
        if not done.returncode:
            script("down", "--id", "test")


@pytest.mark.hosts
def test_two_users_do_not_meet(nothing_left):
    with Hosts(2, "100mbit") as one, Hosts(3, "10mbit") as other:
        assert len(one.traffic()) == 2 and len(other.traffic()) == 3
        refused = script("down", "--id", "x" + one.id)  # somebody else's, and not there
        assert refused.returncode == 0 and len(one.traffic()) == 2
        assert on(one, "host1", "cat", "/etc/hosts").count("host") == 3  # localhost, host0, host1


@pytest.mark.hosts
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


@pytest.mark.hosts
def test_ranks_of_all_hosts_are_in_one_session(nothing_left):
    """Linux before 6.18.45 lets one session starve another: two sessions on a processor stood still for minutes."""
    pytest.importorskip("mpi4py")  # with it there is an mpirun
    code = "import os; print(os.uname().nodename, os.getsid(0))"
    with Hosts(3, "1gbit") as network:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        line = network.command(
            "host0", "env", f"PATH={path}", "mpirun", "-H", network.slots, sys.executable, "-c", code
        )
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    said = re.findall(r"(host\d) (\d+)", done.stdout)  # lines of several ranks may come as one
    assert sorted(name for name, _ in said) == ["host0", "host1", "host2"], done.stderr
    assert {int(session) for _, session in said} == {os.getsid(0)}


@pytest.mark.hosts
def test_hosts_end_with_their_owner_and_take_their_processes_along(nothing_left):
    code = (
        "import signal, subprocess, time\nfrom hvdcompress.lab.cluster.hosts import Hosts\n"
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


@pytest.mark.hosts
def test_what_a_killed_holder_leaves_is_swept(nothing_left):
    network = Hosts(2, "1gbit").__enter__()
    holder = network._holder
    assert holder and "in use by process" in script("status").stdout
    holder.kill()
    holder.wait(10)
    assert "left over by a crash" in script("status").stdout
    with Hosts(2, "1gbit"):
        assert network.id not in script("status").stdout
    network.__exit__()


@pytest.mark.hosts
def test_links_have_their_rates(nothing_left):
    with Hosts(3, "50mbit", {2: "10mbit/20mbit"}) as network:
        to0, to1, to2 = network.measure(4.0)  # TCP takes its time to find a rate
        traffic = network.traffic()
    assert 0.6 * 50e6 < to1 < 50e6
    assert 0.5 * 20e6 < to2 < 20e6, "what host2 receives"
    assert 0.5 * 10e6 < to0 < 10e6, "what host2 sends"
    assert all(isinstance(each, Traffic) and each.sent > 1e6 for each in traffic)
    assert traffic[2].sent < 0.8 * traffic[2].received


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
                "host0", "mpirun", "-H", network.slots, sys.executable, PARALLEL / "hosts_truth.py", folder, *METHODS
            ),
            env={**os.environ, **rates.ring(3), "PATH": path, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.hosts
@pytest.mark.parallel
@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", METHODS)
def test_the_ledger_is_what_the_interface_sent(truth, method):
    for rank, found in enumerate(truth):
        one, idle = found[method], found["idle"]["sent"] / found["idle"]["seconds"]
        least, most = rates.bounds(one["ledger"], idle * one["seconds"], one["collectives"])
        assert least <= one["sent"] <= most, f"rank {rank}: {one}, idle {idle:.0f} bytes/s"
        assert most < 1.25 * least, "bounds this wide would show nothing"


@pytest.mark.hosts
@pytest.mark.parallel
@pytest.mark.timeout(300)
def test_the_rate_limits(truth):
    for found in truth:
        dense = found["none"]
        assert dense["seconds"] >= 0.99 * 8 * dense["sent"] / 100e6
        assert dense["seconds"] < 4 * 8 * dense["sent"] / 100e6, "far slower than the link"
        assert found["scalecom:density=0.05"]["seconds"] < dense["seconds"] / 2


def within(seconds, holds):
    """Wait until something holds; returns whether it does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not holds():
        time.sleep(0.1)
    return holds()


@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.parallel
@pytest.mark.alone
@pytest.mark.timeout(200)
def test_a_slow_link_is_waited_for_and_a_cut_one_ends_every_rank(nothing_left, tmp_path):
    pytest.importorskip("mpi4py")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    steps, said = tmp_path / "steps", [tmp_path / f"said-{rank}" for rank in range(3)]

    def done():
        return int(steps.read_text()) if steps.exists() else 0

    def have_said():
        return all(file.exists() and "hvdcompress: " in file.read_text() for file in said)

    with Hosts(3, "100mbit") as network:
        line = network.command(
            "host0", "mpirun", "-H", network.slots, sys.executable, PARALLEL / "cut_off.py", str(tmp_path)
        )
        with subprocess.Popen(
            line,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "DOOR": "mpi"},
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
        assert all(f"rank {other} does not answer" in text for other in gone), text


@pytest.mark.hosts
@pytest.mark.parallel
@pytest.mark.timeout(280)
@pytest.mark.parametrize("controller", ["mpi", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_run_on_hosts(nothing_left, config, controller):
    needs("horovod", "torch", "sklearn", "psutil")
    run = start(
        config,
        "--hosts",
        "2",
        "--rate",
        "100mbit",
        *(["--gloo"] if controller == "gloo" else []),
        **without_tensorflow(),
    )
    output, _ = run.communicate(timeout=240)
    assert run.returncode == 0, output
    assert "2 emulated hosts, 100 Mbit/s each (network namespaces, tbf)" in output
    folder = config.parent / "out"
    launch = json.loads((folder / "launch.json").read_text())
    assert launch["link"] == str(Hosts(2, "100mbit")) and len(launch["reached"]) == 2
    assert "2 emulated hosts, 100 Mbit/s each" in (folder / "table.md").read_text()
    events = [json.loads(line) for line in (folder / "metrics" / "digits.none.0.jsonl").read_text().splitlines()]
    assert events[-1]["identical"]
    seconds = sum(events[-1]["ranks"]["bytes_on_wire"]) / 2 * 8 / 100e6
    assert events[-1]["seconds"] > seconds  # the link's speed shows


@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.parallel
@pytest.mark.timeout(280)
def test_ctrl_c_takes_the_hosts_down(nothing_left, config):
    needs("horovod", "torch", "sklearn", "psutil")
    config.write_text(CONFIG.replace("steps: 20", "steps: 100000, log_every: 2"))
    run = start(config, "--hosts", "2", "--rate", "1gbit", **without_tensorflow())
    wait_for_step(config.parent, "digits.none.0")
    assert subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout.count(f"hvdc-p{run.pid}x1-") == 3
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGINT, output
    assert "every rank has ended" in output and "Traceback" not in output
