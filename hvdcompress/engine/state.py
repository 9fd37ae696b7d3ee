"""State of one rank under one plan: the states of all buckets, and their progress in the methods' programs.

An exchange reads a :class:`~hvdcompress.engine.bucket_state.BucketState` and builds a new one. ``engine/commit.py``
replaces all of them at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hvdcompress.engine.bucket_state import BucketState, Memory, itemsize
from hvdcompress.engine.fallback import PATIENCE, Fallback, Flush, Verdict
from hvdcompress.engine.late import Late
from hvdcompress.engine.nodes import Nodes, Placement
from hvdcompress.engine.saving import snapshot
from hvdcompress.engine.telemetry import log
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.method import Array, Method, TensorSpec
from hvdcompress.parts import feedback
from hvdcompress.plan import Bucket, Grouping, Plan
from hvdcompress.registry import get_method

UNCOMPRESSED = get_method("none")
SEEN = 10  #: steps after which all tensors are assumed to have appeared


class NextStep(NamedTuple):
    """The method and phase of a bucket's next step, as its program determines them.

    Attributes:
        bucket: the bucket.
        state: the bucket's state; None before the first step.
        method: the method of the step.
        phase: index into ``method.phases``.
        restart: ``BucketState.restart`` after the step.
        dtype: dtype of the computation: float64 only for float64 gradients of methods that keep float64.
    """

    bucket: Bucket
    state: BucketState | None
    method: Method
    phase: int
    restart: tuple[int, int]
    dtype: str

    @property
    def passes_through(self) -> bool:
        """Whether the exchange is just a float32 all-reduce of the gradient, which any framework can do."""
        method = self.method
        if not method.identity or method.feedback != "none" or self.bucket.spec.dtype != "float32":
            return False
        return len(self.bucket.members) == 1


class RankState:
    """The states of all buckets on one rank.

    Attributes:
        states: {bucket name: state} of every bucket that was exchanged. The mapping is replaced, never modified.
        memory: {bucket name: reused buffers}, made when they are asked for.
        observers: receive every event; the first one is the ledger.
        trigger_requested: whether this rank requests that all ranks restart the phases of their methods.
        trigger_requests: names of the buckets whose method requested it in the last exchange.
        paused: whether the user has paused compression: gradients are reduced uncompressed, and states do not change.
        fallback: compares steps with and without compression.
        round: counts training steps. Drivers that exchange buckets separately (FSDP2, TensorFlow) use several
            :class:`~hvdcompress.engine.step.Step` objects per round.
        late: {bucket name: what was sent} of the gradients that the optimizer may not have used yet.
        tracks_ages: whether an optimizer needs the ages of elements; None if no optimizer is known yet.
        placement: which rank of a node owns each tensor, in exchanges with two levels; None with one level.
        copy: concatenates saved arrays of a slot into a new array of the driver's library, on the gradients' device.
    """

    def __init__(self, plan: Plan, rank: int, world_size: int, ledger: Ledger | None = None):
        self.plan = plan
        self.rank = rank
        self.world_size = world_size
        self.ledger = ledger or Ledger(world_size, rank)
        self.observers: list[Observer] = [self.ledger, *log.observers()]
        self.states: Mapping[str, BucketState] = {}
        self.memory: defaultdict[str, Memory] = defaultdict(Memory)
        self.trigger_requested = False
        self.trigger_requests: set[str] = set()
        self.paused = False
        self.fallback = Fallback(plan.fallback and world_size > 1)
        self._dense_trial = False  # whether the fallback measures uncompressed steps in this round
        self.round = 0
        self.replaced = False  # whether a state was replaced since the ranks last cleared the known payload lengths
        self.metrics: dict[str, tuple[float, float]] = {}  # {metric: (least, greatest)} since the last trigger
        self.late: dict[str, Late] = {}
        self.tracks_ages: bool | None = None
        self.placement: Placement | None = None
        self.copy: snapshot.Copy = np.concatenate
        self._previous: Mapping[str, BucketState] = {}  # states at the beginning of the round, for discard()
        self._previous_fallback = (self.fallback.verdict, 0)  # verdict and ``num_flushed`` at that time
        self._committed: set[str] = set()  # buckets whose state was replaced in this round
        self._can_discard = False
        self._loaded: snapshot.Saved = snapshot.NOTHING  # loaded state of tensors that have not appeared yet
        self._claimed_by = 0  # the round until which they should have appeared

    @property
    def uncompressed(self) -> bool:
        """Whether this step reduces gradients uncompressed and leaves states unchanged."""
        return self.paused or self._dense_trial

    def group(
        self, specs: Iterable[TensorSpec], grouping: Grouping | None, ages: snapshot.Ages | None = None
    ) -> list[Bucket]:
        """Group tensors into buckets; see :meth:`Plan.buckets`. With two levels, this also chooses their owners.

        Args:
            specs: the tensors.
            grouping: the rules of the network.
            ages: progress by tensor; by default that of the present states.
        """
        ages = self.ages() if ages is None else ages
        if self.placement:
            self.placement, buckets = self.placement.group(self.plan, specs, grouping, ages)
            return buckets
        return self.plan.buckets(specs, grouping, ages)

    @property
    def nodes(self) -> Nodes | None:
        """The nodes of an exchange with two levels; None with one level."""
        return self.placement.nodes if self.placement else None

    def owns(self, bucket: Bucket) -> bool:
        """Return whether this rank exchanges the bucket, and has its state."""
        return self.placement is None or self.placement.owns(bucket)

    # -- a bucket's next step -------------------------------------------------------------------------------

    def next_step(self, bucket: Bucket) -> NextStep:
        """Return the method and the phase of the bucket's next step."""
        # Some drivers learn about a tensor with its first gradient, so a loaded state may have to wait for its tensor
        state = self.states.get(bucket.spec.name) or self._claim(bucket)
        step = state.step if state else 0
        restart = state.restart if state else (0, 0)
        # The ranks agreed on a trigger in the status of an earlier step; it takes effect now
        if state and restart[0] < state.triggers:
            restart = (state.triggers, step)
        method = bucket.program.at(step)
        phase = 0
        flushes = self.fallback.verdict is Verdict.FLUSH and method.feedback != "none"
        if self.uncompressed or (flushes and state and state.flushed):
            method = UNCOMPRESSED
        elif flushes:
            method = Flush(share=self.fallback.share, beta=feedback.beta(method))
        else:
            phase = method.phase_of(step - max(bucket.program.since(step), restart[1]))
        dtype = "float64" if bucket.spec.dtype == "float64" and method.keeps_float64 else "float32"
        return NextStep(bucket, state, method, phase, restart, dtype)

    def note_begun(self, bucket: Bucket) -> None:
        """Report the beginning of an exchange to the observers.

        Drivers that exchange buckets separately do not see the end of a step. So the second exchange of a bucket in a
        round starts a new round.
        """
        if bucket.spec.name in self._committed:
            self.begin_round()
        self._can_discard = True
        for observer in self.observers:
            observer.begun(self.rank, bucket.spec.name, bucket.spec.size * itemsize(bucket.spec.dtype))

    # -- commit and undo ------------------------------------------------------------------------------------

    def swap(self, new: Mapping[str, BucketState], begun_in: int | None = None) -> None:
        """Replace the states of these buckets in one assignment.

        Args:
            new: {bucket name: new state}.
            begun_in: the round in which the exchanges began. If it is over, the optimizer has used the results, and
                :meth:`discard` does not undo them.
        """
        if begun_in is not None and begun_in != self.round:
            self._previous = {**self._previous, **new}
        else:
            self._committed |= new.keys()
        self.states = {**self.states, **new}

    def end_flush(self) -> None:
        """End a step that sent a share of the residuals."""
        fallback = self.fallback
        if fallback.verdict is not Verdict.FLUSH:
            return
        fallback.num_flushed += 1
        states = [state for state in self.states.values() if state.bucket.program.at(state.step).feedback != "none"]
        if fallback.num_flushed < PATIENCE and not all(state.flushed for state in states):
            return
        fallback.verdict = Verdict.DENSE
        kept = [state for state in states if feedback.RESIDUAL in state.slots]
        found = [self.find(name) for state in kept for name in _names(state.bucket)]
        if left := [spec.name for spec, residual in found if residual is not None and bool(residual.any())]:
            log.warn_once(
                f"rank {self.rank} drops the residuals of {log.first_names(left)}: they had no gradient for "
                f"{fallback.num_flushed} steps, or exceeded the range of float16"
            )
            cleared = [{**state.slots, feedback.RESIDUAL: 0 * state.slots[feedback.RESIDUAL]} for state in kept]
            new = [replace(state, slots=slots) for state, slots in zip(kept, cleared, strict=True)]
            self.states = {**self.states, **{state.bucket.spec.name: state for state in new}}

    def begin_round(self) -> None:
        """Begin a new round, which :meth:`discard` can undo."""
        self.round += 1
        self._previous_fallback = (self.fallback.verdict, self.fallback.num_flushed)
        self._dense_trial = self.fallback.uncompressed
        self._can_discard = True
        self._previous = self.states
        self._committed = set()

    def end_round(self) -> None:
        """Close the round because the optimizer has used its results. It cannot be discarded any more."""
        self.begin_round()
        self._can_discard = False

    def discard(self) -> None:
        """Restore the states before the last step. After a step with an Inf or a NaN this is a no-op.

        Raises:
            RuntimeError: there was no step, it was discarded already, or a state was loaded after it.
        """
        if not self._can_discard:
            raise RuntimeError("there is no step to discard: none since the last discard(), or a state was loaded")
        self._can_discard = False
        # The second buffers are in order: a step always writes to the one that the current state does not use
        self.states = self._previous
        self.late = {}
        self.fallback.verdict, self.fallback.num_flushed = self._previous_fallback
        self.trigger_requests -= self._committed
        self._committed = set()

    def note_step(self, began: float, ended: float, blocked: float | None = None, waited: float = 0.0) -> None:
        """Record the duration of a finished step in :attr:`ledger` and :attr:`fallback`.

        Paused steps are not recorded. The ledger's mean also omits uncompressed steps, and :attr:`fallback` omits
        warm-up steps.

        Args:
            began: time of the first gradient, in seconds.
            ended: time at which the last result was available.
            blocked: seconds in which the program waited for the exchange; by default the whole time.
            waited: seconds of waiting that the ledger does not count.
        """
        # Steps that also send residuals are not typical
        gives_up = self.fallback.verdict in (Verdict.FLUSH, Verdict.DENSE)
        counts = not (self.uncompressed or gives_up)
        self.ledger.note_step(began, ended - began if blocked is None else blocked, waited, counts)
        if self.paused or not self.fallback.compares:
            return
        if any(state.bucket.program.at(state.step).id != "none" for state in self.states.values()):
            self.fallback.note(began, ended)

    # -- comparisons between ranks --------------------------------------------------------------------------

    def verifies(self) -> bool:
        """Return whether the ranks compare checksums in the next step."""
        every = self.plan.verify_every  # the step count is equal on all ranks, so all compare in the same step
        return self.world_size > 1 and every > 0 and self.steps_done() % every == 0

    def steps_done(self) -> int:
        """Return the largest step count of all tensors."""
        return max(self.steps().values(), default=0)

    def forget_lengths(self) -> None:
        """Clear the known payload lengths, because some rank replaced its state and cannot know them."""
        for memory in self.memory.values():
            memory.lengths.clear()
        self.replaced = False

    # -- triggers -------------------------------------------------------------------------------------------

    def report_metrics(self, metrics: Mapping[str, float]) -> None:
        """Pass metrics to the methods, and request a trigger if a method wants one.

        Args:
            metrics: {name: value}, such as {"loss": 0.7}.
        """
        methods = {self.next_step(state.bucket).method for state in self.states.values()}
        for metric, value in metrics.items():
            value = float(value) if np.isfinite(value) else float("inf")  # a loss of NaN counts as the worst
            low, high = self.metrics.get(metric, (value, value))
            low, high = self.metrics[metric] = (min(low, value), max(high, value))
            self.trigger_requested |= any(method.wants_trigger(metric, value, low, high) for method in methods)

    def take_trigger_request(self) -> bool:
        """Return whether this rank requests a trigger, and clear the request."""
        requested = self.trigger_requested or bool(self.trigger_requests)
        self.trigger_requested = False
        self.trigger_requests.clear()
        return requested

    def restart(self, names: Collection[str]) -> None:
        """Restart the phases of these buckets in the next step. All ranks agreed, so ``discard()`` keeps it."""

        def restarted(states: Mapping[str, BucketState]) -> dict[str, BucketState]:
            known = [name for name in names if name in states]
            return {**states, **{name: replace(states[name], triggers=states[name].triggers + 1) for name in known}}

        # Also in the states that discard() restores: the other ranks have agreed, and nobody will ask them again
        self.states = restarted(self.states)
        self._previous = restarted(self._previous)
        self.metrics.clear()

    # -- queries --------------------------------------------------------------------------------------------

    def buckets(self) -> list[Bucket]:
        """Return the buckets that were exchanged."""
        return [state.bucket for state in self.states.values()]

    def names(self) -> list[str]:
        """Return the names of all tensors that were exchanged."""
        return [member.name for bucket in self.buckets() for member in bucket.members]

    def steps(self) -> dict[str, int]:
        """Return {tensor name: steps done}, without zeros. Loaded tensors that have not appeared yet are included."""
        done = {member.name: state.step for state in self.states.values() for member in state.bucket.members}
        return {name: step for name, step in {**self._loaded["steps"], **done}.items() if step}

    def ages(self) -> snapshot.Ages:
        """Return the progress of each tensor; see :func:`hvdcompress.engine.saving.snapshot.ages`."""
        restarts = dict(self._loaded["restarts"])
        for state in self.states.values():
            if state.triggers:
                restarts |= {member.name: (state.triggers, *state.restart) for member in state.bucket.members}
        return snapshot.ages(self.steps(), restarts)

    def find(self, name: str) -> tuple[TensorSpec, Array | None]:
        """Return a tensor and a flat view of its residual, float32 [n]; None if the method keeps no residual.

        Raises:
            KeyError: no tensor of that name was exchanged.
        """
        for state in self.states.values():
            residual = state.slots.get(feedback.RESIDUAL)
            for member, (start, stop) in zip(state.bucket.members, state.bucket.spans, strict=True):
                if member.name == name:
                    return member, None if residual is None else residual[start:stop]
        raise KeyError(f"no tensor {name!r} was exchanged so far; known: {', '.join(sorted(self.names())) or 'none'}")

    def residual(self, name: str) -> np.ndarray[Any, Any]:
        """Return a copy of the residual of one tensor, in its shape; zeros if the method keeps none.

        Raises:
            KeyError: no tensor of that name was exchanged.
        """
        spec, flat = self.find(name)
        return np.zeros(spec.shape, np.float32) if flat is None else np.asarray(flat).reshape(spec.shape).copy()

    def warn_about_unused(self, specs: Sequence[TensorSpec] = ()) -> None:
        """Warn on rank 0 about rules that match no tensor, and about loaded state that no tensor uses.

        Args:
            specs: all tensors. Drivers that learn about tensors as they appear omit it; then the check runs after
                ``SEEN`` steps.
        """
        if not specs and self.plan.rules and self.ledger.steps == SEEN:
            specs = [spec for bucket in self.buckets() for spec in bucket.members]
        for rule in self.plan.unused_rules(specs) if specs and self.rank == 0 else ():
            known = log.first_names([spec.name for spec in specs])
            log.warn_once(f"the plan's rule with match {{{rule.match}}} applies to no tensor; the tensors are {known}")
        if self._loaded["steps"] and self.round == self._claimed_by and self.rank == 0:
            loaded = log.first_names([*self._loaded["steps"]])
            log.warn_once(
                f"no tensor has used the loaded state of {loaded} so far; the tensors are "
                f"{log.first_names(self.names())}. If the tensors were renamed, their residuals are lost"
            )

    # -- regrouping -----------------------------------------------------------------------------------------

    def regroup(self, buckets: Sequence[Bucket]) -> None:
        """Move the states of tensors into these buckets. A tensor in none of them becomes a bucket of its own."""
        groups = {_names(bucket) for bucket in buckets}
        present = {name for bucket in buckets for name in _names(bucket)}
        changed = [state for state in self.states.values() if _names(state.bucket) not in groups]
        moved = [state for state in changed if not present.isdisjoint(_names(state.bucket))]
        if not moved:
            return
        saved = {**self._loaded, **self._tables(moved)}
        absent = [spec for state in moved for spec in state.bucket.members if spec.name not in present]
        singles = [bucket for spec in absent for bucket in self.group([spec], None, {})]
        kept = [self._restored(saved, bucket, whole=False) for bucket in singles]
        # Treat the moved states like loaded ones: the first exchange of each new bucket claims its part
        self.replaced = True
        self.forget(state.bucket.spec.name for state in moved)
        self.put([state for state in kept if state])
        self._loaded = snapshot.without_buckets(saved, singles)

    def forget(self, names: Iterable[str]) -> None:
        """Delete the states of these buckets."""
        gone = set(names)
        self.states = {name: state for name, state in self.states.items() if name not in gone}
        self._previous = {name: state for name, state in self._previous.items() if name not in gone}
        for name in gone:
            self.memory.pop(name, None)
            self.late.pop(name, None)

    def release(self) -> None:
        """Delete all states."""
        self.states = {}
        self._previous = {}
        self.late = {}
        self.memory.clear()
        self.replaced = True
        self._can_discard = False

    def put(self, states: Iterable[BucketState]) -> None:
        """Add states that no step produced. ``discard()`` keeps them."""
        new = {state.bucket.spec.name: state for state in states}
        if new:
            self.states = {**self.states, **new}
            self._previous = {**self._previous, **new}

    # -- saved and restored ---------------------------------------------------------------------------------

    def state_dict(self, driver: str = "loopback") -> dict[str, Any]:
        """Return this rank's state as plain data with copied arrays; ``snapshot.py`` documents the format.

        Args:
            driver: the driver's name, which is saved with the state.
        """
        head: dict[str, Any] = {"format": snapshot.FORMAT, "plan": self.plan.to_dict()}
        head |= {"world": self.world_size, "rank": self.rank}
        if self.placement:
            head["nodes"] = {**self.placement.nodes._asdict(), "owners": dict(self.placement.owners)}
        head[snapshot.MADE_BY] = snapshot.made_by(driver)
        head["fallback"] = self.fallback.state()
        head["metrics"] = {metric: list(pair) for metric, pair in self.metrics.items()}
        return head | self._tables(self.states.values())

    def _tables(self, states: Iterable[BucketState]) -> dict[str, dict[str, Any]]:
        """Return the tables of these states and of loaded tensors that have not appeared yet."""
        tables = snapshot.tables(states)
        return {table: {**self._loaded[table], **tables[table]} for table in snapshot.TABLES}

    def load_state_dict(self, saved: snapshot.Saved, group: Callable[[], Sequence[Bucket]] | None = None) -> None:
        """Load a saved state completely or, on any error, not at all.

        Args:
            saved: the value that :meth:`state_dict` returned.
            group: returns all buckets, in :attr:`placement` as it is then. The saved state must have no other tensors.
                None if the buckets are not known yet: then each bucket claims its state when it appears.

        Raises:
            ValueError: format, number of ranks, rank or tensors do not match, or an array does not fit its slot. The
                message names the mismatch.
        """
        snapshot.check(saved)
        snapshot.check_origin(saved, self.world_size, self.rank, self.nodes)
        before = self.placement
        try:
            if before:  # the owners of tensors have their slots
                self.placement = replace(before, owners={**before.owners, **saved["nodes"]["owners"]})
            if group:
                buckets = group()
                known = {member.name for bucket in buckets for member in bucket.members}
                if unknown := sorted(saved["steps"].keys() - known):
                    raise ValueError(f"the saved state has tensors that the model does not have: {', '.join(unknown)}")
            else:  # the tensors of the other buckets have other owners now: each claims its state when it appears
                buckets = [each for each in self.buckets() if not (self.placement and self.placement.is_split(each))]
            found = [self._restored(saved, each) for each in buckets]
        except ValueError:
            self.placement = before
            raise
        self.release()
        self.put(state for state in found if state)
        self._loaded = snapshot.without_buckets(saved, self.buckets())
        self._claimed_by = self.round + SEEN
        self.metrics = {metric: (low, high) for metric, (low, high) in saved["metrics"].items()}
        self.fallback = Fallback.restored(self.fallback.on, saved.get("fallback"))
        if self.rank == 0 and (different := snapshot.differences(saved, self.plan)):
            log.warn_once(f"the saved state is of another training: {different}")

    def _restored(self, saved: snapshot.Saved, bucket: Bucket, whole: bool = True) -> BucketState | None:
        if self.owns(bucket):
            return snapshot.restored(saved, bucket, self.copy, whole)
        return snapshot.progress(saved, bucket, self.copy)

    def _claim(self, bucket: Bucket) -> BucketState | None:
        """Return the loaded state of a bucket that appears for the first time; None if there is none."""
        state = self._restored(self._loaded, bucket, whole=False)
        if state:
            self._loaded = snapshot.without_buckets(self._loaded, [bucket])
            self.put([state])
        return state


def _names(bucket: Bucket) -> tuple[str, ...]:
    return tuple(member.name for member in bucket.members)
