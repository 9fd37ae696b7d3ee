"""A watchdog: a step that waits too long says what for and for whom, and ends where that is in vain.

Ranks cannot ask each other by the network that they wait in: a collective that is under way cannot be taken back, and
Horovod's controller itself may sit in MPI, waiting for a rank that is stopped. So a process answers on a socket of its
own (``peers.py``), where each of its Compressors is. One whose step has not moved for ``warn_after`` seconds asks all
ranks, and logs a warning with what it waits for and which ranks are missing. After ``end_after`` it ends the process,
and so does every rank that it asks.

A rank whose process is no more never comes. Who waits asks now and then, and ends when a rank that has answered before,
or is on this host, refuses the connection twice. A rank that is stopped, or cut off, does not refuse: it may come back.

Before that, ranks must meet once, to tell each other where to ask. Time is counted in ticks: a process that was itself
stopped has not waited.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from hvdcompress.engine.safety.peers import LOCALHOST, MESSAGE_TIMEOUT, AnswerServer, Message, Unreachable, query
from hvdcompress.engine.telemetry.log import LOGGER

TICK = 0.5  #: seconds between two looks
DEFAULT_TIMEOUT = 1800  #: seconds; PyTorch's process groups wait as long
LIVENESS_INTERVAL = (
    5.0  #: seconds from one question, whether all ranks are alive, to the next; more where there are many
)
MAX_REFUSALS = 2  #: one after another, and a rank that had answered is no more
GRACE_PERIOD = MESSAGE_TIMEOUT + 2.0  #: seconds in which the others ask, too: ranks that have ended do not answer
FIRST_STEP_FACTOR = 6  #: times as many in the first step, which a rank may end for good while another still compiles
#: variables of launchers: a process that has one of them was started by a launcher
LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "HOROVOD_RANK")


class Progress(NamedTuple):
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


class Limits(NamedTuple):
    """What a watchdog does, and when.

    Attributes:
        on: whether to watch; without it there is no socket and no thread.
        warn_after: seconds after which a step that does not move is logged, and again when they have doubled; 0: never.
        end_after: seconds after which the process ends; 0: never; None: ``Watchdog.patience``.
        elastic: whether the launcher replaces ranks that have ended.
    """

    on: bool = True
    warn_after: float = 120
    end_after: float | None = None
    elastic: bool = False


class Watchdog:
    """Watches the steps of one Compressor, from a thread that all of a process share.

    Args:
        rank, world: this rank, and their number.
        progress: returns where the rank is, or None once its ranks are no more; called by the thread.
        pulse: returns a value that changes whenever the step makes progress; called by the thread.
        limits: what it does, and when.

    Attributes:
        patience: seconds that the network's own waits may take.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        progress: Callable[[], Progress | None],
        pulse: Callable[[], Any],
        limits: Limits = Limits(),  # noqa: B008  (it is a value)
    ):
        self.rank = rank
        self.world = world
        self.on = limits.on and world > 1
        self.warn_after = limits.warn_after
        self.end_after = limits.end_after
        self.elastic = limits.elastic
        self.patience = float(DEFAULT_TIMEOUT)
        self.over = False  # its ranks are no more: whatever comes after them is not its to watch
        self.seconds = 0.0  # since the step moved
        self.asked_by: int | None = None  # a rank that has waited too long
        self._progress = progress
        self._pulse = pulse
        self._last = object()
        self._peers: list[Message] = []
        self._endpoint: Message = {}
        self._meets: str | None = None  # what this rank waits for in a meeting
        self._come: Callable[[], Sequence[int]] = tuple
        self._warns_at = self._asks_at = 0.0  # seconds of waiting
        self._greeted = False  # all ranks have been asked once, to see who can be reached
        self._answered: set[int] = set()  # ranks that can be reached
        self._refusals = dict[int, int]()  # of those, one after another

    # -- ranks meet -----------------------------------------------------------------------------------------

    def endpoint(self) -> str:
        """How others ask this one, in JSON; every rank gives all of them to :meth:`meet`. It watches from now on."""
        if self.on and not self._endpoint:
            self._endpoint = _get_service().watch(self)
        return json.dumps(self._endpoint)

    @contextlib.contextmanager
    def rendezvous(self, what: str, come: Callable[[], Sequence[int]] = tuple) -> Iterator[None]:
        """Inside, outside of any step, this rank waits for all others to come.

        Args:
            what: what it waits for, in words.
            come: returns the ranks that have come, where that can be known; called by the thread.
        """
        self.endpoint()
        self._meets = what
        self._come = come
        try:
            yield
        finally:
            self._meets = None

    def set_peers(self, addresses: Sequence[str]) -> None:
        """From now on the ranks can ask each other; ``addresses``: every rank's, in rank order."""
        self._peers = [json.loads(address) for address in addresses]
        self._greeted = False
        if self.on:
            _get_service().wake.set()

    # -- in the thread --------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """Where this rank is.

        Raises:
            LookupError: its ranks are no more.
        """
        if self.over or (progress := self._now()) is None:
            raise LookupError("its ranks are no more")
        return progress._replace(seconds=self.seconds)

    def _now(self) -> Progress | None:
        progress = self._progress()
        return progress._replace(waits_for=self._meets) if progress and self._meets else progress

    def check(self) -> None:
        """At each tick: has the step moved? Ends the process if it has waited too long, or others have, or in vain."""
        progress = self._now()
        pulse = self._pulse()
        self.over = self.over or progress is None
        if self.over or progress is None:
            return
        if progress.waits_for is None or pulse != self._last:
            self.seconds = 0.0
            self._warns_at = self.warn_after
            self._asks_at = self._pause
        else:
            self.seconds += TICK
        self._last = pulse
        gone = self._gone(progress)
        limit = self.patience if self.end_after is None else self.end_after
        if gone or self.asked_by is not None or 0 < limit <= self.seconds:
            said = self.report(self.all_progress(ends=True))
            print_error(f"{said}. This rank ends: {self._why(gone, limit)}")
            threading.Event().wait(GRACE_PERIOD)
            os._exit(1)
        if 0 < self._warns_at <= self.seconds:
            self._warns_at = 2 * self.seconds
            until = f"and ends after {limit:g} s (`end_after` in the plan)" if limit else "for ever"
            LOGGER.warning("%s. This rank waits on, %s", self.report(self.all_progress()), until)

    @property
    def _pause(self) -> float:
        return max(LIVENESS_INTERVAL, self.world / 10)

    def _gone(self, progress: Progress) -> list[int]:
        """Ask now and then, in a step, whether all ranks are alive; returns those that are no more."""
        if not self._peers or self.elastic or (self._greeted and self.seconds < self._asks_at):
            return []
        self._greeted = True
        began = time.monotonic()
        self.all_progress()
        self.seconds += min(time.monotonic() - began, MESSAGE_TIMEOUT) if progress.waits_for else 0.0
        self._asks_at = self.seconds + self._pause
        most = MAX_REFUSALS * (FIRST_STEP_FACTOR if progress.first else 1)
        return [rank for rank, refusals in sorted(self._refusals.items()) if refusals >= most]

    def all_progress(self, ends: bool = False) -> list[Progress | None]:
        """Every rank's progress, None of one that does not answer; asks all at once. ``ends``: and they, too, end."""
        found: list[Progress | None] = [None] * self.world
        found[self.rank] = self.progress()

        def find(rank: int) -> None:
            address = self._peers[rank]
            question = {"number": address.get("number"), "rank": self.rank, "ends": ends}
            try:
                found[rank] = Progress(*query(address, question))
            except Unreachable as error:
                if rank in self._answered or address["host"] == LOCALHOST:
                    self._refusals[rank] = self._refusals.get(rank, 0) + 1 if error.refused else 0
            except (TypeError, LookupError):  # an address of another sort, or no progress
                pass
            else:
                self._answered.add(rank)
                self._refusals.pop(rank, None)

        ranks = [rank for rank in range(len(self._peers)) if rank != self.rank]
        threads = [threading.Thread(target=find, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return list(found)

    def report(self, everyone: Sequence[Progress | None]) -> str:
        """What this rank waits for, and which ranks are missing."""
        mine = everyone[self.rank]
        assert mine is not None
        if mine.waits_for is None:
            said = f"rank {self.rank} is outside of a step, after {mine.steps}, and rank {self.asked_by} waits in vain"
        else:
            said = f"rank {self.rank} has waited {mine.seconds:.0f} s in step {mine.steps} for {mine.waits_for}"
        return f"{said}; {self._absent(everyone) if self._peers else self._unmet()}"

    def _why(self, gone: Sequence[int], limit: float) -> str:
        if gone:
            return "the step cannot be done without them"
        if self.asked_by is not None:
            return f"rank {self.asked_by} has asked all to end"
        return f"`end_after` in the plan is {limit:g} s; 0 waits for ever"

    def _absent(self, everyone: Sequence[Progress | None]) -> str:
        """Which ranks are missing, of those that have met."""
        most = max(each.steps for each in everyone if each)
        absent = []
        waiting = []
        for rank, progress in enumerate(everyone):
            if progress is None and self._refusals.get(rank):
                absent.append(f"rank {rank} has ended")
            elif progress is None:
                absent.append(f"rank {rank} does not answer: it is stopped, starved, gone, or cut off")
            elif progress.waits_for is None:
                absent.append(f"rank {rank} is outside of a step, after {progress.steps}")
            elif progress.steps < most:
                absent.append(f"rank {rank} is in step {progress.steps}, and waits for {progress.waits_for}")
            elif rank != self.rank:
                waiting.append(f"rank {rank} waits for {progress.waits_for}")
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


def print_error(text: str) -> None:
    """Print to where errors go, whatever the program logs; in one piece, as all ranks may print at once."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"hvdcompress: {text}\n")
        sys.stderr.flush()


class _Service:
    """The Compressors of this process, the socket that answers for them, and the thread that looks at them."""

    def __init__(self) -> None:
        self.parent = os.getppid()
        self.watched: weakref.WeakValueDictionary[int, Watchdog] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self.wake = threading.Event()  # to look before the next tick
        self.answering = AnswerServer(self.answer)
        threading.Thread(target=self._look, name="hvdcompress-watchdog", daemon=True).start()

    def watch(self, watchdog: Watchdog) -> Message:
        """Watch a Compressor from now on; returns how other ranks ask for it."""
        number = next(self._numbers)
        self.watched[number] = watchdog
        return {**self.answering.endpoint, "number": number}

    def answer(self, question: Message) -> Progress:
        """Say where a Compressor is.

        Args:
            question: "number" of the Compressor, "rank" that asks, and "ends": whether this one is to end.

        Raises:
            LookupError: there is none, or its ranks are no more.
        """
        watchdog = self.watched[question["number"]]
        progress = watchdog.progress()
        if question["ends"]:
            watchdog.asked_by = int(question["rank"])
        return progress

    def _look(self) -> None:
        launched = any(name in os.environ for name in LAUNCHER_VARIABLES)
        while True:
            self.wake.wait(TICK)
            self.wake.clear()
            for watchdog in list(self.watched.values()):
                with contextlib.suppress(RuntimeError, LookupError):  # the step moves while it is looked at
                    watchdog.check()
            if launched and self.watched and os.getppid() != self.parent:
                print_error(f"process {self.parent}, which has launched the ranks, is gone; this rank ends")
                os._exit(1)


_services: list[_Service] = []
_making = threading.Lock()


def _get_service() -> _Service:
    with _making:
        if not _services:
            _services.append(_Service())
            # threads of Python's end before MPI waits for the other ranks: nobody would answer, or refuse
            atexit.register(_services[-1].answering.close)
            os.register_at_fork(after_in_child=_close_in_child)
        return _services[-1]


def _close_in_child() -> None:
    """In a fork, which has the socket, but not the threads."""
    for service in _services:
        service.answering.close_in_child()
    _services.clear()
