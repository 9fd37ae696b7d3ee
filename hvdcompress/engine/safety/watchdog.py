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
from hvdcompress.launchers import has_launcher_as_parent

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
    """

    steps: int
    waits_for: str | None
    seconds: float = 0.0
    first: bool = False


class Limits(NamedTuple):
    """Settings of a watchdog.

    Attributes:
        on: whether to watch. If False, there is no socket and no thread.
        warn_after: seconds without progress after which it logs a warning, and again whenever the time has doubled; 0:
            never.
        end_after: seconds without progress after which the process ends; 0: never; None: ``Watchdog.patience``.
        elastic: whether the launcher replaces ended ranks, so that an ended rank is no reason to end.
    """

    on: bool = True
    warn_after: float = 120
    end_after: float | None = None
    elastic: bool = False


class Watchdog:
    """Watches the steps of one Compressor. All watchdogs of a process share one thread.

    Args:
        rank: this rank.
        world_size: number of ranks.
        progress: returns the progress of this rank, or None when the group of ranks no longer exists. The thread calls
            it.
        pulse: returns a value that changes whenever the step makes progress. The thread calls it.
        limits: the settings.

    Attributes:
        patience: timeout of the network's own waits in seconds; the default of ``end_after``.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        progress: Callable[[], Progress | None],
        pulse: Callable[[], Any],
        limits: Limits = Limits(),  # noqa: B008  (it is a value)
    ):
        self.rank = rank
        self.world_size = world_size
        self.on = limits.on and world_size > 1
        self.warn_after = limits.warn_after
        self.end_after = limits.end_after
        self.elastic = limits.elastic
        self.patience = float(DEFAULT_TIMEOUT)
        self.over = False  # the group of ranks was replaced; stop watching it
        self.seconds = 0.0  # since the step made progress
        self.asked_by: int | None = None  # a rank that asked this one to end
        self._progress = progress
        self._pulse = pulse
        self._last = object()
        self._peers: list[Message] = []
        self._endpoint: Message = {}
        self._rendezvous: str | None = None  # description of the rendezvous that this rank waits in
        self._arrived: Callable[[], Sequence[int]] = tuple
        self._warns_at = self._asks_at = 0.0  # seconds of waiting
        self._asked_once = False  # whether all ranks were asked once, to find out which can be reached
        self._answered: set[int] = set()  # ranks that have answered at least once
        self._refusals = dict[int, int]()  # {rank: refused connections in a row}

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
        if self.over or (progress := self._now()) is None:
            raise LookupError("the group of ranks no longer exists")
        return progress._replace(seconds=self.seconds)

    def _now(self) -> Progress | None:
        progress = self._progress()
        return progress._replace(waits_for=self._rendezvous) if progress and self._rendezvous else progress

    def check(self) -> None:
        """Check the step once per tick: warn, or end the process, if it has waited too long."""
        progress = self._now()
        pulse = self._pulse()
        self.over = self.over or progress is None
        if self.over or progress is None:
            return
        if progress.waits_for is None or pulse != self._last:
            self.seconds = 0.0
            self._warns_at = self.warn_after
            self._asks_at = self._liveness_interval
        else:
            self.seconds += TICK
        self._last = pulse
        ended = self._ended(progress)
        limit = self.patience if self.end_after is None else self.end_after
        if ended or self.asked_by is not None or 0 < limit <= self.seconds:
            text = self.report(self.all_progress(ends=True))
            print_error(f"{text}. This rank ends: {self._why(ended, limit)}")
            threading.Event().wait(GRACE_PERIOD)
            os._exit(1)
        if 0 < self._warns_at <= self.seconds:
            self._warns_at = 2 * self.seconds
            until = f"until {limit:g} s (`end_after` in the plan), then it ends" if limit else "forever"
            LOGGER.warning("%s. This rank continues to wait %s", self.report(self.all_progress()), until)

    @property
    def _liveness_interval(self) -> float:
        return max(LIVENESS_INTERVAL, self.world_size / 10)

    def _ended(self, progress: Progress) -> list[int]:
        """Ask from time to time whether all ranks are alive. Return the ranks that have ended."""
        if not self._peers or self.elastic or (self._asked_once and self.seconds < self._asks_at):
            return []
        self._asked_once = True
        began = time.monotonic()
        self.all_progress()
        self.seconds += min(time.monotonic() - began, MESSAGE_TIMEOUT) if progress.waits_for else 0.0
        self._asks_at = self.seconds + self._liveness_interval
        most = MAX_REFUSALS * (FIRST_STEP_FACTOR if progress.first else 1)
        return [rank for rank, refusals in sorted(self._refusals.items()) if refusals >= most]

    def all_progress(self, ends: bool = False) -> list[Progress | None]:
        """Ask all ranks for their progress, in parallel.

        Args:
            ends: whether to ask them to end, too.

        Returns:
            The progress of each rank; None for a rank that does not answer.
        """
        found: list[Progress | None] = [None] * self.world_size
        found[self.rank] = self.progress()

        def find(rank: int) -> None:
            endpoint = self._peers[rank]
            question = {"number": endpoint.get("number"), "rank": self.rank, "ends": ends}
            try:
                found[rank] = Progress(*query(endpoint, question))
            except Unreachable as error:
                if rank in self._answered or endpoint["host"] == LOCALHOST:
                    self._refusals[rank] = self._refusals.get(rank, 0) + 1 if error.refused else 0
            except (TypeError, LookupError):  # an endpoint of a rank without a watchdog, or a malformed answer
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
        """Describe what this rank waits for and which ranks are missing."""
        mine = everyone[self.rank]
        assert mine is not None
        if mine.waits_for is None:
            text = f"rank {self.rank} is outside of a step, after {mine.steps} steps, while rank {self.asked_by} waits"
        else:
            text = f"rank {self.rank} has waited {mine.seconds:.0f} s in step {mine.steps} for {mine.waits_for}"
        return f"{text}; {self._describe_missing(everyone) if self._peers else self._describe_rendezvous()}"

    def _why(self, ended: Sequence[int], limit: float) -> str:
        if ended:
            return "the step cannot complete without them"
        if self.asked_by is not None:
            return f"rank {self.asked_by} has asked all ranks to end"
        return f"`end_after` in the plan is {limit:g} s; 0 waits forever"

    def _describe_missing(self, everyone: Sequence[Progress | None]) -> str:
        """Describe which ranks are missing, after the rendezvous."""
        most = max(each.steps for each in everyone if each)
        absent = []
        waiting = []
        for rank, progress in enumerate(everyone):
            who = f"rank {rank}{self._place(rank)}"
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

    def _place(self, rank: int) -> str:
        """Return the host of a rank in words; nothing if all ranks are on this host."""
        endpoint = self._peers[rank]
        return "" if endpoint.get("host", LOCALHOST) == LOCALHOST else f" on {endpoint['name']} ({endpoint['host']})"

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
        sys.stderr.write(f"hvdcompress: {text}\n")
        sys.stderr.flush()


class _Service:
    """The watchdogs of this process, the server that answers for them, and the thread that runs them."""

    def __init__(self) -> None:
        self.parent = os.getppid()
        self.watched: weakref.WeakValueDictionary[int, Watchdog] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self.wake = threading.Event()  # set to check before the next tick
        self.server = AnswerServer(self.answer)
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
                with contextlib.suppress(RuntimeError, LookupError):  # the step's containers change during the check
                    watchdog.check()
            if launched and self.watched and os.getppid() != self.parent:
                print_error(f"the launcher (process {self.parent}) is gone; this rank ends")
                os._exit(1)


_services: list[_Service] = []
_making = threading.Lock()


def _get_service() -> _Service:
    with _making:
        if not _services:
            _services.append(_Service())
            # Close the socket at exit: Python's threads end before MPI_Finalize waits for the other ranks, whose
            # questions would otherwise be neither answered nor refused
            atexit.register(_services[-1].server.close)
            os.register_at_fork(after_in_child=_close_in_child)
        return _services[-1]


def _close_in_child() -> None:
    """Reset the module in a forked child, which has the socket but not the threads."""
    for service in _services:
        service.server.close_in_child()
    _services.clear()
