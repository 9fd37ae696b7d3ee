"""One bucket's exchange while it is under way, without I/O.

Whoever carries verbs out calls :meth:`Exchange.advance` with each result until ``reduced`` is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdcompress.engine.collectives import Pending, by_rank
from hvdcompress.engine.state import Pieces, State
from hvdcompress.engine.together import Together
from hvdcompress.method import AllGather, Array, Communication, Context, Method, Reduced, Verb
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Flag
from hvdcompress.plan import Bucket

UNEVEN = "; where lengths differ, the method says `uneven = True`, or its AllGather `fixed=False`"


class ExchangeError(RuntimeError):
    """An exchange failed; the message names the tensor, the method, the round and the rank."""


@dataclass(eq=False)
class Exchange:
    """One bucket's exchange while it is under way.

    Attributes:
        worked: told of codec work: (bucket's name, seconds, whether that was the last of it).
        answered: told of each collective whose result has come: (this exchange, seconds since it was asked for).
        state, method: whose it is.
        ctx: its circumstances; of a bucket whose method runs on each tensor, the bucket's.
        contexts: those of each tensor then; otherwise none.
        ops: the array verbs of the gradients' library.
        dtype: what it is computed in.
        scale: what gradients are multiplied by on their way in.
        spare: the buffers that receive the new slots.
        restart: the state's ``restart`` if the exchange is committed.
        waiting: of a joined bucket on a device, or of small tensors, the gradients that have come, until all are
            there; otherwise None.
        x: what is exchanged [n]: gradient + residual, or the gradient; None before it is there. Where what is sent is
            made of each gradient as it comes, it is the last of them.
        finite: whether all gradients that came had neither Inf nor NaN; on a device a tensor of one.
        outs: the members' flat arrays that receive the reduced gradient, in the order of the bucket.
        cleared: of each, whether it is 0 everywhere.
        communication: the method's generator, or those of several tensors; None before there is one.
        verb: what the method waits for; None when it has returned.
        reduced: what it returned; of several tensors in their order.
        round: the number of the collective that it waits for.
        lengths: what this step adds to the state's ``lengths``, by :attr:`call`.
        pending: that collective under way.
        momentum: what the optimizer's momentum buffer contains after this step (:attr:`State.momentum`).
        updates: ``Momentum.updates`` of the members, before it.
        paused: whether the state stays as it is.
        begun_in: ``Rank.round`` when it began.
        over: of members by their number, what their float16 results could not hold, as this rank's residual keeps it.
        asked_at: when it was asked for, by ``time.perf_counter``.
    """

    worked: Callable[[str, float, bool], None]
    answered: Callable[[Exchange, float], None]
    state: State
    method: Method
    ctx: Context
    contexts: list[Context]
    ops: Ops
    dtype: str
    scale: float
    spare: dict[str, Array]
    restart: tuple[int, int]
    waiting: list[Array | None] | None = None
    x: Array | None = None
    finite: Flag = True
    outs: list[Array | None] = field(default_factory=list)
    cleared: list[bool] = field(default_factory=list)
    communication: Communication | Together | None = None
    verb: Verb | None = None
    reduced: list[Reduced] | None = None
    round: int = -1
    lengths: dict[Hashable, int] = field(default_factory=dict)
    pending: Pending | None = None
    momentum: Pieces = ()
    updates: tuple[int | None, ...] = ()
    paused: bool = False
    begun_in: int = 0
    over: dict[int, Array] = field(default_factory=dict)
    asked_at: float = 0.0

    @property
    def bucket(self) -> Bucket:
        """What is exchanged."""
        return self.state.bucket

    @property
    def name(self) -> str:
        """The bucket's name."""
        return self.state.bucket.spec.name

    def advance(self, result: Any = None) -> Verb | None:
        """Give the method the result of its verb; returns the next verb, or None when the method is done.

        Raises:
            ExchangeError: the method failed.
        """
        assert self.communication is not None
        began = time.perf_counter()
        if self.verb is not None:
            self.answered(self, began - self.asked_at)
        try:
            self.verb = self.communication.send(result)
            self.round += 1
        except StopIteration as stop:
            self.verb, self.reduced = None, stop.value if self.contexts else [stop.value]
        except Exception as error:
            raise self.failed(error) from error
        finally:
            self.asked_at = time.perf_counter()
            self.worked(self.name, self.asked_at - began, self.reduced is not None)
        return self.verb

    @property
    def call(self) -> Hashable:
        """What an all-gather's length must depend on alone, if it is fixed."""
        return self.method, self.ctx.phase, self.ctx.triggers, self.round

    def knows_lengths(self) -> bool:
        """Whether the all-gather that is asked for is known to bring payloads of this rank's length from all.

        Raises:
            ExchangeError: it is said to have one length, and had another one before.
        """
        if not (isinstance(self.verb, AllGather) and self.verb.fixed):
            return False
        before, now = self.state.lengths.get(self.call), len(self.verb.x)
        if before not in (None, now):
            raise self.failed(
                ValueError(f"an all-gather of fixed length had {before} bytes, and now has {now}{UNEVEN}")
            )
        return before is not None

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """Note these lengths of payloads, in rank order, if they are to be one.

        Raises:
            ExchangeError: they are not.
        """
        if not (isinstance(self.verb, AllGather) and self.verb.fixed):
            return
        each = by_rank(lengths, self.ctx.world)
        if len(set(each)) > 1:
            raise self.failed(ValueError(f"an all-gather of fixed length has {each} bytes, by rank{UNEVEN}"))
        self.lengths[self.call] = each[0]

    def where(self, count: int = 1) -> str:
        """What this rank waits for, in words, as the first of ``count`` exchanges."""
        more = f", and {count - 1} more" if count > 1 else ""
        return f"tensor {self.name!r} (method {self.method.id}, round {max(self.round, 0)}{more})"

    def failed(self, error: Exception) -> ExchangeError:
        """What an error of the method's is raised as."""
        name = self.communication.now if isinstance(self.communication, Together) else self.name
        where = f"method {self.method.id}, round {max(self.round, 0)}, rank {self.ctx.rank}"
        return ExchangeError(f"tensor {name!r} ({where}): {type(error).__name__}: {error}")
