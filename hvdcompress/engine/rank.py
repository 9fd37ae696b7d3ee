"""One rank's side of every exchange: state, steps and rollback, with no I/O. Drivers are built on it.

A step of a driver is: :meth:`Worker.start` for each bucket (the generator runs to its first verb), carry
out the verbs and :meth:`Flight.advance` with their results until each flight has ``reduced``, which
:meth:`Worker.deliver` writes into the gradients; then either :meth:`Worker.commit` each flight's state or
:meth:`Worker.abandon` them all, which leaves it as it was, exactly. :meth:`Worker.finish` delivers and commits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdcompress.engine.ledger import Ledger
from hvdcompress.engine.state import copied, declared_slots, itemsize, num_bytes, spans
from hvdcompress.method import Array, Communication, Context, Method, Reduced, Verb
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket, Plan


class ExchangeError(RuntimeError):
    """An exchange failed; the message names the tensor, the method, the round and the rank."""


@dataclass
class Flight:
    """One bucket's exchange while it is under way; ``verb`` is what it waits for, until ``reduced`` is there."""

    worker: Worker
    bucket: Bucket
    method: Method
    ctx: Context
    exchange: Communication
    scale: float  #: what the gradient was multiplied by
    finite: bool
    dtype: str  #: what it is computed in
    like: Array
    verb: Verb | None = None
    reduced: Reduced | None = None
    round: int = -1
    handle: Any = None  #: the driver's, for the collective in flight
    extra: dict[str, Any] = field(default_factory=dict)  #: the driver's own

    @property
    def name(self) -> str:
        """The bucket's name."""
        return self.bucket.spec.name

    def advance(self, result: Any = None) -> Verb | None:
        """Give the method the result of its verb; returns the next one, or None when it is done.

        Raises:
            ExchangeError: the method failed.
        """
        began = time.perf_counter()
        try:
            self.verb = self.exchange.send(result) if self.round >= 0 else next(self.exchange)
            self.round += 1
        except StopIteration as stop:
            self.verb, self.reduced = None, stop.value
        except Exception as error:
            raise ExchangeError(self.worker.describe_error(self, error)) from error
        finally:
            self.worker.ledger.add_seconds(self.worker.rank, "select", time.perf_counter() - began)
        return self.verb


class Worker:
    """State and bookkeeping of one rank under one plan."""

    def __init__(self, plan: Plan, rank: int, world: int, ledger: Ledger | None = None):
        self.plan, self.rank, self.world = plan, rank, world
        self.ledger = ledger or Ledger(world, rank)
        self.states: dict[str, dict[str, Array]] = {}  # bucket name -> slot -> array
        self._spare: dict[str, dict[str, Array]] = {}  # bucket name -> slot -> second buffer
        self._joined: dict[str, Array] = {}  # bucket's name -> its members' gradients, then what they become
        self.buckets: dict[str, Bucket] = {}
        self.steps: dict[str, int] = {}  # bucket name -> steps done
        self.triggers: dict[str, int] = {}  # bucket name -> how often all ranks have restarted its schedule
        self.restarts: dict[str, tuple[int, int]] = {}  # bucket name -> (triggers acted upon, step of the last)
        self.asks_for_trigger = False
        self._range: dict[str, tuple[float, float]] = {}  # metric -> least and greatest since the last trigger

    def describe_error(self, flight: Flight, error: Exception) -> str:
        """The message of an :class:`ExchangeError`."""
        return (
            f"tensor {flight.name!r} (method {flight.method.id}, round {max(flight.round, 0)}, rank {self.rank}): "
            f"{type(error).__name__}: {error}"
        )

    def method_now(self, bucket: Bucket) -> Method:
        """The method that is on for the bucket's next step."""
        return bucket.program.at(self.steps.get(bucket.spec.name, 0))

    def phase_now(self, bucket: Bucket) -> tuple[int, int]:
        """The phase of the bucket's next step, and the step of its last restart."""
        step = self.steps.get(bucket.spec.name, 0)
        seen, restart = self.restarts.get(bucket.spec.name, (0, 0))
        if seen < self.triggers.get(bucket.spec.name, 0):
            restart = step
        return self.method_now(bucket).phase_of(step - max(bucket.program.since(step), restart)), restart

    def work_dtype(self, bucket: Bucket) -> str:
        """What the bucket's gradients are computed in: float32, but float64 stays so under a ``wide`` method."""
        return "float64" if self.method_now(bucket).wide and bucket.spec.dtype == "float64" else "float32"

    def state(self, bucket: Bucket, like: Array, ops: Any) -> dict[str, Array]:
        """The bucket's state, allocated as zeros at first use."""
        known = self.buckets.setdefault(bucket.spec.name, bucket)
        if known.spec.shape != bucket.spec.shape:
            shapes = f"had shape {known.spec.shape} before and has {bucket.spec.shape} now"
            raise ValueError(f"tensor {bucket.spec.name!r} {shapes}")
        if bucket.spec.name not in self.states:
            self.states[bucket.spec.name] = {
                slot: ops.zeros(int(np.prod(s.shape)), s.dtype, like=like) for slot, s in declared_slots(bucket).items()
            }
        return self.states[bucket.spec.name]

    def join(self, bucket: Bucket, members: Sequence[Array], ops: Any) -> Array:
        """The flat gradients of a bucket's members one after another, for :meth:`start`.

        A bucket's have a buffer that is kept: fresh memory would cost more than the copying.
        """
        if len(members) == 1:
            return members[0]
        joined = self._joined.get(bucket.spec.name)
        if joined is None or joined.dtype != members[0].dtype or len(joined) != sum(map(len, members)):
            joined = self._joined[bucket.spec.name] = ops.concat(list(members))
        else:
            for member, (start, stop) in zip(members, spans(bucket), strict=True):
                ops.write(joined[start:stop], member, 1.0)
        return joined

    def start(self, bucket: Bucket, gradient: Array, ops: Any, loss_scale: float = 1.0) -> Flight:
        """Begin a bucket's exchange and run it to its first verb.

        ``gradient`` [n] is flat, in the working dtype, and read only until ``deliver``. A non-finite one takes part
        as zeros, so that no method ever sees a NaN, and marks the flight: the step is then to be abandoned.
        """
        step = self.steps.setdefault(bucket.spec.name, 0)
        method = bucket.program.at(step)
        phase, restart = self.phase_now(bucket)
        triggers = self.triggers.get(bucket.spec.name, 0)
        state = self.state(bucket, gradient, ops)
        if len(gradient) != bucket.spec.size:
            raise ValueError(f"tensor {bucket.spec.name!r} has {bucket.spec.size} elements, {len(gradient)} came")
        began = time.perf_counter()
        finite, dtype = ops.all_finite(gradient), self.work_dtype(bucket)
        if not finite:
            gradient = ops.zeros(bucket.spec.size, dtype, like=gradient)
        # what is kept is kept in unscaled units; what keeps nothing need not be unscaled
        scale = 1.0 / loss_scale if loss_scale != 1.0 and feedback.slots(method, bucket.spec) else 1.0
        spare = self._spare.pop(bucket.spec.name, {})
        for slot in feedback.names(method):
            if slot not in spare:
                spare[slot] = ops.zeros(bucket.spec.size, "float32", like=gradient)
        ctx = Context(self.rank, self.world, step, bucket.spec, self.plan.seed, phase, triggers)
        exchange = feedback.exchange(method, gradient, scale, state, spare, ctx, ops)
        self.ledger.add_seconds(self.rank, "select", time.perf_counter() - began)
        self.ledger.add_dense(self.rank, bucket.spec.name, bucket.spec.size * itemsize(bucket.spec.dtype))
        flight = Flight(self, bucket, method, ctx, exchange, scale, finite, dtype, gradient)
        flight.extra["spare"], flight.extra["restart"] = spare, (triggers, restart)
        flight.advance()
        return flight

    def take_ride(self, flight: Flight, result: Array, factor: float) -> float:
        """Go on with what the stock all-reduce brought, which is ``factor`` times the sum; returns what is left of
        the factor for :meth:`deliver`."""
        if flight.method.linear:
            flight.advance(result)
            return 1.0
        flight.advance(result * np.float32(1.0 / factor))
        return factor

    def finish(self, flight: Flight, outs: Sequence[Array], factor: float, ops: Any) -> None:
        """:meth:`deliver` and :meth:`commit`."""
        self.deliver(flight, outs, factor, ops)
        self.commit(flight)

    def deliver(self, flight: Flight, outs: Sequence[Array], factor: float, ops: Any) -> None:
        """Write factor · total into ``outs``, the flat members of the flight's bucket."""
        assert flight.reduced is not None
        began = time.perf_counter()
        factor = factor / flight.scale
        if len(outs) == 1:
            ops.write(outs[0], flight.reduced.total, factor)
        else:
            ops.write(flight.like, flight.reduced.total, factor)  # nobody needs the gradient any more
            for out, (start, stop) in zip(outs, spans(flight.bucket), strict=True):
                ops.write(out, flight.like[start:stop], 1.0)
        self.ledger.add_seconds(self.rank, "select", time.perf_counter() - began)

    def commit(self, flight: Flight) -> None:
        """Keep the flight's new state."""
        assert flight.reduced is not None
        name, old = flight.name, self.states[flight.name]
        new = {**old, **flight.reduced.state}
        self._spare[name] = {
            slot: old[slot] if new.get(slot) is second else second for slot, second in flight.extra["spare"].items()
        }
        self.states[name] = new
        self.steps[name] += 1
        self.restarts[name] = flight.extra["restart"]
        self.asks_for_trigger |= flight.reduced.trigger
        self.ledger.count(self.rank, flight.ctx.counters)

    def abandon(self, flight: Flight, outs: Sequence[Array], ops: Any) -> None:
        """Leave the state as it was before the step, and fill the gradients with NaN."""
        flight.exchange.close()
        self._spare[flight.name] = flight.extra["spare"]
        for out in outs:
            ops.fill(out, float("nan"))

    # -- triggers -----------------------------------------------------------------------------------

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Show the methods a metric; if one of them takes it for a call to restart, ask for a trigger."""
        methods = {self.method_now(bucket) for bucket in self.buckets.values()}
        for metric, value in metrics.items():
            value = float(value) if np.isfinite(value) else float("inf")  # a loss of NaN is as bad as can be
            low, high = self._range.get(metric, (value, value))
            self._range[metric] = low, high = min(low, value), max(high, value)
            self.asks_for_trigger |= any(method.notices(metric, value, low, high) for method in methods)

    def take_request(self) -> bool:
        """Whether this rank asks for a trigger; asked once."""
        asked, self.asks_for_trigger = self.asks_for_trigger, False
        return asked

    def trigger(self, names: Iterable[str] | None = None) -> None:
        """All ranks agreed, when the step's exchanges had begun: from the next step on, schedules start again.

        ``names``: of the buckets that this is about; all by default.
        """
        for name in self.buckets if names is None else names:
            self.triggers[name] = self.triggers.get(name, 0) + 1
        self._range.clear()

    # -- what is known, saved and restored ----------------------------------------------------------

    def residual(self, name: str) -> Array | None:
        """The residual of one tensor, flat; None where none is kept. ``KeyError`` if nothing is known of it."""
        bucket, (start, stop) = self.find(name)
        residual = self.states[bucket.spec.name].get(feedback.RESIDUAL)
        return None if residual is None else residual[start:stop]

    def find(self, name: str) -> tuple[Bucket, tuple[int, int]]:
        """The bucket that a tensor belongs to, and its span there."""
        for bucket in self.buckets.values():
            for member, span in zip(bucket.members, spans(bucket), strict=True):
                if member.name == name:
                    return bucket, span
        raise KeyError(f"no tensor {name!r} has gone through yet; known: {', '.join(sorted(self.names())) or 'none'}")

    def names(self) -> list[str]:
        """The names of all tensors that have gone through."""
        return [member.name for bucket in self.buckets.values() for member in bucket.members]

    def num_state_bytes(self) -> int:
        """Memory held for state, second buffers included."""
        arrays = [a for slots in self.states.values() for a in slots.values()] + [
            array for slots in self._spare.values() for array in slots.values()
        ]
        arrays += self._joined.values()
        return sum(num_bytes(array) for array in arrays)

    def state_dict(self) -> dict[str, Any]:
        """{"format", "plan", "world", "rank", "metrics", "steps": {tensor: n},
        "restarts": {tensor: [triggers, of which acted upon, step of the last]}, "merge": {tensor: {slot: how}},
        "state": {tensor: {slot: flat copy}}}.

        A bucket's residual is cut into its members, so that it survives another bucketing.
        """
        state: dict[str, dict[str, Array]] = {}
        merge: dict[str, dict[str, str]] = {}
        for bucket in self.buckets.values():
            declared = declared_slots(bucket)
            for slot, array in self.states[bucket.spec.name].items():
                parts = {bucket.spec.name: array}
                if slot in feedback.BUFFERED:
                    bounds = zip(bucket.members, spans(bucket), strict=True)
                    parts = {member.name: array[start:stop] for member, (start, stop) in bounds}
                for name, part in parts.items():
                    state.setdefault(name, {})[slot] = copied(part)
                    merge.setdefault(name, {})[slot] = declared[slot].merge
        head = {"format": 1, "plan": self.plan.to_dict(), "world": self.world, "rank": self.rank}
        head["metrics"] = {metric: list(pair) for metric, pair in self._range.items()}
        home = {member.name: bucket.spec.name for bucket in self.buckets.values() for member in bucket.members}
        steps = {name: self.steps[bucket] for name, bucket in home.items()}
        restarts = {
            name: [self.triggers[bucket], *self.restarts.get(bucket, (0, 0))]
            for name, bucket in home.items()
            if bucket in self.triggers
        }
        return {**head, "steps": steps, "restarts": restarts, "merge": merge, "state": state}

    def check_origin(self, saved: Mapping[str, Any]) -> None:
        """Refuse a saved state of another format, world or rank with a ValueError."""
        for key, mine in (("format", 1), ("world", self.world), ("rank", self.rank)):
            if saved.get(key) != mine:
                hint = "; hvdcompress.engine.reshard makes states for another world" if key == "world" else ""
                raise ValueError(f"the saved state is of {key} {saved.get(key)!r}, this is {key} {mine!r}{hint}")

    def load_state_dict(
        self, saved: Mapping[str, Any], buckets: Sequence[Bucket], copy: Callable[[Any], Array]
    ) -> None:
        """Take over a saved state, all of it or, on any error, none; ``copy`` makes a fresh array of a saved one.

        Raises:
            ValueError: it is of another format, world, rank or set of tensors; the message says which.
        """
        self.check_origin(saved)
        known = {member.name for bucket in buckets for member in bucket.members}
        if unknown := sorted(saved["steps"].keys() - known):
            raise ValueError(f"the saved state has tensors that are not here: {', '.join(unknown)}")
        states: dict[str, dict[str, Array]] = {}
        steps: dict[str, int] = {}
        for bucket in buckets:
            found = {saved["steps"].get(member.name) for member in bucket.members}
            if found == {None}:
                continue  # it has not gone through yet
            if len(found) > 1:
                raise ValueError(f"the saved state has the tensors of bucket {bucket.spec.name!r} at different steps")
            steps[bucket.spec.name] = found.pop()
            states[bucket.spec.name] = new = {}
            for slot, declared in declared_slots(bucket).items():
                names = [m.name for m in bucket.members] if slot in feedback.BUFFERED else [bucket.spec.name]
                parts = [saved["state"].get(name, {}).get(slot) for name in names]
                if any(part is None for part in parts):
                    raise ValueError(f"the saved state lacks {slot!r} of {', '.join(names)}")
                new[slot] = copy(parts)
                if len(new[slot]) != int(np.prod(declared.shape)):
                    size = len(new[slot])
                    raise ValueError(f"{slot!r} of {bucket.spec.name!r} has {size} elements, not {declared.shape}")
        self.buckets = {bucket.spec.name: bucket for bucket in buckets if bucket.spec.name in states}
        self.states, self.steps, self._spare = states, steps, {}
        home = {bucket.spec.name: bucket.members[0].name for bucket in buckets}
        restarts = {bucket: saved["restarts"][member] for bucket, member in home.items() if member in saved["restarts"]}
        self.triggers = {bucket: entry[0] for bucket, entry in restarts.items()}
        self.restarts = {bucket: (entry[1], entry[2]) for bucket, entry in restarts.items()}
        self._range = {metric: tuple(pair) for metric, pair in saved["metrics"].items()}
