"""One step on one rank, from the first gradient to the commit.

A driver creates a :class:`Step`, passes gradients to :meth:`Step.add`, and calls :meth:`Step.finish`. A driver that has
all gradients at once calls :meth:`Step.run` instead. Networks differ in one value: whether they match collectives by
order or by name (``transport.ordered``). It also determines when the ranks agree.

With two levels (``levels.py``), a bucket passes through three networks, and the ranks of a node must start its way back
in the same order; apart from that, both kinds of exchanges are driven alike.

Why the ranks agree, and why at these points. A step must have the same effect on all ranks: if one rank keeps a new
residual and another one discards it, they diverge without an error. So each rank tells the others in a *status* whether
it has failed, whether its gradients are finite, and what it believes about plan, tensors, steps and loss scale.

- Ordered networks (MPI, torch.distributed) match the n-th collective of a rank with the n-th of the others. If plans
  differ, payloads of different lengths meet, and gloo and MPI truncate them or hang. So a status precedes the first
  collective. It is sent before the gradients exist, to overlap with the backward pass, and cannot tell whether they are
  finite; so a second status follows the last collective, and all ranks keep or discard the step.
- Networks that match by name (Horovod) start collectives in the order of hooks, which differs between ranks, so no
  status can precede all of them. One status is sent when all exchanges are in flight, before this rank waits for any of
  them: a rank that failed may never start its part.

What was tried: one status at the end (a rank with another plan hung in the first collective); waiting for one tensor
after the other (a deadlock if ranks start them in different orders); a status for each tensor (it costs as much as the
exchange of a small tensor; TensorFlow's driver has no choice).

What is not nice: a rank that fails on an ordered network needs an alarm (``safety/alarm.py``), since its collectives
cannot be cancelled. With two levels under Horovod there are two statuses, because only the owner of a bucket sees the
sum of its node. An agreed trigger outlives a step that is not finite, although nothing else of the step does.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np

import hvdcompress.ops
from hvdcompress.engine.agreement import (
    JOIN_MESSAGE,
    PeerError,
    SharedConfig,
    Status,
    compare_checksums,
    compare_configs,
    fingerprint,
    peer_error,
    shared_slots,
    text_of,
)
from hvdcompress.engine.collectives import Pending
from hvdcompress.engine.commit import Part, Stage, commit_step
from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.levels import Network, NodeExchange
from hvdcompress.engine.state import RankState
from hvdcompress.method import AllReduce, Array
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Flag, both
from hvdcompress.plan import Bucket

POLL_INTERVAL = 5e-4  #: seconds; Horovod completes collectives once per HOROVOD_CYCLE_TIME, 1 ms by default


def evaluate_loss_scale(loss_scale: float | Callable[[], float]) -> float:
    """Return the current loss scale.

    Args:
        loss_scale: a number, or a function that returns the current number.

    Raises:
        ValueError: the loss scale is not a positive finite number.
    """
    scale = float(loss_scale() if callable(loss_scale) else loss_scale)
    if not (isfinite(scale) and scale > 0):
        raise ValueError(f"loss_scale is {scale}; it must be a positive finite number")
    return scale


class Framework:
    """Functions of a driver's framework that the engine calls. The defaults are for NumPy."""

    def ops(self, like: Array) -> Ops:
        """Return the array ops for gradients of this array's type and device."""
        return hvdcompress.ops.fast

    def store(self, name: str) -> None:
        """Copy the results of a bucket to the framework's own tensors, if they were written elsewhere."""

    def checksums(self, local: RankState) -> dict[str, int]:
        """Return {name: checksum} of the state that must be equal on all ranks, for the plan's ``verify_every``."""
        return shared_slots(local.states.values())


#: Decorator. The program may have set NumPy to raise on overflow; inside the engine, Inf is data and must not raise
IGNORE_FLOAT_WARNINGS = np.errstate(all="ignore")


class Step:
    """The exchanges of one step on one rank.

    Args:
        local: the state of this rank.
        network: the collectives of this rank, of :func:`~hvdcompress.engine.levels.network_over`.
        config: plan and tensors, which must be equal on all ranks.
        framework: the functions of the driver's framework.

    Attributes:
        collectives: the collectives of all ranks.
        exchanges: {bucket name: exchange}.
        loss_scale: the factor by which the loss was multiplied. Set it before the first gradient.
        error: the first deferred error of this rank; the status tells the other ranks.
        factor: factor of sums over ranks: 1/world_size for an average, 1 for a sum; None until it is known.
        used: for each tensor in ``config.tensors``, whether this rank had a gradient; empty if all tensors had one. A
            tensor without a gradient on any rank keeps its state. Only with an ordered transport.
        votes: timings of this rank for the fallback, sent with its last status; all ranks send equally many.
        max_votes: the maximum of each vote over all ranks, after the step.
        checksums: {name: checksum} of this rank, after :meth:`status`, in a step that compares checksums.
        unused: names of the tensors whose results no rank uses; their state is kept.
        finite: whether no rank had an Inf or a NaN, as far as this rank knows. Its own gradients are included after
            :meth:`status`.
    """

    def __init__(
        self,
        local: RankState,
        network: Network,
        config: SharedConfig,
        framework: Framework = Framework(),  # noqa: B008  (it has no state)
    ):
        self.rank_state = local
        self.network = network
        self.collectives = network["world"]
        self.framework = framework
        self.config = replace(config, plan={**config.plan, "paused": True}) if local.paused else config
        self.votes = [] if local.uncompressed else local.fallback.votes()
        self.max_votes: list[float] = []
        self.loss_scale = 1.0
        self.exchanges: dict[str, Exchange | NodeExchange] = {}
        self.error: Exception | None = None
        self.factor: float | None = None
        self.used: Sequence[bool] = ()
        self.checksums: dict[str, int] = {}
        self.finite = True
        self.unused: set[str] = set()
        self.triggered = False  # whether the ranks agreed to restart the phases
        self._in_flight: deque[Exchange | NodeExchange] = deque()  # with a collective in flight, oldest first
        self._done: list[Exchange | NodeExchange] = []  # in stage REDUCED
        self._to_return: deque[NodeExchange] = deque()  # not on the way from the owner yet, in the order of their start
        self._returning: deque[NodeExchange] = deque()  # on the way from the owner, oldest first
        self._passed_through: list[Part] = []  # gradients that the framework reduces
        self._first_status: Pending | None = None  # the status that was sent and not received yet
        self._error_text = ""  # the error that the sent status reported
        self._requested_trigger = False  # whether the status carried a request of this rank for a trigger
        self._device_flags: dict[Any, Flag] = {}  # {device: whether its gradients are finite}, not read yet
        # Whether another status of this step follows, which will report errors. With two levels, a second one tells
        # whether the sums of the nodes are finite
        self._agrees_again = local.nodes is not None and not self.collectives.ordered
        self._last_poll = 0.0  # time of the last poll()

    # -- adding gradients ----------------------------------------------------------------------------------

    @IGNORE_FLOAT_WARNINGS
    def add(
        self,
        bucket: Bucket,
        indices: Sequence[int],
        gradients: Sequence[Array],
        outs: Sequence[Any] | None = None,
    ) -> None:
        """Add gradients of a bucket. The last one starts the exchange.

        Args:
            bucket: the bucket.
            indices: indices of the tensors among the members of the bucket.
            gradients: flat gradients of these tensors; see :meth:`Exchange.add`.
            outs: flat arrays for the results; see :meth:`Exchange.add`.

        Raises:
            ExchangeError: the method raised an exception on this rank.
            ValueError: the shape of a tensor has changed, or a gradient does not have the size of its tensor.
            PeerError: the ranks disagree, or another rank failed.
        """
        exchange = self.exchanges.get(bucket.spec.name)
        if exchange is None:
            like = gradients[0]
            given = (bucket, like, self.framework.ops(like), self.loss_scale)
            if self.rank_state.nodes:
                exchange = NodeExchange(self.rank_state, self.network, *given)
            else:
                exchange = Exchange(self.rank_state, self.collectives.group, *given)
            self.exchanges[bucket.spec.name] = exchange
        exchange.add(indices, gradients, outs)
        if exchange.is_full:
            self._start(exchange)

    def _start(self, exchange: Exchange | NodeExchange) -> None:
        """Start the first collective of an exchange that has all its gradients."""
        exchange.start()
        if isinstance(exchange, NodeExchange):
            self._to_return.append(exchange)
        # On a device the flag stays a tensor here. Reading it would synchronise with the device once per bucket.
        self._note_finite(exchange.finite)
        if self.collectives.ordered:
            self.receive_status()  # it was in flight while the first bucket was encoded
        self._submit(exchange)
        # MPI transfers data only inside MPI calls, so poke the oldest collective while this rank is busy encoding
        if self.collectives.ordered and self._in_flight:
            self._is_ready(self._in_flight[0])

    @IGNORE_FLOAT_WARNINGS
    def fill_missing(self) -> None:
        """Start the exchanges that have only some of their gradients. Missing gradients count as zeros."""
        # Ordered transports need the same order on all ranks, and gradients may have arrived in different orders
        for _, exchange in sorted(self.exchanges.items()):
            if exchange.stage is Stage.FILLING:
                exchange.fill_missing()
                self._start(exchange)

    def pass_through(self, bucket: Bucket, gradient: Any, like: Array) -> None:
        """Register a gradient that the driver's framework reduces itself.

        Args:
            bucket: a bucket whose :class:`NextStep` has ``passes_through``.
            gradient: the PyTorch tensor that the framework reduces in place. The commit fills it with NaN if any tensor
                of the step is not finite.
            like: an array on the gradient's device.
        """
        ops = self.framework.ops(like)
        part = Part(self.rank_state, bucket, like, ops)
        part.outs = [gradient.detach()]
        self._passed_through.append(part)

    @IGNORE_FLOAT_WARNINGS
    def check_finite(self, gradient: Array) -> None:
        """Check a passed-through gradient for Inf and NaN, before :meth:`status`.

        A sum that contains NaN or Inf stays non-finite, so the gradient may already be in flight.
        """
        self._note_finite(self.framework.ops(gradient).all_finite(gradient))

    @IGNORE_FLOAT_WARNINGS
    def poll(self) -> None:
        """Resume exchanges whose collectives are done, oldest first, without waiting.

        Second rounds can then overlap with the rest of the backward pass. Only for transports that match collectives by
        name. A call within ``POLL_INTERVAL`` of the last one is a no-op.
        """
        # A hook runs for each of hundreds of gradients; polling Horovod in each of them would cost more than it gains
        now = time.perf_counter()
        if now - self._last_poll < POLL_INTERVAL:
            return
        self._last_poll = now
        self.advance_ready()

    @IGNORE_FLOAT_WARNINGS
    def advance_ready(self) -> None:
        """Resume exchanges whose collectives are done, oldest first, without waiting."""
        while self._in_flight and self._is_ready(self._in_flight[0]):
            self._advance(self._in_flight.popleft())
        self._deliver_done()
        while self._returning and self._is_ready(self._returning[0]):
            self._advance(self._returning.popleft())

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Context manager for adding gradients. On exit, exchanges of earlier batches are advanced by one collective.

        Second rounds can then overlap with the backward pass. For ordered transports: every rank must have the same
        batches, because the exit starts collectives.
        """
        before = len(self._in_flight)
        yield
        self._advance_oldest(before)

    def fail(self, error: Exception) -> None:
        """Store an error of this rank, which the next status reports to all ranks. Only the first error is kept."""
        self.error = self.error or error

    @contextlib.contextmanager
    def defer_errors(self) -> Iterator[None]:
        """Context manager that stores an exception in :attr:`error`, until the ranks agree, instead of raising it."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    @property
    def is_busy(self) -> bool:
        """Whether a collective of a tensor is in flight."""
        return bool(self._in_flight or self._returning)

    def waits_for(self) -> str:
        """Describe the collective that this rank waits for. The watchdog's thread calls it."""
        running = [exchange for exchange in list(self.exchanges.values()) if exchange.stage is Stage.RUNNING]
        waiting: Sequence[Part] = running or self._passed_through
        return waiting[0].describe_wait(len(waiting)) if waiting else "the ranks' status"

    # -- the ranks agree ------------------------------------------------------------------------------------

    def status(self) -> Status:
        """Return the status of this rank. It includes, and clears, a pending request for a trigger."""
        self._requested_trigger |= self.rank_state.take_trigger_request()
        self._read_device_flags()
        # A rank with an error may not know its loss scale. Sending 1 lets the ranks report the error and not the scale.
        scale = self.loss_scale if self.error is None else 1.0
        self.checksums = self.framework.checksums(self.rank_state) if self.rank_state.verifies() else {}
        # Each rank of a node has the state of other tensors, so checksums are compared after the status then
        checksums = {} if self.rank_state.nodes else self.checksums
        steps = self.rank_state.steps()
        state = fingerprint(self.config.digest, sorted(steps.items()), sorted(checksums.items()))
        flags = (self.error is not None, not self.finite, self._requested_trigger, self.rank_state.replaced)
        return Status(*flags, state, -state, scale, -scale)

    def send_status(self) -> None:
        """Start sending this rank's status to all ranks, without waiting."""
        if not self.collectives.ordered:
            with self.defer_errors():
                self._refuse_missing()
        self._error_text = text_of(self.error)
        votes = [] if self.collectives.ordered else self.votes
        numbers = np.array([*self.status(), *votes], np.float64)
        self._first_status = self.collectives.start("status", 0, AllReduce(numbers, "max"))

    @IGNORE_FLOAT_WARNINGS
    def receive_status(self) -> None:
        """Wait for the reduced status and apply it. A no-op unless :meth:`send_status` was called before.

        Raises:
            PeerError: a rank failed, or the ranks disagree; the message is the same on every rank.
        """
        pending = self._first_status
        self._first_status = None
        if pending is None:
            return
        self.collectives.advance(pending)
        numbers = pending.result.tolist()
        length = len(Status._fields)
        status = Status(*numbers[:length])
        self.max_votes = numbers[length:]
        # This check comes first: the zeros of a rank that called Horovod's join() would also look like a different
        # configuration. Loss scales are positive
        if status.minus_loss_scale == 0:
            raise PeerError(JOIN_MESSAGE)
        # Compare configurations before reporting failures: a rank that received a payload of another plan fails because
        # of the disagreement, which is the message to show.
        if not status.alike:
            mine = json.dumps([self.config.plan, self.config.tensors, self.rank_state.steps(), self.checksums])
            everyone = [json.loads(text) for text in self.collectives.gather_text("config", mine)]
            compare_configs([(plan, tensors) for plan, tensors, *_ in everyone])
            if all(steps == everyone[0][2] for _, _, steps, _ in everyone):
                compare_checksums([sums for *_, sums in everyone], self.rank_state.steps_done())
        if status.failed:
            raise peer_error(self.collectives.gather_text("error", self._error_text)) from self.error
        status.require_agreement()
        if self.error and not self._agrees_again:
            raise self.error
        self.apply_status(status)
        # Only now is it certain that all ranks are at the same step, and so compare in the same one
        if self.rank_state.nodes and self.rank_state.verifies():
            texts = self.collectives.gather_text("verify", json.dumps(self.checksums))
            sums = [json.loads(text) for text in texts]
            compare_checksums(sums, self.rank_state.steps_done(), self.rank_state.nodes.local_size)

    def apply_status(self, status: Status) -> None:
        """Take over the decisions of a reduced status."""
        self.finite &= not status.non_finite
        self.triggered |= bool(status.triggered)
        if status.replaced:
            self.rank_state.forget_lengths()

    # -- the end --------------------------------------------------------------------------------------------

    def run(self, add: Callable[[], object]) -> None:
        """Run the whole step, on an ordered transport that has alarms.

        If the step fails on any rank, it has no effect on any rank, and the next step can begin.

        Args:
            add: function that adds all gradients. It is not called if this rank already has an :attr:`error`.

        Raises:
            PeerError: another rank failed, or the ranks disagree.
            Exception: the error of this rank.
        """
        transport: Any = self.collectives.transport
        transport.begin()
        mine = self.error  # the status reports this one; an error after the status needs the alarm
        try:
            self.send_status()
            if mine is None:
                try:
                    add()
                except Exception:
                    self.receive_status()  # a disagreement is the likely cause of the error, so raise it instead
                    raise
            self.finish()
        except Exception as caught:
            self.abandon()
            raised = transport.fail(caught, mine)
            raise raised from raised.__cause__

    @IGNORE_FLOAT_WARNINGS
    def finish(self) -> None:
        """Complete all exchanges, then keep the new state on all ranks or discard it on all ranks.

        Raises:
            PeerError: a rank failed, or the ranks disagree; raised on every rank.
        """
        self._wait_for_status()
        if self._agrees_again:
            # The owners see only now whether the sums are finite, and run the methods. So the ranks agree again
            with self.defer_errors():
                # All gradients of the node, in order, so that the exchanges between nodes start
                for exchange in [each for each in self._in_flight if each.level == "to_owner"]:
                    self._in_flight.remove(exchange)
                    self._advance(exchange)
            self._agrees_again = False
            self.send_status()
            self._wait_for_status()
        self._refuse_missing()
        self._drain()
        # The first status was sent before the gradients, so only the last one can tell whether they are finite
        if self.collectives.ordered:
            self._read_device_flags()
            last = np.array([not self.finite, *self.votes, *self.used], np.float64)
            non_finite, *others = self.collectives.run("status", AllReduce(last, "max"), 1).tolist()
            self.max_votes = others[: len(self.votes)]
            self.finite = not non_finite
            everyones_use = zip(self.config.tensors, others[len(self.votes) :], strict=bool(self.used))
            self.unused |= {name for name, use in everyones_use if not use}
        self.close()

    def _wait_for_status(self) -> None:
        """Wait for the reduced status if it was sent, and apply it; see :meth:`receive_status`."""
        # Until the status is there, process results that happen to be ready, but do not wait for any of them: a rank
        # that failed may never start its part.
        if not self.collectives.ordered:
            while self._first_status and not self.collectives.ready(self._first_status):
                with self.defer_errors():
                    self._advance_any()
        self.receive_status()

    def _refuse_missing(self) -> None:
        """Raise RuntimeError if an exchange lacks gradients, or if the factor was not set."""
        for exchange in self.exchanges.values():
            if exchange.stage is Stage.FILLING:
                raise RuntimeError(f"{exchange.describe_missing()}; add them, or call fill_missing()")
        if self.collectives.ordered and self.exchanges and self.factor is None:
            raise RuntimeError("step.factor is not set; set it to 1/world_size for an average or 1 for a sum")

    def _drain(self) -> None:
        """Wait for all exchanges: round by round on ordered transports, in order of completion on others.

        On transports that match by name, waiting for one particular tensor could deadlock: other ranks may wait for a
        different one.
        """
        while self._in_flight:
            if self.collectives.ordered:
                self._advance_oldest(len(self._in_flight))
            else:
                self._advance_any()
        self._deliver_done()
        while self._returning:
            self._advance(self._returning.popleft())

    @IGNORE_FLOAT_WARNINGS
    def close(self) -> None:
        """Commit the step: keep all new states or, if any rank had an Inf or a NaN, fill the results with NaN."""
        parts = [*self.exchanges.values(), *self._passed_through]
        commit_step(self.rank_state, parts, self.finite, self.triggered, self.unused)
        for name in self.exchanges:
            self.framework.store(name)
        if not self.finite:
            # A non-finite step has no effect, so the agreed request for a trigger is kept for the next step
            self.rank_state.trigger_requested |= self.triggered

    def abandon(self) -> None:
        """Undo a failed step: states stay as they were."""
        for exchange in self.exchanges.values():
            exchange.abandon()
            exchange.memory.scratch.clear()  # an abandoned collective may still write to these buffers
        # The status carried the request, but no rank acted on it
        self.rank_state.trigger_requested |= self._requested_trigger

    # -- inside ---------------------------------------------------------------------------------------------

    def _note_finite(self, finite: Flag) -> None:
        """Record whether a gradient is finite. Flags on a device are collected and read once per step."""
        if isinstance(finite, bool):
            self.finite &= finite
        else:
            self._device_flags[finite.device] = both(self._device_flags.get(finite.device, True), finite)

    def _read_device_flags(self) -> None:
        """Wait for the flags on devices: the one synchronisation per step."""
        self.finite &= all(map(bool, self._device_flags.values()))
        self._device_flags.clear()

    def _submit(self, exchange: Exchange | NodeExchange) -> None:
        """Start the collective that an exchange waits for; or note that it can be delivered, or returned."""
        if exchange.stage is Stage.REDUCED:
            self._done.append(exchange)
        elif exchange.level == "from_owner":
            self._return_results()
        else:
            self._start_collective(exchange)
            self._in_flight.append(exchange)

    def _start_collective(self, exchange: Exchange | NodeExchange) -> None:
        assert exchange.collective is not None
        exchange.pending = self.network[exchange.level].start(
            exchange.name, exchange.round, exchange.collective, exchange.ops, exchange.like, exchange.known_lengths()
        )

    def _return_results(self) -> None:
        """Start sending the results that are available, in the order in which all ranks of the node started them."""
        while self._to_return and self._to_return[0].level == "from_owner":
            oldest = self._to_return.popleft()
            self._start_collective(oldest)
            self._returning.append(oldest)

    def _advance_oldest(self, count: int) -> None:
        """Wait for the collectives of the ``count`` oldest exchanges, in order, and start their next collectives.

        Results are written while the next collectives are in flight. For ordered transports: every rank must call
        it at the same points.
        """
        for _ in range(count):
            self._advance(self._in_flight.popleft())
        self._deliver_done()

    def _advance(self, exchange: Exchange | NodeExchange) -> None:
        """Wait for the collective of an exchange, resume the exchange, and start its next collective."""
        assert exchange.pending is not None
        level = exchange.level
        network = self.network[level]
        if not network.advance(exchange.pending):
            # Only the lengths of an all-gather have arrived; its payloads are in flight now
            self._in_flight.append(exchange)
            return
        exchange.note_lengths(exchange.pending.lengths)
        result = exchange.pending.result
        exchange.pending = None
        exchange.resume(result)
        if level == "to_owner":
            self._note_finite(exchange.finite)
        if exchange.stage is not Stage.DELIVERED:
            self._submit(exchange)

    def _is_ready(self, exchange: Exchange | NodeExchange) -> bool:
        return exchange.pending is not None and self.network[exchange.level].ready(exchange.pending)

    def _advance_any(self) -> None:
        """Advance one exchange whose collective is done. If there is none, let the transport work for a moment."""
        for number, exchange in enumerate(self._in_flight):
            if self._is_ready(exchange):
                del self._in_flight[number]
                self._advance(exchange)
                self._deliver_done()
                return
        waiting = self._in_flight[0].pending if self._in_flight else self._first_status
        if waiting:
            self.collectives.idle(waiting)

    def _deliver_done(self) -> None:
        """Write the results of exchanges in stage REDUCED. Their new states are kept only by :meth:`close`."""
        while self._done and self.factor is not None:
            self._done.pop().deliver(self.factor)
            self._return_results()
