"""One bucket's exchange while it is under way, without I/O.

Whoever carries verbs out calls :meth:`Exchange.advance` with each result until ``reduced`` is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hvdcompress.engine.collectives import Pending
from hvdcompress.engine.state import State
from hvdcompress.engine.together import Together
from hvdcompress.method import Array, Communication, Context, Method, Reduced, Verb
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Flag
from hvdcompress.plan import Bucket


class ExchangeError(RuntimeError):
    """An exchange failed; the message names the tensor, the method, the round and the rank."""


@dataclass(eq=False)
class Exchange:
    """One bucket's exchange while it is under way.

    Attributes:
        worked: told of codec work: (bucket's name, seconds, whether that was the last of it).
        state, method: whose it is.
        ctx: its circumstances; of a bucket whose method runs on each tensor, the bucket's.
        contexts: those of each tensor then; otherwise none.
        ops: the array verbs of the gradients' library.
        dtype: what it is computed in.
        scale: what gradients are multiplied by on their way in.
        spare: the buffers that receive the new slots.
        restart: the state's ``restart`` if the exchange is committed.
        x: what is exchanged [n]: gradient + residual, or the gradient; None before it is there.
        finite: whether all gradients that came had neither Inf nor NaN; on a device a tensor of one.
        outs: the members' flat arrays that receive the reduced gradient, in the order of the bucket.
        cleared: of each, whether it is 0 everywhere.
        communication: the method's generator, or those of several tensors; None before there is one.
        verb: what the method waits for; None when it has returned.
        reduced: what it returned; of several tensors in their order.
        round: the number of the collective that it waits for.
        pending: that collective under way.
    """

    worked: Callable[[str, float, bool], None]
    state: State
    method: Method
    ctx: Context
    contexts: list[Context]
    ops: Ops
    dtype: str
    scale: float
    spare: dict[str, Array]
    restart: tuple[int, int]
    x: Array | None = None
    finite: Flag = True
    outs: list[Array | None] = field(default_factory=list)
    cleared: list[bool] = field(default_factory=list)
    communication: Communication | Together | None = None
    verb: Verb | None = None
    reduced: list[Reduced] | None = None
    round: int = -1
    pending: Pending | None = None

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
        try:
            self.verb = self.communication.send(result)
            self.round += 1
        except StopIteration as stop:
            self.verb, self.reduced = None, stop.value if self.contexts else [stop.value]
        except Exception as error:
            raise self.failed(error) from error
        finally:
            self.worked(self.name, time.perf_counter() - began, self.reduced is not None)
        return self.verb

    def where(self, count: int = 1) -> str:
        """What this rank waits for, in words, as the first of ``count`` exchanges."""
        more = f", and {count - 1} more" if count > 1 else ""
        return f"tensor {self.name!r} (method {self.method.id}, round {max(self.round, 0)}{more})"

    def failed(self, error: Exception) -> ExchangeError:
        """What an error of the method's is raised as."""
        name = self.communication.now if isinstance(self.communication, Together) else self.name
        where = f"method {self.method.id}, round {max(self.round, 0)}, rank {self.ctx.rank}"
        return ExchangeError(f"tensor {name!r} ({where}): {type(error).__name__}: {error}")
