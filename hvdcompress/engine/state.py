"""One rank's state under one plan: the states of all buckets, and where they are in their programs.

An exchange reads a :class:`~hvdcompress.engine.bucket_state.BucketState` and builds the next one. ``engine/commit.py``
swaps all new states in at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hvdcompress.engine.bucket_state import BucketState, Memory, itemsize
from hvdcompress.engine.fallback import Fallback, Verdict
from hvdcompress.engine.safety import verify
from hvdcompress.engine.saving import origin, snapshot
from hvdcompress.engine.telemetry import log
from hvdcompress.engine.telemetry.ledger import Ledger
from hvdcompress.engine.telemetry.observer import Observer
from hvdcompress.engine.telemetry.timing import StepTimes
from hvdcompress.method import Array, Method, TensorSpec
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import feedback
from hvdcompress.parts.momentum import Momentum
from hvdcompress.plan import Bucket, Plan
from hvdcompress.registry import get

UNCOMPRESSED = get("none")
FLUSH = get("none", feedback="plain")  #: sends the residual, too
SEEN = 10  #: number of steps after which the tensors that have come are taken for all there are


class Turn(NamedTuple):
    """The next step of a bucket: what its program says for it.

    Attributes:
        bucket: the bucket.
        state: its state; None before its first step.
        method: the method of the step.
        phase: index into ``method.phases``.
        restart: ``BucketState.restart`` of the state after the step.
    """

    bucket: Bucket
    state: BucketState | None
    method: Method
    phase: int
    restart: tuple[int, int]

    @property
    def dtype(self) -> str:
        """The dtype of the computation: float32, or float64 for float64 gradients under a ``wide`` method."""
        return "float64" if self.bucket.spec.dtype == "float64" and self.method.wide else "float32"

    @property
    def passes(self) -> bool:
        """Whether a stock float32 all-reduce of the gradient itself is the whole exchange."""
        method = self.method
        if not method.identity or method.feedback != "none" or self.bucket.spec.dtype != "float32":
            return False
        # momentum that was cancelled before has to be given back once
        return len(self.bucket.members) == 1 and not (self.state and self.state.momentum.content)

    def carried_elements(self) -> int | None:
        """Return the length of the payload if a stock float32 all-reduce can carry it; None if it cannot."""
        if type(self.method).piggyback is Method.piggyback or len(self.bucket.members) > 1 or self.dtype != "float32":
            return None
        return self.method.piggyback(self.bucket.spec, self.phase, self.state.slots if self.state else {})


class RankState:
    """The states of all buckets on one rank.

    Attributes:
        states: by bucket name, of every bucket that has gone through. A dictionary that is replaced, never changed.
        memory: by bucket name, buffers that are reused.
        observers: told of every event; the ledger is the first.
        asks_for_trigger: whether this rank asks all ranks to restart their methods' schedules.
        asking: buckets whose method has asked for that in its last exchange.
        paused: whether the user wants gradients to be reduced uncompressed, and states to stay as they are.
        fallback: whether compression pays.
        times: how long recent steps took.
        round: the number of the step. Where buckets are exchanged by themselves (FSDP2, TensorFlow), a round consists
            of several of :class:`~hvdcompress.engine.step.Step`.
        gradient_norm: the norm of all reduced gradients of the last step, before clipping; NaN if it was not measured.
        optimizer: returns the momentum that the optimizer applies to a tensor, by its name; None if that is not known.
        driver: the driver's name, which is saved with the state.
    """

    def __init__(self, plan: Plan, rank: int, world: int, ledger: Ledger | None = None):
        self.plan = plan
        self.rank = rank
        self.world = world
        self.ledger = ledger or Ledger(world, rank)
        self.observers: list[Observer] = [self.ledger, *log.observers()]
        self.states: Mapping[str, BucketState] = {}
        self.memory: dict[str, Memory] = {}
        self.asks_for_trigger = False
        self.asking: set[str] = set()
        self.paused = False
        self.fallback = Fallback(plan.fallback and world > 1)
        self.times = StepTimes(self.ledger, rank)
        self._tries_without = False
        self.round = 0
        self.replaced = False  # a state was replaced since the ranks last forgot lengths
        self.metrics: dict[str, tuple[float, float]] = {}  # metric -> least and greatest since the last trigger
        self.gradient_norm = float("nan")
        self.optimizer: Callable[[str], Momentum | None] = lambda name: None
        self.driver = "loopback"
        self._previous: Mapping[str, BucketState] = {}  # states at the beginning of the round
        self._committed: set[str] = set()  # buckets whose state was swapped in this round
        self._can_discard = False
        self._loaded: snapshot.Saved | None = None  # of tensors that have not come yet
        self._claimed_by = 0  # the round by which they should have come
        self._copy: snapshot.Copy = np.concatenate

    @property
    def uncompressed(self) -> bool:
        """Whether this step's gradients are reduced uncompressed, and states stay as they are."""
        return self.paused or self._tries_without

    # -- a bucket's next step -------------------------------------------------------------------------------

    def turn(self, bucket: Bucket) -> Turn:
        """Return what the program says for the bucket's next step."""
        # Under drivers that get to know tensors as they come, a loaded state waits until its tensor comes
        state = self.states.get(bucket.spec.name) or self._claim(bucket)
        step = state.step if state else 0
        restart = state.restart if state else (0, 0)
        # A trigger that the ranks agreed on with the status of an earlier step takes effect in this one
        if state and restart[0] < state.triggers:
            restart = (state.triggers, step)
        if self.uncompressed:
            return Turn(bucket, state, UNCOMPRESSED, 0, restart)
        method = bucket.program.at(step)
        if self.fallback.verdict is Verdict.FLUSH and method.feedback != "none":
            return Turn(bucket, state, FLUSH, 0, restart)
        phase = method.phase_of(step - max(bucket.program.since(step), restart[1]))
        return Turn(bucket, state, method, phase, restart)

    def state_of(self, turn: Turn, like: Array, ops: Ops) -> BucketState:
        """Return the state that an exchange begins with: zeros before the first one.

        Raises:
            ValueError: a tensor had another shape before.
        """
        bucket = turn.bucket
        state = turn.state or BucketState.zeros(bucket, like, ops)
        for before, now in zip(state.bucket.members, bucket.members, strict=True) if state.bucket is not bucket else ():
            if before.shape != now.shape:
                raise ValueError(f"tensor {now.name!r} had shape {before.shape} before and has {now.shape} now")
        return state

    def note_begun(self, bucket: Bucket) -> None:
        """Tell observers that an exchange begins.

        The second exchange of a bucket in a round begins another round, because drivers that exchange buckets by
        themselves do not see the end of a step.
        """
        if bucket.spec.name in self._committed:
            self.begin_round()
        self._can_discard = True
        for observer in self.observers:
            observer.begun(self.rank, bucket.spec.name, bucket.spec.size * itemsize(bucket.spec.dtype))

    def pass_on(self, bucket: Bucket, like: Array, ops: Ops) -> Turn:
        """Note that the driver's framework reduces a gradient itself.

        Args:
            bucket: a bucket whose turn ``passes``.
            like: an array on the gradient's device.
            ops: the array ops of its library.

        Returns:
            The turn, for ``commit.conclude``.
        """
        turn = self.turn(bucket)
        self.note_begun(bucket)
        return turn._replace(state=self.state_of(turn, like, ops))

    def memory_of(self, name: str) -> Memory:
        """Return the buffers of a bucket."""
        found = self.memory.get(name)
        if found is None:
            found = self.memory[name] = Memory()
        return found

    # -- commit and undo ------------------------------------------------------------------------------------

    def swap(self, new: Mapping[str, BucketState], begun_in: int | None = None) -> None:
        """Replace the states of these buckets, all at once.

        Args:
            new: by bucket name.
            begun_in: the round in which their exchanges began, if it may have ended meanwhile: then
                :meth:`discard` does not take them back.
        """
        if begun_in is not None and begun_in != self.round:
            self._previous = {**self._previous, **new}
        else:
            self._committed |= new.keys()
        self.states = {**self.states, **new}

    def begin_round(self) -> None:
        """Begin a new step: from now on :meth:`discard` takes this one back."""
        self.round += 1
        self._tries_without = self.fallback.uncompressed
        self._can_discard = True
        self._previous = self.states
        self._committed = set()

    def end_round(self) -> None:
        """The optimizer has used the results: nothing can be taken back."""
        self.begin_round()
        self._can_discard = False

    def discard(self) -> None:
        """Swap back to the states before the last step. One that had an Inf or a NaN has changed nothing.

        Raises:
            RuntimeError: there was none, or it was discarded already, or a state was loaded since.
        """
        if not self._can_discard:
            raise RuntimeError("there is no step to discard: none since the last discard(), or a state was loaded")
        self._can_discard = False
        # Second buffers need no care: each step takes the one that the current state does not use
        self.states = self._previous
        self.asking -= self._committed
        self._committed = set()

    def note_step(self, began: float, ended: float, blocked: float | None = None, waited: float = 0.0) -> None:
        """Tell :attr:`times` and :attr:`fallback` of a step that has ended; see their methods ``note``.

        Steps of a pause do not count. For the times, nor do uncompressed steps and those of a comparison; for the
        fallback, nor does a warm-up.
        """
        every = self.plan.cosine_every
        compared = every > 0 and self.steps_done() % every == 0
        # The last step before compression is given up sends everything
        gives_up = self.fallback.verdict is Verdict.DENSE
        counts = not (self.uncompressed or compared or gives_up)
        self.times.note(began, ended - began if blocked is None else blocked, waited, counts)
        if self.paused or not self.fallback.compares:
            return
        if any(state.bucket.program.at(state.step).id != "none" for state in self.states.values()):
            self.fallback.note(began, ended)

    # -- what ranks have alike ------------------------------------------------------------------------------

    def verifies(self) -> bool:
        """Return whether ranks compare their checksums in the next step."""
        every = self.plan.verify_every  # steps are alike on all ranks, so all compare in the same step
        return self.world > 1 and every > 0 and self.steps_done() % every == 0

    def compares(self) -> bool:
        """Return whether the results of the next step are compared with the uncompressed average."""
        every = self.plan.cosine_every
        return every > 0 and not self.uncompressed and (self.steps_done() + 1) % every == 0

    def steps_done(self) -> int:
        """Return the steps of the tensor that has done most."""
        return max(self.steps().values(), default=0)

    def checksums(self, host: verify.Host = np.asarray) -> dict[str, int]:
        """Return the checksums of the state that all ranks must have alike; ``host`` brings an array into numpy."""
        return verify.shared_slots(list(self.states.values()), host)

    def forget_lengths(self) -> None:
        """Some rank's state was replaced: all tell each other again how long their payloads are."""
        for memory in self.memory.values():
            memory.lengths.clear()
        self.replaced = False

    # -- triggers -------------------------------------------------------------------------------------------

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Show metrics to the methods. Ask for a trigger if one of them wants to restart."""
        methods = {self.turn(state.bucket).method for state in self.states.values()}
        for metric, value in metrics.items():
            value = float(value) if np.isfinite(value) else float("inf")  # a loss of NaN counts as the worst
            low, high = self.metrics.get(metric, (value, value))
            low = min(low, value)
            high = max(high, value)
            self.metrics[metric] = (low, high)
            self.asks_for_trigger |= any(method.notices(metric, value, low, high) for method in methods)

    def take_request(self) -> bool:
        """Return whether this rank asks for a trigger, and take the request back."""
        asked = self.asks_for_trigger or bool(self.asking)
        self.asks_for_trigger = False
        self.asking.clear()
        return asked

    def restart(self, names: Collection[str]) -> None:
        """All ranks agreed: the schedules of these buckets restart with the next step. ``discard()`` keeps that."""

        def restarted(states: Mapping[str, BucketState]) -> dict[str, BucketState]:
            more = {name: replace(states[name], triggers=states[name].triggers + 1) for name in names if name in states}
            return {**states, **more}

        # Also in the states that discard() goes back to: the other ranks have agreed, and are not asked again
        self.states = restarted(self.states)
        self._previous = restarted(self._previous)
        self.metrics.clear()

    # -- what is known --------------------------------------------------------------------------------------

    def buckets(self) -> list[Bucket]:
        """Return the buckets that have gone through."""
        return [state.bucket for state in self.states.values()]

    def names(self) -> list[str]:
        """Return the names of all tensors that have gone through."""
        return [member.name for bucket in self.buckets() for member in bucket.members]

    def steps(self) -> dict[str, int]:
        """Return steps done, by tensor, where there are any; of loaded tensors that have not gone through, too."""
        done = {member.name: state.step for state in self.states.values() for member in state.bucket.members}
        loaded = self._loaded["steps"] if self._loaded else {}
        return {name: step for name, step in {**loaded, **done}.items() if step}

    def ages(self) -> snapshot.Ages:
        """Return where tensors are in their programs; see :func:`hvdcompress.engine.saving.snapshot.ages`."""
        restarts = dict(self._loaded["restarts"]) if self._loaded else {}
        for state in self.states.values():
            if state.triggers:
                restarts |= {member.name: (state.triggers, *state.restart) for member in state.bucket.members}
        return snapshot.ages(self.steps(), restarts)

    def find(self, name: str) -> tuple[BucketState, int]:
        """Return the state that a tensor belongs to, and its index among the members.

        Raises:
            KeyError: no tensor of that name has gone through.
        """
        for state in self.states.values():
            for index, member in enumerate(state.bucket.members):
                if member.name == name:
                    return state, index
        raise KeyError(f"no tensor {name!r} has gone through yet; known: {', '.join(sorted(self.names())) or 'none'}")

    def residual(self, name: str) -> Array | None:
        """Return the residual of one tensor, flat, a view; None where none is kept.

        Raises:
            KeyError: no tensor of that name has gone through.
        """
        state, index = self.find(name)
        start, stop = state.bucket.spans[index]
        residual = state.slots.get(feedback.RESIDUAL)
        return None if residual is None else residual[start:stop]

    def measured_norm(self) -> float:
        """Return :attr:`gradient_norm`.

        Raises:
            RuntimeError: the plan has no ``clip_norm``.
        """
        if self.plan.clip_norm is None:
            raise RuntimeError("norms are measured where the plan has clip_norm; inf measures without clipping")
        return self.gradient_norm

    def num_state_bytes(self) -> int:
        """Return the memory held for state, second buffers included."""
        holders: list[BucketState | Memory] = [*self.states.values(), *self.memory.values()]
        arrays = {id(array): array for holder in holders for array in holder.arrays()}
        return sum(int(array.nbytes) for array in arrays.values())

    def warn_of_what_is_idle(self, specs: Sequence[TensorSpec] = ()) -> None:
        """Log, on rank 0, which rules of the plan apply to no tensor, and which loaded state no tensor has claimed.

        Args:
            specs: all tensors. Without them, where a driver gets to know them as they come, those that have come after
                some steps.
        """
        if not specs and self.plan.rules and self.ledger.steps == SEEN:
            specs = [spec for bucket in self.buckets() for spec in bucket.members]
        for rule in self.plan.idle_rules(specs) if specs and self.rank == 0 else ():
            there = log.some([spec.name for spec in specs])
            log.warn_once(f"the rule for {{{rule.match}}} applies to no tensor; there are {there}")
        if self._loaded and self.round == self._claimed_by and self.rank == 0:
            log.warn_once(
                f"the state that was loaded of {log.some([*self._loaded['steps']])} is used by no tensor so far: there "
                f"are {log.some(self.names())}; if tensors have other names now, their residuals are lost"
            )

    # -- other buckets --------------------------------------------------------------------------------------

    def regroup(self, buckets: Sequence[Bucket]) -> None:
        """Bring the state of tensors into these buckets. A tensor in none of them is by itself from now on."""
        groups = {_names(bucket) for bucket in buckets}
        here = {name for bucket in buckets for name in _names(bucket)}
        changed = [state for state in self.states.values() if _names(state.bucket) not in groups]
        moved = [state for state in changed if not here.isdisjoint(_names(state.bucket))]
        if not moved:
            return
        saved = {**(self._loaded or {}), **self._tables(moved)}
        left = [spec for state in moved for spec in state.bucket.members if spec.name not in here]
        alone = [bucket for spec in left for bucket in self.plan.buckets([spec])]
        kept = [snapshot.restored(saved, bucket, self._copy, whole=False) for bucket in alone]
        # The state of the tensors that are here waits, as if it had been loaded, for the first exchange of their bucket
        self.replaced = True
        self.forget(state.bucket.spec.name for state in moved)
        self.put([state for state in kept if state])
        self._loaded = snapshot.without(saved, alone)

    def forget(self, names: Iterable[str]) -> None:
        """Drop the states of these buckets, as if they had never come."""
        gone = set(names)
        self.states = {name: state for name, state in self.states.items() if name not in gone}
        self._previous = {name: state for name, state in self._previous.items() if name not in gone}
        for name in gone:
            self.memory.pop(name, None)

    def release(self) -> None:
        """Drop all states."""
        self._replace({})

    def put(self, states: Iterable[BucketState]) -> None:
        """Add states that are not the result of a step, so that ``discard()`` keeps them."""
        new = {state.bucket.spec.name: state for state in states}
        if new:
            self.states = {**self.states, **new}
            self._previous = {**self._previous, **new}

    def _replace(self, states: Mapping[str, BucketState]) -> None:
        self.states = self._previous = states
        self.memory.clear()
        self.replaced = True
        self._can_discard = False

    # -- saved and restored ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state as plain data, arrays copied; ``snapshot.py`` has the format."""
        head: dict[str, Any] = {"format": snapshot.FORMAT, "plan": self.plan.to_dict()}
        head |= {"world": self.world, "rank": self.rank}
        head[origin.MADE_BY] = origin.made_by(self.driver, self.optimizer, self.steps())
        head["fallback"] = self.fallback.state()
        head["metrics"] = {metric: list(pair) for metric, pair in self.metrics.items()}
        return head | self._tables(self.states.values())

    def _tables(self, states: Iterable[BucketState]) -> dict[str, dict[str, Any]]:
        """Return the tables of these states, and of what was loaded of tensors that have not come yet."""
        tables = snapshot.tables(states)
        waiting = self._loaded or dict.fromkeys(snapshot.TABLES, {})
        return {table: {**waiting[table], **tables[table]} for table in snapshot.TABLES}

    def load_state_dict(
        self, saved: snapshot.Saved, copy: snapshot.Copy, buckets: Sequence[Bucket] | None = None
    ) -> None:
        """Take over a saved state: all of it or, on any error, nothing.

        Args:
            saved: what :meth:`state_dict` returned.
            copy: makes a fresh array of a slot's saved parts.
            buckets: all there are; the state must have no other tensors. None if that is not known yet: then each
                bucket claims its state when it comes.

        Raises:
            ValueError: it is of another format, world, rank or set of tensors, or an array is not what its slot
                declares; the message says which.
        """
        snapshot.check_origin(saved, self.world, self.rank)
        if buckets is not None:
            known = {member.name for bucket in buckets for member in bucket.members}
            if unknown := sorted(saved["steps"].keys() - known):
                raise ValueError(f"the saved state has tensors that are not here: {', '.join(unknown)}")
        found = [snapshot.restored(saved, each, copy) for each in (self.buckets() if buckets is None else buckets)]
        self._replace({state.bucket.spec.name: state for state in found if state})
        self._loaded = snapshot.without(saved, self.buckets())
        self._copy = copy
        self._claimed_by = self.round + SEEN
        self.metrics = {metric: (low, high) for metric, (low, high) in saved["metrics"].items()}
        self.fallback.load(saved.get("fallback"))
        if self.rank == 0:
            here = origin.made_by(self.driver, self.optimizer, saved["steps"])
            if different := origin.differences(saved, self.plan, here):
                log.warn_once(f"the saved state is of another training: {different}")

    def _claim(self, bucket: Bucket) -> BucketState | None:
        """Return the state that was loaded for a bucket before it came, if there is one."""
        if not self._loaded:
            return None
        state = snapshot.restored(self._loaded, bucket, self._copy, whole=False)
        if state:
            self._loaded = snapshot.without(self._loaded, [bucket])
            self.put([state])
        return state


def _names(bucket: Bucket) -> tuple[str, ...]:
    return tuple(member.name for member in bucket.members)
