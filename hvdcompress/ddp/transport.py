"""The engine's transport over ``torch.distributed``: asynchronous collectives, and the alarm of a rank that fails.

The collectives of a process group have no names: every rank must start them in the same order. A rank that fails in
the middle of a step therefore sounds an alarm (``engine/safety/alarm.py``). Here an alarm is a key in the group's
store, which the other ranks check while they wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hvdcompress.engine.agreement import PeerError, compare_configs, text_of
from hvdcompress.engine.nodes import Nodes
from hvdcompress.engine.safety.alarm import Alarm, AlarmTransport, Call
from hvdcompress.engine.safety.watchdog import Watchdog
from hvdcompress.engine.transport import Request
from hvdcompress.method import Array
from hvdcompress.ops.torch import ops
from hvdcompress.ops.vectors import dtype_name

POLL_INTERVAL = 1e-3  #: seconds between two polls of a collective on a device, whose end wakes no thread
ALARM_INTERVAL = 0.05  #: seconds between two checks for an alarm; each one is a request to the store's server
#: bytes from all ranks; each round of gloo's rings wakes threads, so for less than this each rank sends to all others
SMALL = 1 << 14

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in PyTorch 2.13


class PeerLost(PeerError):
    """The process group has failed: a rank is gone or timed out. The group cannot be used any more."""


@dataclass(eq=False)
class Handle:
    """A collective in flight.

    Attributes:
        works: ``torch.distributed`` work handles; empty if there is nothing to send.
        out: the tensor that receives the result, flat.
        payload: the tensor that is sent. The handle keeps it alive until the collective is done.
        numpy: whether the engine expects the result as a numpy array.
        op: if ``out`` has what all ranks have sent, how to reduce it.
    """

    works: list[Any]
    out: torch.Tensor
    payload: torch.Tensor
    numpy: bool
    op: str = ""


class ProcessGroupTransport(AlarmTransport):
    """Collectives over a process group of its own, so that their order is independent of DDP and the program.

    Arrays in host memory are sent with gloo. CUDA tensors stay on the GPU, and are sent with NCCL. Constructing the
    transport is collective: all of its ranks must do it.

    Args:
        parent: the group of all ranks.
        device: the device of the gradients.
        part: the alarms of all ranks, and the ranks that take part, as ranks of ``parent``. None for all ranks.
    """

    def __init__(self, parent: Any, device: torch.device, part: tuple[Alarms, Sequence[int]] | None = None):
        self.parent = parent
        self.device = device
        theirs = parent._get_backend(device)  # dist.get_backend() may name several: "cpu:gloo,cuda:nccl"
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{theirs.name()}"
        # new_group() does not inherit the timeout of the parent: its default is 30 minutes
        timeout: timedelta = theirs.options._timeout
        ranks = dist.get_process_group_ranks(parent)
        if part:
            ranks = [ranks[rank] for rank in part[1]]
        # Without local synchronization, new_group() would wait for ranks outside of the group, which never call it
        is_subgroup = len(ranks) < dist.get_world_size()
        with _named_by_us(ranks):
            self.group = dist.new_group(ranks, timeout, backend, use_local_synchronization=is_subgroup)
        # Most programs never call close(): then the group is freed together with the model
        self._finalizer = weakref.finalize(self, _free, self.group, os.getpid())
        self._finalizer.atexit = False
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        super().__init__(*(part or (Alarms(self.group, timeout), range(self.world_size))))

    def close(self) -> None:
        """Free the process groups. Call it when no collective is in flight."""
        for transport in (self, *self.parts):
            transport._finalizer()

    def split(self, nodes: Nodes) -> tuple[ProcessGroupTransport, ProcessGroupTransport, ProcessGroupTransport]:
        """Return transports to the owners of a node, between nodes, and from the owners of a node; collective.

        Args:
            nodes: the nodes.
        """
        inside = nodes.ranks_of_node(nodes.node_of(self.rank))
        between = nodes.counterparts(nodes.local_rank(self.rank))
        for ranks in (inside, between, inside):
            self.parts.append(ProcessGroupTransport(self.parent, self.device, (self.alarms, ranks)))
        return self.parts[0], self.parts[1], self.parts[2]

    # -- collectives ----------------------------------------------------------------------------------------

    def start(self, name: str, request: Request) -> Handle:
        """Start a collective; return without waiting for it."""
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
        return self._launch(call, payload, request.may_overwrite, is_numpy)

    def ready(self, handle: Handle) -> bool:
        """Return whether the result is available (:meth:`wait` would not block)."""
        return all(work.is_completed() for work in handle.works)

    def wait(self, handle: Handle) -> Array:
        """Wait for a collective and return its result, a flat array.

        ``Work.wait()`` cannot be interrupted, so the thread sleeps until the network's thread wakes it, and checks for
        an alarm now and then.

        Raises:
            Alarm: a rank has failed in this step.
            PeerLost: the process group has failed.
        """
        if not self.ready(handle):
            woken = threading.Event()
            if handle.out.is_cpu:
                works = torch.futures.collect_all([work.get_future() for work in handle.works])
                works.add_done_callback(lambda _: woken.set())
            checked = time.monotonic()
            while not woken.wait(ALARM_INTERVAL if handle.out.is_cpu else POLL_INTERVAL):
                if self.ready(handle):
                    break
                if time.monotonic() - checked >= ALARM_INTERVAL:
                    self.alarms.check()
                    checked = time.monotonic()
        self._end(handle)
        out = handle.out
        if handle.op:
            ranks = out.view(self.world_size, -1)
            out = ranks.amax(0) if handle.op == "max" else ops.add_all(list(ranks), into_first=True)
        return out.numpy() if handle.numpy else out

    def idle(self, handle: Handle) -> None:
        """Sleep for one poll interval."""
        time.sleep(POLL_INTERVAL)

    def _launch(self, call: Call, payload: torch.Tensor, may_overwrite: bool = False, is_numpy: bool = False) -> Handle:
        """Start a collective and record it, so that :meth:`fail` can tell the other ranks about it."""
        op = call.op if call.kind == "all_reduce" and self._is_small(payload) else ""
        try:
            works, out = self._gather_small(payload) if op else self._call(call, payload, may_overwrite)
        except RuntimeError as error:
            raise peer_lost(self.alarms.rank, error) from error
        self.calls.append(call)
        self.running.append(Handle(works, out, payload, is_numpy, op))
        return self.running[-1]

    def _is_small(self, payload: torch.Tensor) -> bool:
        return payload.is_cpu and 0 < self.world_size * payload.nbytes <= SMALL

    def _gather_small(self, payload: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
        """Send a payload to each rank by itself; return the work handle and the tensor that receives all payloads."""
        out = payload.new_empty(self.world_size * len(payload))
        return [dist.all_to_all_single(out, payload.repeat(self.world_size), group=self.group, async_op=True)], out

    def _call(self, call: Call, payload: torch.Tensor, may_overwrite: bool) -> tuple[list[Any], torch.Tensor]:
        """Call ``torch.distributed``; return the work handles and the tensor that receives the result."""
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
            if self._is_small(payload):
                return self._gather_small(payload)
            return ([_all_gather(out, payload, **asynchronous)] if len(out) else []), out
        # gloo's all-gather needs equal lengths, and padding would cost bytes: each rank broadcasts its payload instead
        is_only_sender = len(payload) == len(out)
        if is_only_sender:
            out = payload  # large results of an exchange with two levels are sent like this, so do not copy them
        pieces = list(out.split(recv_lengths))
        if not is_only_sender:
            pieces[self.rank].copy_(payload)
        ranks = dist.get_process_group_ranks(self.group)
        works = [
            dist.broadcast(piece, src, **asynchronous) for src, piece in zip(ranks, pieces, strict=True) if len(piece)
        ]
        return works, out

    def _end(self, handle: Handle) -> None:
        try:
            for work in handle.works:
                work.wait()  # for NCCL, the current CUDA stream waits, not the host
        except RuntimeError as error:
            raise peer_lost(self.alarms.rank, error) from error
        self.running.remove(handle)

    # -- failure --------------------------------------------------------------------------------------------

    def join(self, calls: Sequence[Call]) -> None:
        """Start collectives with zeros, and wait for all collectives in flight."""
        for call in calls:
            self._launch(call, torch.zeros(call.size, dtype=getattr(torch, call.dtype), device=call.device))
        for handle in list(self.running):
            self._end(handle)


class Alarms:
    """Alarms between the ranks of a process group, for all transports of these ranks.

    Args:
        group: the group of all ranks. Alarms are keys in its store.
        timeout: how long to wait for the other ranks after a failure.

    Attributes:
        step: number of this step, the same on all ranks.
    """

    def __init__(self, group: Any, timeout: timedelta):
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.timeout = timeout
        self.step = 0
        self._store = dist.distributed_c10d._get_process_group_store(group)

    def check(self) -> None:
        """Raise :class:`Alarm` if another rank has failed in this step."""
        if self._store.check([f"alarm.{self.step}"]):
            raise Alarm

    def exchange(self, error: Exception | None, calls: Sequence[Sequence[Call]]) -> list[tuple[str, list[list[Call]]]]:
        """Sound an alarm after an error of this rank, and exchange errors and calls with all ranks.

        Args:
            error: the error of this rank, or None.
            calls: for each transport, the collectives that this rank has started in this step.

        Returns:
            For every rank, its error text and its ``calls``.

        Raises:
            PeerLost: a rank did not reply.
        """
        if error is not None:
            self._store.set(f"alarm.{self.step}", "")
        text = text_of(error)
        keys = [f"end.{self.step}.{rank}" for rank in range(self.world_size)]
        try:
            replies = exchange_texts(self._store, keys, self.rank, json.dumps([text, calls]), self.timeout)
        except TimeoutError as caught:
            raise peer_lost(self.rank, caught) from caught
        return [
            (text, [[Call(*call) for call in calls] for calls in lists]) for text, lists in map(json.loads, replies)
        ]


def peer_lost(rank: int, error: Exception) -> PeerLost:
    """Return the error for a process group that does not work any more."""
    return PeerLost(f"the process group has failed on rank {rank}; another rank may be gone, see its log: {error}")


_num_connects: Counter[str] = Counter()  # calls of connect() by the parent's name, which make its store keys unique
_num_groups: Counter[tuple[int, ...]] = Counter()  # groups that these ranks have made, which make their names unique


class _FreedGroup:
    """Placeholder for a freed group in PyTorch's table of groups.

    PyTorch derives the name of a new group from the number of groups in the table. Ranks free their groups at different
    moments, so without placeholders they would give one new group different names. And a name that is used again
    would find the freed group's addresses in the store.
    """

    def shutdown(self) -> None:
        """Do nothing; ``destroy_process_group()`` calls this for every group in the table."""

    abort = shutdown


_inherited_groups: list[Any] = []  #: in a forked process: the parent process's groups, which cannot be freed here


@contextlib.contextmanager
def _named_by_us(ranks: Sequence[int]) -> Iterator[None]:
    """Name the group that these ranks make, which PyTorch names by a number of groups.

    Once some ranks have made a group without the others, this number differs between ranks, so that they wait for each
    other in groups of different names (PyTorch 2.13.0, 2.14.1, 2.15.0; from 2.14 on groups of all ranks, too).
    """
    c10d: Any = dist.distributed_c10d
    theirs = c10d._process_group_name
    _num_groups[tuple(ranks)] += 1
    name = f"hvdcompress {_num_groups[tuple(ranks)]} of {ranks}"
    c10d._process_group_name = lambda *_, **__: name
    try:
        yield
    finally:
        c10d._process_group_name = theirs


def _free(group: Any, process: int) -> None:
    """Free the sockets and threads of a group, unless the program has destroyed all groups already.

    Args:
        group: the process group.
        process: id of the process that made the group.
    """
    # A forked process, such as a DataLoader worker, does not have the group's threads, and freeing would wait for them
    if os.getpid() != process:
        _inherited_groups.append(group)
        return
    names = dist.distributed_c10d._world.pg_names
    with contextlib.suppress(ValueError, AssertionError, RuntimeError):
        name = names.get(group)
        dist.destroy_process_group(group)
        if name is not None:
            names[_FreedGroup()] = name  # type: ignore[index]


def meet(parent: Any, device: torch.device, watchdog: Watchdog, facts: Mapping[str, Any], what: str) -> None:
    """Wait for all ranks of ``parent``, exchange the watchdogs' addresses, and compare facts.

    The ranks meet in the store of the parent, because PyTorch's own wait for a group does not show which ranks are
    missing.

    Args:
        parent: the process group whose ranks take part.
        device: the device of the gradients.
        watchdog: the watchdog of this rank.
        facts: {name: value} that must be equal on all ranks, such as keys of the plan.
        what: what this rank waits for, for messages.

    Raises:
        PeerLost: a rank has not arrived within the group's timeout.
        PeerError: the facts differ between ranks.
    """
    store = dist.distributed_c10d._get_process_group_store(parent)
    name = parent.group_name
    rank = dist.get_rank(parent)
    keys = [f"hvdcompress.meeting{_num_connects[name]}.{each}" for each in range(dist.get_world_size(parent))]
    _num_connects[name] += 1

    def arrived() -> list[int]:
        return [each for each, key in enumerate(keys) if store.check([key])]

    with watchdog.rendezvous(what, arrived):
        try:
            timeout = parent._get_backend(device).options._timeout
            watchdog.patience = timeout.total_seconds()
            mine = json.dumps([watchdog.endpoint(), facts])
            addresses, everyone = zip(*map(json.loads, exchange_texts(store, keys, rank, mine, timeout)), strict=True)
            watchdog.set_peers(addresses)
        except TimeoutError as error:
            raise PeerLost(f"rank {rank} waited for {what}: {error}") from error
        compare_configs([(each, {}) for each in everyone])


def exchange_texts(store: Any, keys: Sequence[str], rank: int, text: str, timeout: timedelta) -> list[str]:
    """Exchange one text per rank through a store; return all texts in rank order.

    Args:
        store: a ``torch.distributed`` store.
        keys: one key per rank; each may be used only once.
        rank: this rank.
        text: the text of this rank.
        timeout: how long to wait for all ranks.

    Raises:
        TimeoutError: a rank has not set its text within the timeout.
    """
    store.set(keys[rank], text)
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            absent = [each for each, key in enumerate(keys) if not store.check([key])]
            raise TimeoutError(f"nothing from ranks {absent} after {timeout}")
        time.sleep(ALARM_INTERVAL)
    return [store.get(key).decode() for key in keys]
