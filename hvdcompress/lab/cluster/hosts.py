"""Emulated hosts: several on this machine, with links of a chosen speed (``launch/hosts.sh`` sets them up).

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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[1] / "launch" / "hosts.sh"
FACTORS = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000}
RING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
    "OMPI_MCA_coll_tuned_allgather_algorithm": "4",
    "OMPI_MCA_coll_tuned_allgatherv_algorithm": "3",
}
# What TCP/IP and Ethernet add: 66 bytes of headers to each 1448 of payload (with TCP's time stamps), and at most a
# frame without payload for each two with, which acknowledges them.
HEADERS, ACKNOWLEDGEMENTS = 66 / 1448, 66 / (2 * 1448)


class HostsError(RuntimeError):
    """The hosts cannot be had; the message says why and what to do."""


@dataclass(frozen=True)
class Rate:
    """What a host sends and receives with, in bits a second."""

    up: int
    down: int

    @classmethod
    def parse(cls, text: str) -> Rate:
        """From what tc calls a rate, or two for both directions.

        >>> Rate.parse("100mbit")
        Rate(up=100000000, down=100000000)
        >>> Rate.parse("2.5gbit/500kbit")
        Rate(up=2500000000, down=500000)

        Raises:
            ValueError: it is none.
        """
        found = []
        for word in text.split("/"):
            match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", word.strip())
            if not match:
                raise ValueError(f"{text!r} is no rate: write 100mbit, 2.5gbit or, to send and receive, 10mbit/1gbit")
            found.append(round(float(match[1]) * FACTORS[match[2]]))
        if len(found) > 2 or min(found) < 10_000:
            raise ValueError(f"{text!r} is no rate: one or two of 10kbit at least")
        return cls(found[0], found[-1])

    def __str__(self) -> str:
        return speed(self.up) if self.up == self.down else f"{speed(self.up)} up and {speed(self.down)} down"

    @property
    def slower(self) -> int:
        """What an exchange among hosts of this rate is limited by: each sends as much as it receives."""
        return min(self.up, self.down)

    @property
    def word(self) -> str:
        """As ``launch/hosts.sh`` takes it."""
        return f"{self.up}bit/{self.down}bit"


def ring(ranks: int) -> dict[str, str]:
    """Environment that makes Open MPI's collectives rings, as the ledger's ``bytes_on_wire`` is a ring's.

    Its own choice is mostly another. Non-blocking all-reduces of two ranks are left alone: they send as many bytes
    as a ring's, whose two directions do not overlap there.
    """
    return RING | ({"OMPI_MCA_coll_libnbc_iallreduce_algorithm": "1"} if ranks > 2 else {})


def speed(bits: float) -> str:
    """Bits a second for a reader.

    >>> speed(100_000_000), speed(2.5e9), speed(94_123_456)
    ('100 Mbit/s', '2.5 Gbit/s', '94.1 Mbit/s')
    """
    factor, unit = (1e9, "Gbit/s") if bits >= 1e9 else (1e6, "Mbit/s") if bits >= 1e6 else (1e3, "kbit/s")
    return f"{bits / factor:.3g} {unit}"


def slow_hosts(words: Sequence[str]) -> dict[int, str]:
    """``3=100mbit`` or ``host3=100mbit``, several with commas, as {3: "100mbit"}.

    Raises:
        ValueError: a word is not of that form, or its rate is none.
    """
    found = {}
    for word in ",".join(words).split(",") if words else ():
        match = re.fullmatch(r"(?:host)?(\d+)=(.+)", word.strip())
        if not match:
            raise ValueError(f"{word!r}: write HOST=RATE, such as 3=100mbit")
        Rate.parse(match[2])
        found[int(match[1])] = match[2]
    return found


@dataclass(frozen=True)
class Traffic:
    """Bytes that went over a host's link, every frame's headers included."""

    sent: int
    received: int


def problem() -> str | None:
    """Why hosts cannot be had here, and what to do about it; None if they can."""
    if not SCRIPT.is_file():
        return f"{SCRIPT} is missing: emulated hosts need the project's launch/ folder; clone the project."
    done = subprocess.run([SCRIPT, "check"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
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
    raise HostsError("this process is not on an emulated host: start it with launch/hosts.sh exec")


def bounds(on_wire: float, idle: float, collectives: int = 0) -> tuple[float, float]:
    """The least and the most that an interface may send for ``on_wire`` bytes of a ledger.

    Least: the payload with its headers (half a percent less, for what sat in TCP's buffers when the reading began).
    Most: acknowledgements on top, twice what Horovod's own negotiation sends when ``idle`` (bytes, in the same time),
    and 500 bytes for each collective, whose short messages have a frame each.
    """
    least = 0.995 * (1 + HEADERS) * on_wire
    return least, (1 + HEADERS + ACKNOWLEDGEMENTS) * on_wire + 2 * idle + 500 * collectives


@dataclass
class Hosts:
    """``count`` hosts, up between ``__enter__`` and ``__exit__``; a crash of this process takes them down too.

    Args:
        rate: such as "1gbit"; "10mbit/1gbit" sends with the first and receives with the second.
        slow: hosts with another rate, by number.
        delay: how much later each frame arrives, such as "1ms"; needs netem in the kernel.

    Raises:
        ValueError: a rate or a host is none.
        HostsError: they could not be set up (on entering).
    """

    count: int
    rate: str
    slow: Mapping[int, str] = field(default_factory=dict)
    delay: str | None = None

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
        line = [str(SCRIPT), "hold", "--id", self.id, "--hosts", str(self.count)]
        line += ["--rate", ",".join(rate.word for rate in self.rates)]
        line += ["--delay", self.delay] if self.delay else []
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
                raise HostsError(self._holder.stderr.read().strip() or f"{SCRIPT} ended without a word")
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
            subprocess.run([SCRIPT, "down", "--id", self.id], stdin=subprocess.DEVNULL, check=False)

    def command(self, host: str, *words: str | Path) -> list[str]:
        """The line that runs ``words`` on a host, with what mpirun and horovodrun need to know in its environment."""
        return [str(SCRIPT), "exec", "--id", self.id, host, *map(str, words)]

    def traffic(self) -> list[Traffic]:
        """Bytes over each host's link since the hosts are up.

        Raises:
            HostsError: they are not up.
        """
        line = [str(SCRIPT), "traffic", "--id", self.id]
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise HostsError(done.stderr.strip())
        return [Traffic(*map(int, line.split()[1:])) for line in done.stdout.splitlines()]

    def measure(self, seconds: float = 2.0) -> list[float]:
        """Bits a second of TCP payload that each host gets across while all send to their successors at once.

        Where that is less than 0.9 of a rate, this machine's processors are the limit and not the link.

        Raises:
            HostsError: a host did not answer.
        """
        lines = [self.command(name, sys.executable, __file__, str(self.count), str(seconds)) for name in self.names]
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
    """Ctrl-C waits: half a network taken down is nobody's wish. (Threads other than the first get no signals.)"""
    try:
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stream(count: int, seconds: float) -> float:
    """One host's part in :meth:`Hosts.measure`; what it received, in bits a second."""
    import socket
    import threading

    ctx = int(socket.gethostname().removeprefix("host"))
    server = socket.create_server(("", 5001))
    deadline = time.monotonic() + 20
    while True:
        try:
            successor = socket.create_connection((f"host{(ctx + 1) % count}", 5001))
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    predecessor, _ = server.accept()
    received, began, block, buffer = 0, time.monotonic(), bytes(1 << 18), bytearray(1 << 20)

    def send() -> None:
        with contextlib.suppress(OSError):
            while time.monotonic() < began + seconds + 0.2:  # a little longer, so that nobody waits for nothing
                successor.send(block)
        successor.close()

    threading.Thread(target=send, daemon=True).start()
    first = 0.0
    while (now := time.monotonic()) < began + seconds and (got := predecessor.recv_into(buffer)):
        # The clock starts late: hosts do not start at the same moment, and TCP takes a while to find its speed.
        if now > began + seconds / 4:
            received, first = (received + got, first) if first else (0, now)
    return 8 * received / max(1e-9, time.monotonic() - first)


if __name__ == "__main__":
    print(_stream(int(sys.argv[1]), float(sys.argv[2])))
