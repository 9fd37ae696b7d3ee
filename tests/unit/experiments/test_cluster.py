"""Emulated hosts and launching: what is asked for, and what is refused before there are any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.cluster import hosts, launch
from experiments.cluster.hosts import Hosts
from hvdcompress.cli.numbers import bits_of
from tests import ROOT


@pytest.mark.parametrize(
    ("text", "bits"),
    [("100mbit", 10**8), ("1gbit", 10**9), ("2.5gbit", 2_500_000_000), ("64kbit", 64_000)],
)
def test_rates(text, bits):
    assert bits_of(text) == bits


@pytest.mark.parametrize("text", ["fast", "10", "1bit", "1gbit/1mbit"])
def test_what_is_not_a_rate(text):
    with pytest.raises(ValueError, match="is not a rate"):
        bits_of(text)


def test_hosts_name_their_links():
    assert str(Hosts(4, "100mbit")) == "4 emulated hosts, 100 Mbit/s each (network namespaces, tbf)"
    assert str(Hosts(2, "1gbit", ranks_per_host=2)).startswith("2 emulated hosts with 2 ranks, 1 Gbit/s each")
    assert Hosts(2, "1gbit", ranks_per_host=2).slots == "host0:2,host1:2"
    assert Hosts(3, "1gbit").slots == "host0:1,host1:1,host2:1"
    with pytest.raises(ValueError, match="from 2 to 64"):
        Hosts(1, "1gbit")


def test_the_line_that_launches_on_hosts(monkeypatch):
    monkeypatch.setattr(launch, "_launcher", lambda name: str(ROOT / "bin" / name))
    network = Hosts(3, "1gbit")
    (line,) = launch.lines(["x.py"], 3, "gloo", network)
    assert line[:5] == [str(network.bin / "host0"), str(ROOT / "bin" / "horovodrun"), "-np", "3", "--gloo"]
    assert "host0:1,host1:1,host2:1" in line


def test_ddp_ranks_know_their_hosts():
    found = launch.lines(["x.py"], 4, "ddp", Hosts(2, "1gbit", ranks_per_host=2))
    places = [dict(word.split("=") for word in line if "=" in word) for line in found]
    assert [Path(line[0]).name for line in found] == ["host0", "host0", "host1", "host1"]
    assert [(each["RANK"], each["GROUP_RANK"], each["LOCAL_RANK"]) for each in places] == [
        ("0", "0", "0"), ("1", "0", "1"), ("2", "1", "0"), ("3", "1", "1"),
    ]  # fmt: skip
    assert {(each["WORLD_SIZE"], each["GROUP_WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) for each in places} == {
        ("4", "2", "2")
    }


def test_the_agent_reads_its_words_as_ssh_does(tmp_path):
    for name, text in (("ssh", hosts.AGENT.format(bin=tmp_path)), ("host1", '#!/bin/sh\nprintf "%s|" "$@"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for words in (
        ["host1", "cd /x ;", "env A='b c' true"],  # mpirun
        ["-o", "A=no", "-x", "-p", "22", "host1", "-o", "ConnectTimeout=3", "cd /x ; env A='b c' true"],  # horovodrun
    ):
        done = subprocess.run([tmp_path / "ssh", *words], capture_output=True, text=True, timeout=20)
        assert done.stdout == "bash|-c|cd /x ; env A='b c' true|", done.stderr


def test_the_environment_of_ranks(monkeypatch):
    monkeypatch.setattr(launch.os, "cpu_count", lambda: 8)
    few, many = launch.environment(2), launch.environment(9)
    assert few["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert few["OMP_NUM_THREADS"] == "1" and int(few["HOROVOD_CACHE_CAPACITY"]) > 1024
    assert "OMPI_MCA_mpi_yield_when_idle" not in few and many["OMPI_MCA_mpi_yield_when_idle"] == "1"
