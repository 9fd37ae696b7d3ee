"""torch.distributed's collectives, as the engine asks for them, and the alarm by which a rank that fails frees others.

A process group's collectives go by order (``engine/safety/alarm.py``). An alarm is a key in the group's store, at
which a rank looks while it waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hvdcompress.engine.agreement import PeerError, peer_error
from hvdcompress.engine.safety.alarm import Alarm, Call, missing_calls
from hvdcompress.engine.safety.watchdog import Watchdog
from hvdcompress.engine.transport import Request
from hvdcompress.method import Array
from hvdcompress.ops.vectors import dtype_name

PAUSE = 1e-4
LONGEST_PAUSE = 2e-3  #: seconds between two looks at what has come, at first and at most
LATER = 0.05  #: of the time waited so far, by which a look may be late: each takes time that others compute in
LISTEN = 0.02  #: seconds between two looks for an alarm, each of which asks the store's server

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name before PyTorch 2.13


class PeerLost(PeerError):
    """The process group has failed: a rank is gone, or did not come in time. The group cannot be used any more."""


@dataclass(eq=False)
class Handle:
    """A collective under way.

    Attributes:
        works: torch's handles; none where there is nothing to send.
        out: where its result goes.
        payload: what is sent, which must live as long.
        numpy: whether the result is wanted as a numpy array.
    """

    works: list[Any]
    out: torch.Tensor
    payload: torch.Tensor
    numpy: bool


class ProcessGroupTransport:
    """Collectives over a process group of our own, so that they keep apart from those of DDP and of the program.

    Arrays in host memory go over gloo. Tensors on a GPU stay there, and go over NCCL.

    Args:
        parent: the group whose ranks take part. Making the new one is collective.
        device: where gradients are.
    """

    ordered = True
    native_broadcast = False
    variable_lengths = False

    def __init__(self, parent: Any, device: torch.device):
        theirs = parent._get_backend(device)  # dist.get_backend() may name several: "cpu:gloo,cuda:nccl"
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{theirs.name()}"
        # PyTorch would give it half an hour, whatever the program asked for
        self.timeout: timedelta = theirs.options._timeout
        ranks = dist.get_process_group_ranks(parent)
        some = len(ranks) < dist.get_world_size()  # then the others do not take part in making it
        self.group = dist.new_group(ranks, self.timeout, backend, use_local_synchronization=some)
        self._freed = weakref.finalize(self, _free, self.group, os.getpid())  # with the model, if nobody calls close()
        self._freed.atexit = False
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.step = 0  # the number of this step, the same on all ranks
        self._store = dist.distributed_c10d._get_process_group_store(self.group)
        self._calls: list[Call] = []  # of this step
        self._running: list[Handle] = []

    def close(self) -> None:
        """Give the group back. Nothing may be under way."""
        self._freed()

    def begin(self) -> None:
        """A step begins: nothing is left of the last one, however it ended."""
        self.step += 1
        self._calls.clear()
        self._running.clear()

    # -- collectives ----------------------------------------------------------------------------------------

    def start(self, name: str, request: Request) -> Handle:
        """Begin a collective; returns at once."""
        is_numpy = not isinstance(request.payload, torch.Tensor)
        payload = torch.from_numpy(np.ascontiguousarray(request.payload)) if is_numpy else request.payload.contiguous()
        dtype = dtype_name(payload)
        call = Call(
            request.kind,
            dtype,
            len(payload),
            request.op,
            request.send_lengths,
            request.recv_lengths,
            payload.device.type,
        )
        return self._begin(call, payload, request.may_overwrite, is_numpy)

    def ready(self, handle: Handle) -> bool:
        """Whether :meth:`wait` would return at once."""
        return all(work.is_completed() for work in handle.works)

    def wait(self, handle: Handle) -> Array:
        """The result.

        Raises:
            Alarm: a rank has failed in this step.
            PeerLost: the group has failed.
        """
        began = listened = time.monotonic()
        while not self.ready(handle):
            now = time.monotonic()
            if now - listened > LISTEN:
                if self._store.check([f"alarm.{self.step}"]):
                    raise Alarm
                listened = now
            time.sleep(min(max(LATER * (now - began), PAUSE), LONGEST_PAUSE))
        self._end(handle)
        return handle.out.numpy() if handle.numpy else handle.out

    def idle(self, handle: Handle) -> None:
        """Wait for a moment."""
        time.sleep(PAUSE)

    def _begin(self, call: Call, payload: torch.Tensor, may_overwrite: bool = False, is_numpy: bool = False) -> Handle:
        """Call torch.distributed, and note what was called."""
        try:
            works, out = self._called(call, payload, may_overwrite)
        except RuntimeError as error:
            raise self._lost(error) from error
        self._calls.append(call)
        self._running.append(Handle(works, out, payload, is_numpy))
        return self._running[-1]

    def _called(self, call: Call, payload: torch.Tensor, may_overwrite: bool) -> tuple[list[Any], torch.Tensor]:
        asynchronous: dict[str, Any] = {"group": self.group, "async_op": True}
        if call.kind == "all_reduce":
            out = payload if may_overwrite else payload.clone()
            return ([dist.all_reduce(out, OPS[call.op], **asynchronous)] if len(out) else []), out
        recv_lengths = list(call.recv_lengths or ())
        out = payload.new_empty(sum(recv_lengths))
        if call.kind == "all_to_all":
            send_lengths = list(call.send_lengths or ())
            return [dist.all_to_all_single(out, payload, recv_lengths, send_lengths, **asynchronous)], out
        if len(set(recv_lengths)) == 1:
            return ([_all_gather(out, payload, **asynchronous)] if len(out) else []), out
        # gloo gathers equal lengths alone: each rank broadcasts its payload, as padding would cost bytes
        pieces = list(out.split(recv_lengths))
        pieces[self.rank].copy_(payload)
        ranks = dist.get_process_group_ranks(self.group)
        works = [
            dist.broadcast(piece, src, **asynchronous) for src, piece in zip(ranks, pieces, strict=True) if len(piece)
        ]
        return works, out

    def _end(self, handle: Handle) -> None:
        try:
            for work in handle.works:
                work.wait()  # of a GPU's: the stream waits
        except RuntimeError as error:
            raise self._lost(error) from error
        self._running.remove(handle)

    def _lost(self, error: Exception) -> PeerLost:
        return PeerLost(f"the process group has failed on rank {self.rank}; is a rank gone? {error}")

    # -- failure --------------------------------------------------------------------------------------------

    def fail(self, error: Exception | None) -> Exception:
        """End the step on all ranks, one of which has failed; see ``engine/safety/alarm.py``."""
        if error is not None:
            self._store.set(f"alarm.{self.step}", "")
        text = "" if error is None else str(error) or type(error).__name__
        try:
            texts, calls = zip(*self._tell_all(text), strict=True)
            for call in missing_calls(calls, self.rank):
                self._begin(call, torch.zeros(call.size, dtype=getattr(torch, call.dtype), device=call.device))
            for handle in list(self._running):
                self._end(handle)
        except PeerLost as lost:
            return lost
        return peer_error(texts)

    def _tell_all(self, text: str) -> list[tuple[str, list[Call]]]:
        """Every rank's text and what it has begun, by the store."""
        keys = [f"end.{self.step}.{rank}" for rank in range(self.world)]
        try:
            told = tell_all(self._store, keys, self.rank, json.dumps([text, self._calls]), self.timeout)
        except TimeoutError as error:
            raise self._lost(error) from error
        everyone = map(json.loads, told)
        return [(text, [Call(*map(_plain, call)) for call in calls]) for text, calls in everyone]


_meetings: Counter[str] = Counter()  # of a group's ranks, by the group's name: keys in its store are named by it


class _Gone:
    """Stands for a group that is gone among those of PyTorch.

    PyTorch derives a new group's name from the number of groups. Ranks free theirs at different moments, and would have
    different names; and a name that comes again would find the addresses of the group that is gone.
    """

    def shutdown(self) -> None:
        """Do nothing: the program frees all groups."""

    abort = shutdown


_of_parents: list[Any] = []  #: in a fork, groups that are kept, as they cannot be freed there


def _free(group: Any, process: int) -> None:
    """Free a group's sockets and threads, if the program has not done that to all groups."""
    if os.getpid() != process:  # a fork, as a DataLoader's worker: it has no threads, which the group would wait for
        _of_parents.append(group)
        return
    names = dist.distributed_c10d._world.pg_names
    with contextlib.suppress(ValueError, AssertionError, RuntimeError):
        name = names.get(group)
        dist.destroy_process_group(group)
        if name is not None:
            names[_Gone()] = name  # type: ignore[index]


def joined(parent: Any, device: torch.device, watchdog: Watchdog) -> ProcessGroupTransport:
    """The transport of a new group, once all ranks of ``parent`` have come and told their watchdogs' addresses.

    That goes by the parent's store: there, unlike in PyTorch's own wait for a group, one can see who has come.

    Raises:
        PeerLost: a rank has not come within the group's timeout.
    """
    store = dist.distributed_c10d._get_process_group_store(parent)
    name = parent.group_name
    rank = dist.get_rank(parent)
    keys = [f"hvdcompress.meeting{_meetings[name]}.{each}" for each in range(dist.get_world_size(parent))]
    _meetings[name] += 1

    def come() -> list[int]:
        return [each for each, key in enumerate(keys) if store.check([key])]

    with watchdog.rendezvous("every rank's first backward pass", come):
        try:
            timeout = parent._get_backend(device).options._timeout
            watchdog.patience = timeout.total_seconds()
            watchdog.set_peers(tell_all(store, keys, rank, watchdog.endpoint(), timeout))
        except TimeoutError as error:
            raise PeerLost(f"not all ranks have come to their first backward pass; rank {rank}: {error}") from error
        return ProcessGroupTransport(parent, device)


def tell_all(store: Any, keys: Sequence[str], mine: int, text: str, timeout: timedelta) -> list[str]:
    """Every rank's text, in rank order, by a store; waits for all.

    Args:
        store: torch.distributed's.
        keys: a key for each rank, which is used once.
        mine: this rank.
        text: its text.
        timeout: how long to wait.

    Raises:
        TimeoutError: a rank has not told its own by then.
    """
    store.set(keys[mine], text)
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{keys} are not all there after {timeout}")
        time.sleep(LISTEN)
    return [store.get(key).decode() for key in keys]


def _plain(value: Any) -> Any:
    """JSON has lists for tuples."""
    return tuple(value) if isinstance(value, list) else value
