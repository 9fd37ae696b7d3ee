"""Emulated hosts: network namespaces on this machine, joined by a bridge, with links of a chosen speed.

    with Hosts(4, "100mbit") as hosts:
        before = hosts.sent()
        subprocess.run(hosts.command("host0", "mpirun", "-H", hosts.slots, "python", "train.py"))
        sent = [after - then for after, then in zip(hosts.sent(), before)]

The kernel's token buckets (tbf) slow the links down, so what ranks send each other takes the time that it would take on
such a network. Hosts share this machine's files; its processors are dealt out. Needs root and Debian's iproute2:
:func:`problem` says what is missing. Bytes are those of whole Ethernet frames, as the token buckets count them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hvdcompress.cli.numbers import bits_of

STATES = Path("/var/lib/hvdcompress")  #: a folder of programs for each set of hosts; /run may be mounted noexec
NETWORK = "10.77.0"  # seen by the hosts alone: their bridge lives in a namespace of its own
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "taskset": "util-linux"}
WITHOUT = (
    "Without emulated hosts, ranks on this machine still run (python -m experiments run CONFIG without --hosts): their "
    "bytes are counted rightly, but their times say nothing about a network."
)

# Runs a command on a host. What launchers need to know goes into the environment, where it is not set already.
# Open MPI: reach other hosts by our agent, and send over the links alone (never through shared memory). Each host
# believes all processors to be its own, and would bind its rank to the first. mpirun's daemons stay in its session:
# Linux schedules each session as a group (man 7 sched, "autogroup"), and before 6.18.45 a group whose ranks poll could
# take a processor from all others for minutes (upstream's revert of 6d71a9c61604 mends it). A host name of its own:
# Open MPI takes ranks with the same one for neighbours in memory.
RUN = r"""#!/usr/bin/env bash
export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
[[ $PATH == "{bin}":* ]] || export PATH="{bin}:$PATH"
export OMPI_MCA_plm_rsh_agent="{bin}/ssh" OMPI_MCA_plm_rsh_no_tree_spawn=1 OMPI_MCA_orte_leave_session_attached=1
export OMPI_MCA_btl_tcp_if_include=eth0 OMPI_MCA_oob_tcp_if_include=eth0 OMPI_MCA_btl=${{OMPI_MCA_btl:-tcp,self}}
export OMPI_MCA_hwloc_base_binding_policy=${{OMPI_MCA_hwloc_base_binding_policy:-none}}
export OMPI_MCA_mpi_yield_when_idle=${{OMPI_MCA_mpi_yield_when_idle:-1}}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec taskset -c {processors} ip netns exec {space} unshare --uts \
    bash -c 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"' {host} "$@"
"""
# Takes ssh's place: horovodrun finds it on its PATH. Options stand before the host and, as horovodrun has it, behind.
AGENT = r"""#!/usr/bin/env bash
words=()
while (($#)) && ((${{#words[@]}} < 2)); do
    case $1 in -[bcDEeFIiJLlmOopQRSWw]) shift 2 ;; -*) shift ;; *) words+=("$1"); shift ;; esac
done
command="${{words[1]}} $*"
exec "{bin}/${{words[0]}}" bash -c "${{command% }}"
"""


class HostsError(RuntimeError):
    """The hosts cannot be set up or used; the message says why and what to do."""


def _output(*words: object) -> str:
    line = list(map(str, words))
    done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise HostsError(
            f"This machine cannot emulate hosts: {' '.join(line)}: {done.stderr.strip()}\nEither its kernel lacks "
            "something (try: modprobe -a bridge veth sch_tbf), or root may not use it here, "
            f"as in a container that was not started with --privileged.\n{WITHOUT}"
        )
    return done.stdout


def _sent(*words: str) -> int:
    """Return the bytes that left by an interface, from its token bucket."""
    with contextlib.suppress(HostsError, OSError):
        found = json.loads(_output("tc", "-s", "-j", *words, "root"))
        if found and found[0]["kind"] == "tbf":
            return int(found[0]["bytes"])
    raise HostsError("there is no emulated host's link here: are the hosts up, and does this run on one of them?")


def problem() -> str | None:
    """Return what is missing on this machine and what to do about it; None if hosts can be set up."""
    try:
        with Hosts(2, "1gbit"):
            return None
    except HostsError as error:
        return str(error)


def _check() -> None:
    if sys.platform != "linux":
        raise HostsError(f"Emulated hosts need Linux; this is {sys.platform}. {WITHOUT}")
    if missing := " ".join(sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)})):
        raise HostsError(f"Emulated hosts need Debian's {missing}: apt-get install -y {missing}\n{WITHOUT}")
    if os.geteuid():
        raise HostsError(f"Emulated hosts need root, to make network namespaces: try sudo.\n{WITHOUT}")


@dataclass
class Hosts:
    """Emulated hosts, up between ``__enter__`` and ``__exit__``; if this process is killed, the next one removes them.

    Args:
        count: how many, from 2 to 64.
        rate: at which each of them sends and receives, such as "1gbit".
        ranks_per_host: how many ranks launchers start on each.
        pin: whether what runs on a host keeps to its share of the processors; otherwise the scheduler decides. Left to
            it, four ranks with two threads each on two processors took now 150 and now 290 ms for the same exchange.

    Raises:
        ValueError: there are too few or too many, or the rate is not a rate.
        HostsError: they could not be set up (on entering).
    """

    count: int
    rate: str
    ranks_per_host: int = 1
    pin: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.count <= 64:
            raise ValueError(f"{self.count} hosts: from 2 to 64")
        self.bits = bits_of(self.rate)
        self.names = [f"host{number}" for number in range(self.count)]
        self.id = f"p{os.getpid()}x{next(_numbers)}"
        self.bin = STATES / self.id

    @property
    def slots(self) -> str:
        """The ranks of each host, as mpirun's and horovodrun's -H take them."""
        return ",".join(f"{name}:{self.ranks_per_host}" for name in self.names)

    def __str__(self) -> str:
        """Such as "4 emulated hosts, 100 Mbit/s each (network namespaces, tbf)"."""
        ranks = f" with {self.ranks_per_host} ranks" if self.ranks_per_host > 1 else ""
        return f"{self.count} emulated hosts{ranks}, {title(self.rate)} each (network namespaces, tbf)"

    def __enter__(self) -> Self:
        _check()
        for folder in STATES.glob("p*x*"):  # the hosts of processes that were killed
            if not Path("/proc", folder.name[1:].partition("x")[0]).exists():
                _take_down(folder.name)
        self.bin.mkdir(parents=True)
        try:
            self._make_hosts()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End what runs on the hosts, and take them down."""
        with _uninterrupted():
            _take_down(self.id)

    def _make_hosts(self) -> None:
        switch, spaces = f"hvdc-{self.id}-switch", [f"hvdc-{self.id}-{name}" for name in self.names]
        # The bridge has a namespace of its own, too: a firewall of this machine (Docker's drops what it does not know)
        # never sees its frames, its names collide with nobody's, and it is gone when its namespace is.
        for space in (switch, *spaces):
            _output("ip", "netns", "add", space)
            # Without IPv6, hosts do not look for routers on links whose bytes are being counted. cubic: the same
            # algorithm on every machine. (BBR stops for 0.2 s every 10 s to look for delay.)
            script = "cd /proc/sys/net; for each in all default; do echo 1 >ipv6/conf/$each/disable_ipv6; done; "
            words = ["ip", "netns", "exec", space, "sh", "-c", script + "echo cubic >ipv4/tcp_congestion_control"]
            subprocess.run(words, stderr=subprocess.DEVNULL)
        bridge = ("type", "bridge", "stp_state", 0, "forward_delay", 0, "mcast_snooping", 0)
        _output("ip", "-n", switch, "link", "add", "name", "bridge", *bridge)
        _output("ip", "-n", switch, "link", "set", "bridge", "up")
        addresses = "".join(f"{NETWORK}.{number + 1} {name}\n" for number, name in enumerate(self.names))
        for number, (name, space) in enumerate(zip(self.names, spaces, strict=True)):
            link = ("link", "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", space)
            _output("ip", "-n", switch, *link)
            _output("ip", "-n", switch, "link", "set", name, "master", "bridge", "up")
            _output("ip", "-n", space, "link", "set", "lo", "up")
            _output("ip", "-n", space, "address", "add", f"{NETWORK}.{number + 1}/24", "dev", "eth0")
            _output("ip", "-n", space, "link", "set", "eth0", "gso_max_segs", _frames_at_once(self.bits), "up")
            _shape(space, "eth0", self.bits)  # what the host sends
            _shape(switch, name, self.bits)  # what the switch sends to the host
            names = Path("/etc/netns", space, "hosts")  # `ip netns exec` lays it over /etc/hosts
            names.parent.mkdir(parents=True)
            names.write_text(f"127.0.0.1 localhost\n{addresses}", encoding="utf-8")
            self._program(name, RUN, space=space, host=name, processors=self._processors(number))
        self._program("ssh", AGENT)

    def _program(self, name: str, text: str, **values: str) -> None:
        file = self.bin / name
        file.write_text(text.format(bin=self.bin, **values), encoding="utf-8")
        file.chmod(0o755)

    def _processors(self, number: int) -> str:
        """Return a host's share of the processors; one that it shares with others where there are too few."""
        every = sorted(os.sched_getaffinity(0))
        each = len(every) // self.count
        mine = every[number * each : (number + 1) * each] if each else [every[number % len(every)]]
        return ",".join(map(str, mine if self.pin else every))

    def command(self, host: str, *words: str | Path) -> list[str]:
        """Return the line that runs ``words`` on a host, with what mpirun and horovodrun need in its environment."""
        return [str(self.bin / host), *map(str, words)]

    def sent(self) -> list[int]:
        """Return the bytes that each host has sent since the hosts are up, every frame's headers included.

        Raises:
            HostsError: they are not up.
        """
        return [_sent("-n", f"hvdc-{self.id}-{name}", "qdisc", "show", "dev", "eth0") for name in self.names]


def _frames_at_once(bits: int) -> int:
    """Return how many frames TCP hands over as one lump, which the virtual link carries as one.

    Lumps of up to 43 frames (64 kB) are cheap, and the token bucket counts the headers that each of their frames would
    have. Up to 150 Mbit/s frames go one by one, as a lump would hold up all else for 4 ms and more; above, 4 hosts on 2
    cores were seen to be busy with nothing but frames.
    """
    return 1 if bits <= 150_000_000 else 43


def _shape(space: str, interface: str, bits: int) -> None:
    """Put a token bucket on what leaves by an interface.

    burst: so much may leave at once after a pause. Too little, and the kernel's timers (some 50 us late, more when all
    cores are busy) waste time that is never made up for; too much, and short messages cross for free. It is 1 ms of the
    link, and what TCP hands over at once (two frames, or a lump) at least. limit: what waits for longer is dropped, as
    in a switch with so much memory. 50 ms: enough for TCP to fill the link when several hosts send to one; and 30
    frames at least.
    """
    burst = max(bits // 8000, 3100 if _frames_at_once(bits) == 1 else 68000)
    bucket = ("rate", f"{bits}bit", "burst", burst, "limit", max(bits // 160, 45000) + burst)
    _output("tc", "-n", space, "qdisc", "add", "dev", interface, "root", "handle", "1:", "tbf", *bucket)


def _take_down(id: str) -> None:
    """End what runs on the hosts of an id, and remove them; nothing if there are none."""
    spaces = list(Path("/run/netns").glob(f"hvdc-{id}-*"))
    with contextlib.ExitStack() as stack:
        # while they are open, no other namespace can get their numbers
        numbers = {os.fstat(stack.enter_context(space.open("rb")).fileno()).st_ino for space in spaces}
        _end_processes(numbers)
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space.name], stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns", space.name), ignore_errors=True)
        _end_processes(numbers)  # who came in meanwhile; now nobody can
    shutil.rmtree(STATES / id, ignore_errors=True)
    for parent in (STATES, Path("/etc/netns")):
        with contextlib.suppress(OSError):  # not if it holds anything
            parent.rmdir()


def _end_processes(numbers: set[int]) -> None:
    """End every process in these network namespaces, asking first."""
    deadline = time.monotonic() + 6.0
    while numbers and time.monotonic() < deadline:
        found = []
        for space in Path("/proc").glob("[0-9]*/ns/net"):
            with contextlib.suppress(OSError):  # some have ended meanwhile
                if space.stat().st_ino in numbers:
                    found.append(int(space.parts[2]))
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM if time.monotonic() < deadline - 3.0 else signal.SIGKILL)
        time.sleep(0.2)


_numbers = iter(range(1, sys.maxsize))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits: half a network taken down is nobody's wish; threads other than the first get no signals."""
    before = {}
    with contextlib.suppress(ValueError):
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


RING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
    "OMPI_MCA_coll_tuned_allgather_algorithm": "4",
    "OMPI_MCA_coll_tuned_allgatherv_algorithm": "3",
}


def ring(ranks: int) -> dict[str, str]:
    """Environment that makes Open MPI's collectives rings, as the ledger's ``bytes_on_wire`` is a ring's.

    Its own choice is mostly another. Non-blocking all-reduces of two ranks are left alone: they send as many bytes
    as a ring's, whose two directions do not overlap there.
    """
    return RING | ({"OMPI_MCA_coll_libnbc_iallreduce_algorithm": "1"} if ranks > 2 else {})


def title(rate: str) -> str:
    """Return a rate for a reader.

    >>> title("100mbit"), title("2.5gbit")
    ('100 Mbit/s', '2.5 Gbit/s')
    """
    bits = bits_of(rate)
    factor, unit = (1e9, "Gbit/s") if bits >= 1e9 else (1e6, "Mbit/s") if bits >= 1e6 else (1e3, "kbit/s")
    return f"{bits / factor:.3g} {unit}"
