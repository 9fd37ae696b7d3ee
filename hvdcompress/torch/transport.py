"""Horovod's asynchronous collectives as the verbs want them, and the status round that keeps ranks together."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvdcompress.engine.agreement import compare_plans
from hvdcompress.engine.ledger import Ledger
from hvdcompress.method import AllGather, AllReduce, AllToAll, Broadcast, Verb
from hvdcompress.parts import wire

PAUSE = 1e-4  #: seconds between two looks at what has come; Horovod's own are as far apart


class Pending:
    """A collective in flight: what Horovod is working on, and how to read its result."""

    def __init__(self, handle: int, verb: Verb, name: str):
        self.handle, self.verb, self.name = handle, verb, name


class Net:
    """Named collectives over one process set, charged to a ledger.

    Every collective has a name, equal on all ranks: unnamed ones are numbered in each rank's own order, and
    two ranks whose hooks fire in different order would exchange one tensor for another.
    """

    def __init__(self, prefix: str, ledger: Ledger, process_set: Any):
        self.prefix, self.ledger, self.set = prefix, ledger, process_set
        self.rank, self.world = process_set.rank(), process_set.size()
        self._send: dict[type[Verb], Callable[[Any, str, str], int]] = {
            AllReduce: self._all_reduce,
            AllGather: self._all_gather,
            Broadcast: self._broadcast,
            AllToAll: self._all_to_all,
        }

    def submit(self, name: str, round: int, verb: Verb) -> Pending:
        """Start a verb's collective for tensor ``name``; returns at once."""
        return Pending(self._send[type(verb)](verb, f"{self.prefix}.{name}.{round}", name), verb, name)

    def _all_reduce(self, verb: AllReduce, full: str, name: str) -> int:
        payload = _tensor(verb.x)
        self.ledger.add(self.rank, name, "AllReduce", payload.nbytes)
        op = hvd.Sum if verb.op == "sum" else hvd.Max
        return hvd.allreduce_async(payload, name=full, op=op, process_set=self.set)

    def _all_gather(self, verb: AllGather, full: str, name: str) -> int:
        return hvd.allgather_async(_tensor(verb.x), name=full, process_set=self.set)

    def _broadcast(self, verb: Broadcast, full: str, name: str) -> int:
        """As an int32 sum in which the others give zeros: sums are fused and cached, broadcasts are neither."""
        if self.rank == int(verb.root):
            payload = _tensor(verb.make()).view(torch.int32)
        else:
            payload = torch.zeros(verb.num_bytes // 4, dtype=torch.int32)
        self.ledger.add(self.rank, name, "Broadcast", payload.nbytes)
        return hvd.allreduce_async(payload, name=full, op=hvd.Sum, process_set=self.set)

    def _all_to_all(self, verb: AllToAll, full: str, name: str) -> int:
        payload = _tensor(verb.x)
        self.ledger.add(self.rank, name, "AllToAll", payload.nbytes, splits=verb.splits)
        splits = verb.splits or [len(payload) // self.world] * self.world
        return hvd.alltoall_async(
            payload, splits=torch.tensor(splits, dtype=torch.int32), name=full, process_set=self.set
        )

    def ready(self, pending: Pending) -> bool:
        """Whether :meth:`wait` would return at once."""
        return hvd.poll(pending.handle)

    def pause(self) -> None:
        """Let Horovod go on for a moment."""
        began = time.perf_counter()
        time.sleep(PAUSE)
        self.ledger.add_seconds(self.rank, "communicate", time.perf_counter() - began)

    def wait(self, pending: Pending, native: bool) -> Any:
        """The verb's result, as the method expects it: numpy arrays, or torch tensors if ``native``.

        Raises:
            HorovodInternalError: a peer is gone.
        """
        began = time.perf_counter()
        out = hvd.synchronize(pending.handle)
        self.ledger.add_seconds(self.rank, "communicate", time.perf_counter() - began)
        verb = pending.verb
        if isinstance(verb, AllToAll):
            out = out[0] if isinstance(out, tuple) else out
        elif isinstance(verb, Broadcast):
            out = out.view(torch.uint8)
        result = out if native else out.numpy()
        if isinstance(verb, AllGather):
            lengths = self._lengths(result, len(verb.x))
            self.ledger.add(self.rank, pending.name, "AllGather", len(verb.x), lengths)
            return _cut(result, lengths)
        if isinstance(verb, AllToAll):
            return _cut(result, verb.receives or [len(result) // self.world] * self.world)
        return result

    def _lengths(self, gathered: Any, own: int) -> list[int]:
        """The lengths of the ranks' payloads: mine, if p of mine fill the buffer; else by their headers."""
        if len(gathered) == own * self.world:
            return [own] * self.world
        return wire.split(bytes(gathered), self.world)

    def gather_text(self, what: str, text: str) -> list[str]:
        """Every rank's text, in rank order; waits."""
        data = torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())
        sizes = hvd.allgather(torch.tensor([len(data)]), name=f"{self.prefix}.{what}.size", process_set=self.set)
        joined = hvd.allgather(data, name=f"{self.prefix}.{what}", process_set=self.set)
        self.ledger.add(self.rank, what, "AllGather", len(data) + 8, [int(n) + 8 for n in sizes])
        return [bytes(piece.tolist()).decode() for piece in _cut(joined, sizes.tolist())]

    def compare_plans(self, plan: dict[str, Any], tensors: dict[str, str]) -> None:
        """Make sure that all ranks have the same plan and the same tensors.

        Raises:
            PeerError: they do not; it names the first key that differs, and the ranks.
        """
        texts = self.gather_text("plan", json.dumps([plan, tensors]))
        compare_plans([json.loads(text) for text in texts])


def _tensor(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(x))


def _cut(x: Any, lengths: Sequence[int]) -> list[Any]:
    stops = np.cumsum(lengths).tolist()
    return [x[stop - size : stop] for stop, size in zip(stops, lengths, strict=True)]
