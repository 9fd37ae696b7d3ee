"""A watchdog: a step that waits too long says what for and for whom, on every rank, and ends.

Ranks cannot ask each other by the network that they wait in: a collective that is under way cannot be taken back, and
Horovod's controller itself may sit in MPI, waiting for a rank that is stopped. So a process answers on a socket of its
own, from a thread, where each of its Compressors is. One whose step has not moved for its plan's ``timeout`` asks all
ranks, prints what it waits for and which ranks are missing, and ends the process; so does every rank that is asked.

Before that, ranks must meet once, to tell each other where to ask. To that meeting, and to the first step, a rank may
well come late, as it compiles or loads its data: who waits for it says so after ``timeout``, and ends only after
``FIRST`` times as long.

A question is answered to those alone who prove, by an HMAC of a number that is drawn for it, that they were told the
process's secret. Where all ranks are on one host the socket is bound to this host. Time is counted in ticks: a process
that was itself stopped has not waited.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import os
import secrets
import socket
import socketserver
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

TICK = 0.5  #: seconds between two looks
ASKING = 3.0  #: seconds that ranks have for an answer
FIRST = 10  #: timeouts that ranks may take to come to the first step: 20 minutes by default; PyTorch gives them 30
LINE = 1 << 16  #: bytes of a question or an answer, at most

#: variables of launchers that start one process per rank, whose size is that of this host's ranks, and of all
_SIZES = (
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("HOROVOD_LOCAL_SIZE", "HOROVOD_SIZE"),
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
)


class Place(NamedTuple):
    """Where a rank is.

    Attributes:
        steps: that it has done, those of the training that it goes on with, too.
        waits_for: what it waits for; None outside of a step.
        seconds: for how long.
        first: whether none of its steps has come to its end yet.
    """

    steps: int
    waits_for: str | None
    seconds: float = 0.0
    first: bool = False


class Watchdog:
    """Watches the steps of one Compressor, from a thread that all of a process share.

    Args:
        rank, world: this rank, and their number.
        timeout: seconds after which a step that has not moved is ended; 0: never.
        place: returns where the rank is, or None once its ranks are no more; called by the thread.
        pulse: returns what changes when a step moves; called by the thread.
    """

    def __init__(
        self, rank: int, world: int, timeout: float, place: Callable[[], Place | None], pulse: Callable[[], Any]
    ):
        self.rank, self.world, self.timeout = rank, world, timeout
        self.on = timeout > 0 and world > 1
        self.over = False  # its ranks are no more: whatever comes after them is not its to watch
        self.seconds = 0.0  # since the step moved
        self.asked_by: int | None = None  # a rank that has waited too long
        self._place, self._pulse, self._last = place, pulse, object()
        self._peers: list[dict[str, Any]] = []
        self._address: dict[str, Any] = {}
        self._meets: str | None = None  # what this rank waits for in a meeting
        self._come: Callable[[], Sequence[int]] = tuple

    # -- ranks meet -----------------------------------------------------------------------------------------

    def address(self) -> str:
        """How others ask this one, in JSON; every rank gives all of them to :meth:`meet`. It watches from now on."""
        if self.on and not self._address:
            self._address = _service().watch(self)
        return json.dumps(self._address)

    @contextlib.contextmanager
    def meeting(self, what: str, come: Callable[[], Sequence[int]] = tuple) -> Iterator[None]:
        """Inside, outside of any step, this rank waits for all others to come.

        Args:
            what: what it waits for, in words.
            come: returns the ranks that have come, where that can be known; called by the thread.
        """
        self.address()
        self._meets, self._come = what, come
        try:
            yield
        finally:
            self._meets = None

    def meet(self, addresses: Sequence[str]) -> None:
        """From now on the ranks can ask each other; ``addresses``: every rank's, in rank order."""
        self._peers = [json.loads(address) for address in addresses]

    # -- in the thread --------------------------------------------------------------------------------------

    def place(self) -> Place:
        """Where this rank is.

        Raises:
            LookupError: its ranks are no more.
        """
        if self.over or (place := self._now()) is None:
            raise LookupError("its ranks are no more")
        return place._replace(seconds=self.seconds)

    def _now(self) -> Place | None:
        place = self._place()
        return place._replace(waits_for=self._meets) if place and self._meets else place

    def look(self) -> None:
        """At each tick: has the step moved? Ends the process if it has waited too long, or others have."""
        place, pulse = self._now(), self._pulse()
        self.over = self.over or place is None
        if self.over or place is None:
            return
        self.seconds = 0.0 if place.waits_for is None or pulse != self._last else self.seconds + TICK
        self._last = pulse
        patient = place.first or not self._peers
        ends = self.seconds >= self.timeout * (FIRST if patient else 1) or self.asked_by is not None
        if ends or self.timeout <= self.seconds < self.timeout + TICK:  # who is patient says it once
            say(self.report(self.everyones_place(ends), ends))
        if ends:
            threading.Event().wait(ASKING + 4 * TICK)  # the others ask, too, and ended ranks do not answer
            os._exit(1)

    def everyones_place(self, ends: bool = True) -> list[Place | None]:
        """Every rank's place, None of one that does not answer; asks all at once. ``ends``: and they, too, end."""
        found: list[Place | None] = [None] * self.world
        found[self.rank] = self.place()

        def ask(rank: int) -> None:
            with contextlib.suppress(OSError, ValueError, LookupError):
                found[rank] = _ask(self._peers[rank], self.rank, ends)

        ranks = [rank for rank in range(len(self._peers)) if rank != self.rank]
        threads = [threading.Thread(target=ask, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        clock = itertools.accumulate(itertools.repeat(TICK / 10), initial=0.0)
        while any(thread.is_alive() for thread in threads) and next(clock) < ASKING:
            threading.Event().wait(TICK / 10)
        return list(found)

    def report(self, places: Sequence[Place | None], ends: bool = True) -> str:
        """What is printed: what this rank waits for, which ranks are missing, and whether it ends."""
        mine = places[self.rank]
        assert mine is not None
        if mine.waits_for is None:
            said = f"rank {self.rank} is outside of a step, after {mine.steps}, and rank {self.asked_by} waits in vain"
        else:
            said = f"rank {self.rank} has waited {mine.seconds:.0f} s in step {mine.steps} for {mine.waits_for}"
        who = self._absent(places) if self._peers else self._unmet()
        if ends:
            return f"{said}; {who}. This rank ends. `timeout` in the plan is {self.timeout:g} s; 0 waits for ever"
        return (
            f"{said}; {who}. In the first step a rank may still load or compile: this one waits on, and ends after "
            f"{FIRST * self.timeout:g} s, {FIRST} times `timeout` in the plan; 0 waits for ever"
        )

    def _absent(self, places: Sequence[Place | None]) -> str:
        """Which ranks are missing, of those that have met."""
        most = max(place.steps for place in places if place)
        absent, waiting = [], []
        for rank, place in enumerate(places):
            if place is None:
                absent.append(f"rank {rank} does not answer: it is stopped, starved, gone, or cut off")
            elif place.waits_for is None:
                absent.append(f"rank {rank} is outside of a step, after {place.steps}")
            elif place.steps < most:
                absent.append(f"rank {rank} is in step {place.steps}, and waits for {place.waits_for}")
            elif rank != self.rank:
                waiting.append(f"rank {rank} waits for {place.waits_for}")
        missing = f"missing: {'; '.join(absent)}" if absent else "no rank is missing"
        return f"{missing} ({'; '.join(waiting)})" if waiting else missing

    def _unmet(self) -> str:
        """Which ranks are missing where they are to meet."""
        come: Sequence[int] = ()
        with contextlib.suppress(RuntimeError):  # torch.distributed's, whose store may be gone
            come = self._come()
        away = "; ".join(f"rank {rank} has not come" for rank in range(self.world) if rank not in come)
        who = f"missing: {away}" if away else "no rank is missing any more"
        if not come:
            who = "which ranks are missing is not known before they have met"
        return f"there {self.world} ranks meet for the first time; {who}; look at every rank's log and stack"


def say(text: str) -> None:
    """Print to where errors go; in one piece, as all ranks may print at once."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"hvdcompress: {text}\n")
        sys.stderr.flush()


# -- the process's thread and socket -----------------------------------------------------------------------


class _Service:
    """The Compressors of this process, the socket that answers for them, and the thread that looks at them."""

    def __init__(self) -> None:
        self.process, self.parent = os.getpid(), os.getppid()
        self.watched: weakref.WeakValueDictionary[int, Watchdog] = weakref.WeakValueDictionary()
        self.secret, self._numbers = secrets.token_hex(16), itertools.count()
        here = any(os.environ.get(local, "-") == os.environ.get(all_) for local, all_ in _SIZES)
        self.server = _Server(("127.0.0.1" if here else "", 0), _Answer)
        self.server.service = self
        hosts = [] if here else _own_addresses()
        self.address = {"hosts": ["127.0.0.1", *hosts], "port": self.server.server_address[1], "secret": self.secret}
        for run in (self.server.serve_forever, self._look):
            threading.Thread(target=run, name="hvdcompress-watchdog", daemon=True).start()

    def watch(self, watchdog: Watchdog) -> dict[str, Any]:
        """Watch a Compressor from now on; returns how other ranks ask for it."""
        number = next(self._numbers)
        self.watched[number] = watchdog
        return {**self.address, "number": number}

    def _look(self) -> None:
        launched = any(all_ in os.environ for _, all_ in _SIZES)
        while True:
            threading.Event().wait(TICK)
            for watchdog in list(self.watched.values()):
                with contextlib.suppress(RuntimeError, LookupError):  # the step moves while it is looked at
                    watchdog.look()
            if launched and self.watched and os.getppid() != self.parent:
                say(f"process {self.parent}, which has launched the ranks, is gone; this rank ends")
                os._exit(1)


_services: list[_Service] = []
_making = threading.Lock()


def _service() -> _Service:
    with _making:
        if not _services or _services[-1].process != os.getpid():  # a fork has the socket, but not the threads
            _services[:] = [_Service()]
        return _services[-1]


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    service: _Service

    def handle_error(self, *_: Any) -> None:
        """A peer that hangs up, or a stranger, is no matter of the program's."""


class _Answer(socketserver.StreamRequestHandler):
    server: _Server
    timeout = ASKING

    def handle(self) -> None:
        """Answer one question: {"number": …, "rank": who asks, "proof": …, "ends": whether this rank is to end}."""
        service, drawn = self.server.service, secrets.token_hex(16)
        self.wfile.write(f"{drawn}\n".encode())
        question = json.loads(self.rfile.readline(LINE))
        if not hmac.compare_digest(str(question["proof"]), _proof(service.secret, drawn)):
            return
        watchdog = service.watched[question["number"]]
        place = watchdog.place()
        if question["ends"]:
            watchdog.asked_by = int(question["rank"])
        self.wfile.write(json.dumps(place).encode() + b"\n")


def _proof(secret: str, drawn: str) -> str:
    return hmac.new(secret.encode(), drawn.encode(), "sha256").hexdigest()


def _ask(address: dict[str, Any], rank: int, ends: bool = True) -> Place:
    """Where the rank of this address is; ``rank`` asks, and ``ends`` it by that.

    Raises:
        OSError, ValueError: it does not answer.
    """
    for host in address["hosts"]:
        with contextlib.suppress(OSError, ValueError), socket.create_connection((host, address["port"]), 1.0) as line:
            line.settimeout(ASKING)
            with line.makefile("rwb") as file:
                drawn = file.readline(LINE).decode().strip()
                proof = _proof(address["secret"], drawn)
                question = {"number": address["number"], "rank": rank, "proof": proof, "ends": ends}
                file.write(json.dumps(question).encode() + b"\n")
                file.flush()
                steps, waits_for, seconds, first = json.loads(file.readline(LINE))
                return Place(steps, waits_for, seconds, first)
    raise ConnectionError("no answer")


def _own_addresses() -> list[str]:
    """This host's addresses in IPv4, as other hosts may reach it."""
    found: dict[str, None] = {}
    with contextlib.suppress(OSError):
        found |= dict.fromkeys(socket.gethostbyname_ex(socket.gethostname())[2])
    if sys.platform == "linux":
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # an interface without an address; SIOCGIFADDR, man 7 netdevice
                    answer = fcntl.ioctl(any_socket, 0x8915, struct.pack("256s", name.encode()[:15]))
                    found[socket.inet_ntoa(answer[20:24])] = None
    return [address for address in found if not address.startswith("127.")]
