"""Watchdog: reports steps that wait too long, and ends the process if waiting is pointless.

Ranks cannot use the training's network to ask each other why a collective does not complete: the collective cannot be
cancelled, and Horovod's controller may itself be blocked inside MPI. Therefore every process runs a small server
(``peers.py``) that reports the progress of its Compressors. If a step makes no progress for ``warn_after`` seconds, the
rank asks all others and logs a warning that names the collective and the missing ranks. After ``end_after`` seconds it
ends the process and asks the other ranks to end, too.

A rank whose process has ended never arrives. A waiting rank therefore asks the others every few seconds, and ends when
a rank refuses the connection twice in a row, provided that it has answered before or is on the same host. A stopped
rank accepts the connection without answering, and a disconnected one cannot be reached. Neither counts as ended,
because both may come back.

The ranks must exchange their endpoints once, in a rendezvous, before they can ask each other. Waiting is counted in
ticks of the watchdog's thread, so the time during which the process itself was stopped does not count.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from typing import NamedTuple

from hvdcompress.engine.safety.peers import LOCALHOST, MESSAGE_TIMEOUT, AnswerServer, Message, query
from hvdcompress.engine.telemetry.log import LOGGER
from hvdcompress.launchers import has_launcher_as_parent, is_elastic
from hvdcompress.plan import Plan

TICK = 0.5  #: seconds between two checks
DEFAULT_TIMEOUT = 1800  #: seconds; the same as PyTorch's process groups
LIVENESS_INTERVAL = 5.0  #: seconds between two checks whether all ranks are alive; more if there are many ranks
MAX_REFUSALS = 2  #: refused connections in a row after which a rank is considered ended
#: seconds between the report and the end of the process: the other ranks may ask it until then
GRACE_PERIOD = MESSAGE_TIMEOUT + 2.0
#: factor of MAX_REFUSALS in the first step: a rank may end properly while another one still compiles
FIRST_STEP_FACTOR = 6


class Progress(NamedTuple):
    """Progress of a rank.

    Attributes:
        steps: number of steps done, including those before a restart from a saved state.
        waits_for: description of what it waits for; None outside of a step.
        seconds: time that it has waited.
        first: whether it has not completed a step yet.
        counts: numbers that change whenever the step makes progress.
    """

    steps: int
    waits_for: str | None
    seconds: float = 0.0
    first: bool = False
    counts: Sequence[float] = ()


class Watchdog:
    """Watches the steps of one Compressor. All watchdogs of a process share one thread.

    Args:
        rank: this rank.
        world_size: number of ranks.
        plan: has the settings ``watchdog``, ``warn_after`` and ``end_after``.
        progress: returns the progress of this rank, or None when the group of ranks no longer exists. The thread calls
            it.

    Attributes:
        on: whether to watch. If False, there is no socket and no thread.
        patience: timeout of the network's own waits in seconds; the default of ``end_after``.
    """

    def __init__(self, rank: int, world_size: int, plan: Plan, progress: Callable[[], Progress | None]):
        self.rank = rank
        self.world_size = world_size
        self.plan = plan
        self.on = plan.watchdog and world_size > 1
        self.patience = float(DEFAULT_TIMEOUT)
        self.over = False  # the group of ranks was replaced; stop watching it
        self.seconds = 0.0  # since the step made progress
        self.asked_by: int | None = None  # a rank that asked this one to end
        self._progress = progress
        self._last: Sequence[float] | None = None  # the counts at the last check
        self._peers: list[Message] = []
        self._endpoint: Message = {}
        self._rendezvous: str | None = None  # description of the rendezvous that this rank waits in
        self._arrived: Callable[[], Sequence[int]] = tuple
        self._liveness_interval = max(LIVENESS_INTERVAL, world_size / 10)
        self._warns_at = self._asks_at = 0.0  # seconds of waiting
        self._asked_once = False  # whether all ranks were asked once, to find out which can be reached
        self._refusals = dict[int, int]()  # {rank that has answered or is on this host: refused connections in a row}

    # -- rendezvous -----------------------------------------------------------------------------------------

    def endpoint(self) -> str:
        """Return this rank's endpoint as JSON, and start watching.

        Pass the endpoints of all ranks to :meth:`set_peers`.
        """
        if self.on and not self._endpoint:
            self._endpoint = _get_service().watch(self)
        return json.dumps(self._endpoint)

    @contextlib.contextmanager
    def rendezvous(self, what: str, arrived: Callable[[], Sequence[int]] = tuple) -> Iterator[None]:
        """Context manager for a rendezvous: this rank waits for all others, outside of a step.

        Args:
            what: description of what it waits for.
            arrived: returns the ranks that have arrived, if the network knows them. The thread calls it.
        """
        self.endpoint()
        self._rendezvous = what
        self._arrived = arrived
        try:
            yield
        finally:
            self._rendezvous = None

    def set_peers(self, endpoints: Sequence[str]) -> None:
        """Set the endpoints of all ranks, in rank order. From then on the ranks can ask each other."""
        self._peers = [json.loads(endpoint) for endpoint in endpoints]
        self._asked_once = False
        if self.on:
            _get_service().wake.set()

    # -- in the thread --------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """Return the progress of this rank.

        Raises:
            LookupError: the group of ranks no longer exists.
        """
        progress = None if self.over else self._progress()
        if progress is None:
            self.over = True
            raise LookupError("the group of ranks no longer exists")
        return progress._replace(waits_for=self._rendezvous or progress.waits_for, seconds=self.seconds)

    def check(self) -> None:
        """Check the step once per tick: warn, or end the process, if it has waited too long.

        Raises:
            LookupError: the group of ranks no longer exists.
        """
        progress = self.progress()
        if progress.waits_for is None or progress.counts != self._last:
            self.seconds = 0.0
            self._warns_at = self.plan.warn_after
            self._asks_at = self._liveness_interval
        else:
            self.seconds += TICK
        self._last = progress.counts
        limit = self.patience if self.plan.end_after is None else self.plan.end_after
        if reason := self._reason_to_end(progress, limit):
            print_error(f"{self.report(self.all_progress(ends=True))}. This rank ends: {reason}")
            threading.Event().wait(GRACE_PERIOD)
            os._exit(1)
        if 0 < self._warns_at <= self.seconds:
            self._warns_at = 2 * self.seconds
            until = f"until {limit:g} s (`end_after` in the plan), then it ends" if limit else "forever"
            LOGGER.warning("%s. This rank continues to wait %s", self.report(self.all_progress()), until)

    def _reason_to_end(self, progress: Progress, limit: float) -> str:
        """Return why this rank must end; empty if it need not."""
        if self._has_lost_ranks(progress):
            return "the step cannot complete without them"
        if self.asked_by is not None:
            return f"rank {self.asked_by} has asked all ranks to end"
        return f"`end_after` in the plan is {limit:g} s; 0 waits forever" if 0 < limit <= self.seconds else ""

    def _has_lost_ranks(self, progress: Progress) -> bool:
        """Ask from time to time whether all ranks are alive. Return whether some have ended."""
        # An elastic launcher replaces ended ranks, so there an ended rank is no reason to end
        if not self._peers or is_elastic() or (self._asked_once and self.seconds < self._asks_at):
            return False
        self._asked_once = True
        began = time.monotonic()
        self.all_progress()
        self.seconds += min(time.monotonic() - began, MESSAGE_TIMEOUT) if progress.waits_for else 0.0
        self._asks_at = self.seconds + self._liveness_interval
        most = MAX_REFUSALS * (FIRST_STEP_FACTOR if progress.first else 1)
        return any(refusals >= most for refusals in self._refusals.values())

    def all_progress(self, ends: bool = False) -> list[Progress | None]:
        """Ask all ranks for their progress, in parallel.

        Args:
            ends: whether to ask them to end, too.

        Returns:
            The progress of each rank; None for a rank that does not answer.
        """
        with ThreadPool(self.world_size) as pool:  # unlike those of an executor, its threads do not delay the exit
            return pool.map(lambda rank: self._ask(rank, ends), range(self.world_size))

    def _ask(self, rank: int, ends: bool) -> Progress | None:
        if rank == self.rank:
            return self.progress()
        if not self._peers:
            return None
        endpoint = self._peers[rank]
        try:
            progress = Progress(*query(endpoint, {"number": endpoint["number"], "rank": self.rank, "ends": ends}))
        # TypeError: a malformed answer. LookupError: the endpoint of a rank without a watchdog
        except (ConnectionError, TypeError, LookupError) as error:
            if rank in self._refusals or endpoint.get("host") == LOCALHOST:
                refused = isinstance(error, ConnectionRefusedError)
                self._refusals[rank] = self._refusals.get(rank, 0) + 1 if refused else 0
            return None
        self._refusals[rank] = 0
        return progress

    def report(self, everyone: Sequence[Progress | None]) -> str:
        """Describe what this rank waits for and which ranks are missing."""
        mine = everyone[self.rank]
        assert mine is not None
        if mine.waits_for is None:
            text = f"rank {self.rank} is outside of a step, after {mine.steps} steps, while rank {self.asked_by} waits"
        else:
            text = f"rank {self.rank} has waited {mine.seconds:.0f} s in step {mine.steps} for {mine.waits_for}"
        return f"{text}; {self._describe_missing(everyone) if self._peers else self._describe_rendezvous()}"

    def _describe_missing(self, everyone: Sequence[Progress | None]) -> str:
        """Describe which ranks are missing, after the rendezvous."""
        most = max(each.steps for each in everyone if each)
        absent = []
        waiting = []
        for rank, progress in enumerate(everyone):
            endpoint = self._peers[rank]
            on_this_host = endpoint.get("host", LOCALHOST) == LOCALHOST
            who = f"rank {rank}" if on_this_host else f"rank {rank} on {endpoint['name']} ({endpoint['host']})"
            if progress is None and self._refusals.get(rank):
                absent.append(f"{who} has ended")
            elif progress is None:
                absent.append(f"{who} does not answer: it is stopped, overloaded or disconnected, or its host is down")
            elif progress.waits_for is None:
                absent.append(f"{who} is outside of a step, after {progress.steps} steps")
            elif progress.steps < most:
                absent.append(f"{who} is in step {progress.steps} and waits for {progress.waits_for}")
            elif rank != self.rank:
                waiting.append(f"rank {rank} waits for {progress.waits_for}")
        missing = f"missing: {'; '.join(absent)}" if absent else "no rank is missing"
        return f"{missing} ({'; '.join(waiting)})" if waiting else missing

    def _describe_rendezvous(self) -> str:
        """Describe which ranks are missing in the rendezvous."""
        arrived: Sequence[int] = ()
        with contextlib.suppress(RuntimeError):  # the store of torch.distributed may be gone
            arrived = self._arrived()
        away = "; ".join(f"rank {rank} has not arrived" for rank in range(self.world_size) if rank not in arrived)
        who = f"missing: {away}" if away else "no rank is missing any more"
        if not arrived:
            who = "which ranks are missing is unknown before they have connected"
        return (
            f"the {self.world_size} ranks connect here for the first time; {who}; check the log and stack of every rank"
        )


def print_error(text: str) -> None:
    """Write a line to stderr in one call, whatever the program does with logs: all ranks may write at once."""
    with contextlib.suppress(OSError, ValueError):
        print(f"hvdcompress: {text}\n", end="", file=sys.stderr, flush=True)


class _Service:
    """The watchdogs of this process, the server that answers for them, and the thread that runs them."""

    def __init__(self) -> None:
        self.parent = os.getppid()
        self.watched: weakref.WeakValueDictionary[int, Watchdog] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self.wake = threading.Event()  # set to check before the next tick
        self.server = AnswerServer(self.answer)
        # Close the socket at exit: Python's threads end before MPI_Finalize waits for the other ranks, whose questions
        # would otherwise be neither answered nor refused
        atexit.register(self.server.close)
        # A forked child has the socket, but not the threads
        os.register_at_fork(after_in_child=self.server.socket.close)
        os.register_at_fork(after_in_child=_get_service.cache_clear)
        threading.Thread(target=self._run, name="hvdcompress-watchdog", daemon=True).start()

    def watch(self, watchdog: Watchdog) -> Message:
        """Start watching a Compressor, and return the endpoint at which other ranks can ask for it."""
        number = next(self._numbers)
        self.watched[number] = watchdog
        return {**self.server.endpoint, "number": number}

    def answer(self, question: Message) -> Progress:
        """Return the progress of a Compressor.

        Args:
            question: "number" of the Compressor, "rank" that asks, and "ends": whether this rank should end.

        Raises:
            LookupError: there is no such Compressor, or its group of ranks no longer exists.
        """
        watchdog = self.watched[question["number"]]
        progress = watchdog.progress()
        if question["ends"]:
            watchdog.asked_by = int(question["rank"])
        return progress

    def _run(self) -> None:
        launched = has_launcher_as_parent()
        while True:
            self.wake.wait(TICK)
            self.wake.clear()
            for watchdog in list(self.watched.values()):
                # The group of ranks no longer exists, or the step's containers change during the check
                with contextlib.suppress(RuntimeError, LookupError):
                    watchdog.check()
            if launched and self.watched and os.getppid() != self.parent:
                print_error(f"the launcher (process {self.parent}) is gone; this rank ends")
                os._exit(1)


@functools.cache
def _get_service() -> _Service:
    return _Service()
