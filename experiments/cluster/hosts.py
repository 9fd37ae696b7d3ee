"""Emulated hosts: several on this machine, with links of a chosen speed (``hosts.sh`` in this folder sets them up).

    with Hosts(4, "100mbit", slow={3: "10mbit"}) as hosts:
        before = hosts.traffic()
        subprocess.run(hosts.command("host0", "mpirun", "-H", hosts.slots, "python", "train.py"))
        sent = [after.sent - then.sent for after, then in zip(hosts.traffic(), before)]

They need root and Debian's iproute2; :func:`problem` says what is missing. Bytes are those of whole Ethernet frames, as
the kernel's token buckets count them.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.cluster.rates import Rate

SCRIPT = Path(__file__).resolve().with_name("hosts.sh")
STREAM = "experiments.cluster.stream"


class HostsError(RuntimeError):
    """The hosts cannot be set up or used; the message says why and what to do."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that went over a host's link, every frame's headers included."""

    sent: int
    received: int


def script(*words: str) -> list[str]:
    """The command line of ``hosts.sh`` with these arguments; through bash, as its executable bit may be lost."""
    return ["bash", str(SCRIPT), *words]


def problem() -> str | None:
    """Check whether emulated hosts can be set up on this machine.

    Returns:
        What is missing and what to do about it, in several lines; None if nothing is missing.
    """
    done = subprocess.run(script("check"), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return (done.stderr.strip() or f"{SCRIPT} check failed") if done.returncode else None


def sent_here() -> int:
    """Bytes that this process's host has sent so far; for ranks, about their own host.

    Raises:
        HostsError: this process is not on an emulated host.
    """
    line = ["tc", "-s", "qdisc", "show", "dev", "eth0", "root"]
    with contextlib.suppress(OSError):
        done = subprocess.run(line, capture_output=True, text=True, timeout=30)
        found = re.search(r"qdisc tbf .*\n *Sent (\d+) bytes", done.stdout)
        if found:
            return int(found[1])
    raise HostsError("this process is not on an emulated host: start it with hosts.sh exec")


@dataclass
class Hosts:
    """``count`` hosts, up between ``__enter__`` and ``__exit__``; a crash of this process takes them down too.

    Args:
        rate: such as "1gbit"; "10mbit/1gbit" sends with the first and receives with the second.
        slow: hosts with another rate, by number.
        delay: how much later each frame arrives, such as "1ms"; needs netem in the kernel.
        pin: whether what runs on a host keeps to its share of the processors; otherwise the scheduler decides.

    Raises:
        ValueError: a rate is not a rate, or there is no such host.
        HostsError: they could not be set up (on entering).
    """

    count: int
    rate: str
    slow: Mapping[int, str] = field(default_factory=dict)
    delay: str | None = None
    pin: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.count <= 64:
            raise ValueError(f"{self.count} hosts: from 2 to 64")
        if wrong := [number for number in self.slow if not 0 <= number < self.count]:
            raise ValueError(f"there is no host{wrong[0]}: the last is host{self.count - 1}")
        self.rates = [Rate.parse(self.slow.get(number, self.rate)) for number in range(self.count)]
        self.names = [f"host{number}" for number in range(self.count)]
        self.id = f"p{os.getpid()}x{next(_numbers)}"
        self._holder: subprocess.Popen[str] | None = None

    @property
    def slots(self) -> str:
        """One rank a host, as mpirun's and horovodrun's -H take it."""
        return ",".join(f"{name}:1" for name in self.names)

    def __str__(self) -> str:
        """Such as "4 emulated hosts, 100 Mbit/s each (network namespaces, tbf)"."""
        usual = Rate.parse(self.rate)
        others = [f", {n} {rate}" for n, rate in zip(self.names, self.rates, strict=True) if rate != usual]
        delay = f", {self.delay} delay" if self.delay else ""
        return f"{self.count} emulated hosts, {usual} each{' but' if others else ''}" + (
            f"{''.join(others).removeprefix(',')}{delay} (network namespaces, tbf)"
        )

    def __enter__(self) -> Hosts:
        line = script("hold", "--id", self.id, "--hosts", str(self.count))
        line += ["--rate", ",".join(rate.word for rate in self.rates)]
        line += ["--delay", self.delay] if self.delay else []
        line += ["--pin", "yes" if self.pin else "no"]
        try:
            # Its standard input closes when we end, however we end: then it takes the hosts down.
            self._holder = subprocess.Popen(
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for us
            )
        except OSError as error:
            raise HostsError(f"{SCRIPT} cannot be run: {error}") from None
        try:
            assert self._holder.stdout and self._holder.stderr
            if self._holder.stdout.readline().strip() != "up":
                raise HostsError(self._holder.stderr.read().strip() or f"{SCRIPT} ended without a message")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ends what runs on the hosts, and takes them down."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        with _uninterrupted(), holder:  # `with` closes its standard input, and waits
            pass
        if holder.returncode == -signal.SIGKILL:
            subprocess.run(script("down", "--id", self.id), stdin=subprocess.DEVNULL, check=False)

    def command(self, host: str, *words: str | Path) -> list[str]:
        """The line that runs ``words`` on a host, with what mpirun and horovodrun need to know in its environment."""
        return script("exec", "--id", self.id, host, *map(str, words))

    def traffic(self) -> list[Traffic]:
        """Bytes over each host's link since the hosts are up.

        Raises:
            HostsError: they are not up.
        """
        line = script("traffic", "--id", self.id)
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise HostsError(done.stderr.strip())
        return [Traffic(*map(int, line.split()[1:])) for line in done.stdout.splitlines()]

    def measure(self, seconds: float = 2.0) -> list[float]:
        """Bits per second of TCP payload that each host gets across while all send to their successors at once.

        Where that is less than 0.9 of a rate, this machine's processors are the limit and not the link.

        Raises:
            HostsError: a host did not answer.
        """
        lines = [self.command(name, sys.executable, "-m", STREAM, str(self.count), str(seconds)) for name in self.names]
        running = [
            subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for line in lines
        ]
        try:
            results = [process.communicate(timeout=seconds + 30) for process in running]
            return [float(output) for output, _ in results]
        except (ValueError, subprocess.TimeoutExpired) as error:
            raise HostsError(f"the hosts' links could not be measured: {error}") from None
        finally:
            for process in running:
                process.kill()
                process.communicate()


_numbers = iter(range(1, sys.maxsize))


@contextlib.contextmanager
def _uninterrupted() -> Any:
    """Ctrl-C waits: half a network taken down is nobody's wish; threads other than the first get no signals."""
    try:
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
