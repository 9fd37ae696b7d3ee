"""N ranks in lockstep in one process: for tests, for trying methods out, and for simulating many workers.

>>> import numpy as np
>>> net = Loopback("topk", world=2, density=0.5, min_elements=1)
>>> net.allreduce([np.float32([1, 5]), np.float32([3, 4])], name="w")
[array([0. , 4.5], dtype=float32), array([0. , 4.5], dtype=float32)]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from hvdcompress.engine.ledger import Ledger
from hvdcompress.engine.rank import Flight, Worker
from hvdcompress.method import AllGather, AllReduce, AllToAll, Broadcast, Method, TensorSpec, Verb
from hvdcompress.ops import fast
from hvdcompress.parts import wire
from hvdcompress.plan import Plan, plan_of

Op = Literal["average", "sum"]


class Loopback:
    """``world`` ranks under one plan.

    Args:
        method: a method id with ``hyper-parameters``, a Method, a Plan, or a plan's dict.
        world: number of ranks, 1 or more.
        loss_scale: a number, or a function that returns one, by which gradients are multiplied; residuals are
            kept unscaled.
        ops: the array backend (default: the fast CPU one).
        settings: hyper-parameters and plan keys (``min_elements``, ``seed``, ``warmup``, …).
    """

    def __init__(
        self,
        method: str | Method | Plan | Mapping[str, Any],
        world: int,
        *,
        loss_scale: float | Callable[[], float] = 1.0,
        ops: Any = fast,
        **settings: Any,
    ):
        if world < 1:
            raise ValueError(f"world = {world} must be 1 or more")
        self.plan = plan_of(method, **settings)
        self.world, self.ops, self.loss_scale = world, ops, loss_scale
        self.ledger = Ledger(world)
        self.ranks = [Worker(self.plan, rank, world, self.ledger) for rank in range(world)]

    def allreduce(self, arrays: Sequence[np.ndarray], name: str = "tensor", op: Op = "average") -> list[np.ndarray]:
        """One array of each rank in, each rank's result out (new arrays, same shape and dtype).

        Raises:
            ValueError: not one array a rank, or shapes or dtypes differ.
        """
        return [out[name] for out in self.allreduce_many([{name: array} for array in arrays], op)]

    def allreduce_many(self, gradients: Sequence[Mapping[str, np.ndarray]], op: Op = "average") -> list[dict]:
        """Named arrays of each rank, exchanged in one step, joined as the plan says."""
        specs = self._specs(gradients, op)
        buckets = self.plan.buckets(specs.values())
        scale = float(self.loss_scale() if callable(self.loss_scale) else self.loss_scale)
        outs = [{name: np.empty(np.shape(g), np.asarray(g).dtype) for name, g in one.items()} for one in gradients]
        crew: list[list[Flight]] = []
        for bucket in buckets:
            flights = []
            for worker, given in zip(self.ranks, gradients, strict=True):
                work = worker.work_dtype(bucket)
                with np.errstate(over="ignore"):  # a float64 beyond float32 is Inf, and undoes the step as such
                    flat = [np.asarray(given[m.name]).astype(work, copy=False).ravel() for m in bucket.members]
                flights.append(worker.start(bucket, worker.join(bucket, flat, self.ops), self.ops, scale))
            crew.append(flights)
            while flights[0].verb is not None:
                verbs = [flight.verb for flight in flights]
                for flight, result in zip(flights, self._carry_out(bucket.spec.name, verbs), strict=True):
                    flight.advance(result)
        finite = all(flight.finite for flights in crew for flight in flights)
        triggered = any([worker.take_request() for worker in self.ranks])
        factor = 1.0 / self.world if op == "average" else 1.0
        for bucket, flights in zip(buckets, crew, strict=True):
            for worker, flight, out in zip(self.ranks, flights, outs, strict=True):
                members = [out[m.name].reshape(-1) for m in bucket.members]
                if finite:
                    worker.finish(flight, members, factor, self.ops)
                else:
                    worker.abandon(flight, members, self.ops)
        self.ledger.steps += finite
        for worker in self.ranks if triggered else ():
            if finite:
                worker.trigger()
            else:  # as if the step had not been: the request waits for the next
                worker.asks_for_trigger = True
        return outs

    def trigger(self) -> None:
        """Restart every method's schedule after the next step."""
        self.ranks[0].asks_for_trigger = True

    def observe(self, **metrics: float) -> None:
        """Tell the methods of metrics, ``loss=…`` or ``learning_rate=…``: some restart their schedule on them."""
        for worker in self.ranks:
            worker.observe(metrics)

    def residual(self, name: str, rank: int) -> np.ndarray:
        """A rank's residual of one tensor, in the tensor's shape; zeros where none is kept."""
        worker = self.ranks[rank]
        shape = next(member.shape for member in worker.find(name)[0].members if member.name == name)
        residual = worker.residual(name)
        return np.zeros(shape, np.float32) if residual is None else np.asarray(residual).reshape(shape)

    def _specs(self, gradients: Sequence[Mapping[str, np.ndarray]], op: Op) -> dict[str, TensorSpec]:
        if op not in ("average", "sum"):
            raise ValueError(f'op = {op!r} must be "average" or "sum"')
        if len(gradients) != self.world:
            raise ValueError(f"{self.world} ranks need {self.world} arrays, {len(gradients)} came")
        specs: dict[str, TensorSpec] = {}
        for rank, given in enumerate(gradients):
            for name, array in given.items():
                array = np.asarray(array)
                if array.dtype.kind != "f":
                    raise ValueError(f"{name!r}, rank {rank}: {array.dtype} is no floating-point type")
                spec = TensorSpec(name, array.shape, str(array.dtype))
                if rank and specs.get(name) != spec:
                    raise ValueError(f"{name!r}, rank {rank}: {spec} differs from rank 0's {specs.get(name)}")
                specs[name] = spec
            if given.keys() != specs.keys():
                raise ValueError(f"rank {rank} lacks {', '.join(sorted(specs.keys() - given.keys()))}")
        return specs

    def _carry_out(self, name: str, verbs: list[Any]) -> list[Any]:
        """Every rank's verb -> every rank's result."""
        kinds = {type(verb).__name__ for verb in verbs}
        if len(kinds) != 1:
            raise RuntimeError(f"{name!r}: ranks ask for different collectives in one round: {sorted(kinds)}")
        results, lengths = RUN[type(verbs[0])](verbs)
        for rank, num_bytes in enumerate(lengths):
            splits = getattr(verbs[rank], "splits", None)
            self.ledger.add(rank, name, type(verbs[rank]).__name__, num_bytes, lengths, splits)
        return results


def _all_reduce(verbs: list[AllReduce]) -> tuple[list[Any], list[int]]:
    lengths = {len(verb.x) for verb in verbs}
    if len(lengths) != 1:
        raise RuntimeError(f"an all-reduce of different lengths: {sorted(lengths)}")
    if len({(verb.op, verb.x.dtype) for verb in verbs}) != 1:
        raise RuntimeError(f"an all-reduce of different kinds: {sorted({f'{v.op} {v.x.dtype}' for v in verbs})}")
    total = verbs[0].x.copy()
    for verb in verbs[1:]:
        total = total + verb.x if verb.op == "sum" else np.maximum(total, verb.x)
    return [total] * len(verbs), [verb.x.nbytes for verb in verbs]


def _all_gather(verbs: list[AllGather]) -> tuple[list[Any], list[int]]:
    lengths = [len(verb.x) for verb in verbs]
    if len(set(lengths)) > 1:
        wire.split(b"".join(verb.x.tobytes() for verb in verbs), len(verbs))  # as other drivers must
    return [[verb.x for verb in verbs]] * len(verbs), lengths


def _broadcast(verbs: list[Broadcast]) -> tuple[list[Any], list[int]]:
    roots = {int(verb.root) for verb in verbs}
    if len(roots) != 1:
        raise RuntimeError(f"ranks disagree on the root of a broadcast: {sorted(roots)}")
    made = verbs[roots.pop()].make()
    if len(made) != verbs[0].num_bytes or len(made) % 4:
        raise RuntimeError(f"a broadcast of {len(made)} bytes was announced as {verbs[0].num_bytes}")
    return [made] * len(verbs), [verb.num_bytes for verb in verbs]


def _all_to_all(verbs: list[AllToAll]) -> tuple[list[Any], list[int]]:
    ranks = range(len(verbs))
    pieces = [cut(verb.x, verb.splits or [len(verb.x) // len(verbs)] * len(verbs)) for verb in verbs]
    received = [[row[rank] for row in pieces] for rank in ranks]
    for rank, verb in enumerate(verbs):
        lengths = tuple(len(piece) for piece in received[rank])
        if verb.receives is not None and lengths != verb.receives:
            raise RuntimeError(f"an all-to-all brought rank {rank} {lengths} bytes, expected were {verb.receives}")
    return received, [verb.x.nbytes for verb in verbs]


def cut(x: Any, lengths: Sequence[int]) -> list[Any]:
    """Consecutive pieces of ``x`` of these lengths, which must fill it."""
    stops = np.cumsum(lengths).tolist()
    if stops[-1] != len(x):
        raise RuntimeError(f"pieces of {list(lengths)} bytes do not fill {len(x)}")
    return [x[stop - length : stop] for stop, length in zip(stops, lengths, strict=True)]


RUN: dict[type[Verb], Callable[[list[Any]], tuple[list[Any], list[int]]]] = {
    AllReduce: _all_reduce,
    AllGather: _all_gather,
    Broadcast: _broadcast,
    AllToAll: _all_to_all,
}
