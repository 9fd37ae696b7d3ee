"""Emulated hosts: what is asked for, and what is refused before there are any."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvdcompress import cli
from hvdcompress.lab.cluster import hosts, launcher, notes, rates
from hvdcompress.lab.cluster.hosts import Hosts
from hvdcompress.lab.cluster.rates import Rate
from hvdcompress.lab.training import results
from tests import ROOT
from tests.unit.lab.test_cli import CONFIG


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


def script(*words, path=None):
    environment = {**os.environ, **({"PATH": str(path)} if path else {})}
    line = [str(hosts.SCRIPT), *words]
    return subprocess.run(line, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


TOOLS = [
    "awk",
    "bash",
    "dirname",
    "flock",
    "ip",
    "mkdir",
    "readlink",
    "rm",
    "sed",
    "stat",
    "taskset",
    "tc",
    "uname",
    "unshare",
]


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
