"""THE CONTRACT: what a compression method is, and what it may ask of a network.

A method is a frozen value (its hyper-parameters) with a pure generator, :meth:`Method.exchange`.
It never sees Horovod, MPI, PyTorch or TensorFlow: it *yields* what it wants communicated, is sent
the result, and *returns* a :class:`Reduced`. Drivers do the I/O, so the same method file runs under
the loopback, PyTorch, TensorFlow and MPI drivers unchanged::

    def exchange(self, x, state, me, ops):
        payload = self.encode(x, state, me, ops)
        pieces = yield AllGather(payload)              # one payload of each rank, in rank order
        shares = [self.decode(piece, me, ops) for piece in pieces]
        return Reduced(total=concat(shares), own=shares[me.rank])

Most methods write only ``encode`` and ``decode``. Error feedback is not a method's business: a method
that inherits the field ``feedback`` is given ``x = gradient + residual`` (``parts/feedback.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field

Array = Any  #: a numpy array, or the framework's tensor; always flat (one dimension) inside a method


# -- what travels between a method and its driver ------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """The static facts about one gradient: its parameter's ``name``, its ``shape`` and its ``dtype``."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True)
class Slot:
    """One declared piece of state; the driver allocates it (zeros), saves it and restores it.

    ``scope``: "rank" (every rank has its own, e.g. a residual) or "shared" (equal on all ranks).
    ``merge``: what becomes of it when the number of ranks changes: "sum" (the sum over ranks is
    kept) or "keep" (any rank's copy serves).
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    scope: Literal["rank", "shared"] = "rank"
    merge: Literal["sum", "keep"] = "sum"


class Sparse(NamedTuple):
    """A sparse vector: ``index`` [m] int32 or int64, ``values`` [m] float32. Duplicate indices add up."""

    index: Array
    values: Array


@dataclass
class Reduced:
    """What an exchange ends with.

    ``total``: the sum over ranks of what was sent, dense [n] or :class:`Sparse`; equal on all ranks.
    ``own``: this rank's share of that sum, as the others decoded it; ``None`` where no feedback is kept.
    ``state``: new values of the method's own slots (fresh arrays; the old ones are never written).
    """

    total: Array | Sparse
    own: Array | Sparse | None = None
    state: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """Who is asking: one rank, at one step, for one tensor. Methods call it ``me``."""

    rank: int
    world: int
    step: int
    spec: TensorSpec
    seed: int = 0
    phase: int = 0
    seen: Any = None  #: what :meth:`Method.scan` found on its way over memory
    counters: dict[str, Any] = field(default_factory=dict)  #: figures for the ledger, e.g. "kept"


# -- the verbs: all that a method may ask of a network ------------------------------------------


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Sum (or elementwise maximum) over ranks. Sent back: an array like ``x``, equal on all ranks."""

    x: Array
    op: Literal["sum", "max"] = "sum"


@dataclass(frozen=True, eq=False)
class AllGather:
    """Every rank's ``x`` (uint8), in rank order. Sent back: a list with one array a rank.

    Lengths may differ between ranks only if every payload begins with a wire header, which tells
    its own length (``wire.py``).
    """

    x: Array


@dataclass(frozen=True, eq=False)
class Broadcast:
    """``make()`` of the rank ``root``, a uint8 array of ``num_bytes`` (the same on all ranks).

    A function, because only the root need do the work. Sent back: the array, on every rank.
    Horovod neither fuses nor caches broadcasts, so drivers send this as an int32 *sum* to which
    the other ranks give zeros, and every rank is charged the bytes: ``num_bytes`` is a multiple of 4.
    """

    make: Callable[[], Array]
    root: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class AllToAll:
    """``x`` (uint8) cut into one equal piece a rank, the r-th for rank r. Sent back: the pieces, in rank order."""

    x: Array


Verb = AllReduce | AllGather | Broadcast | AllToAll
Exchange = Generator[Verb, Any, Reduced]


# -- hyper-parameter types shared by methods -----------------------------------------------------


def _not_bool(value: object) -> object:
    """YAML's ``yes`` is a bool, and a bool passes for the number 1: refuse it."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not a boolean")
    return value


Number = BeforeValidator(_not_bool)
Density = Annotated[float, Number, Field(gt=0.0, le=1.0)]  #: kept / total
Share = Annotated[float, Number, Field(gt=0.0, le=1.0)]  #: a factor in (0, 1]
Count = Annotated[int, Number, Field(ge=1)]  #: a positive whole number
Values = Literal["fp32", "fp16", "bf16"]  #: how the values of a payload are written
FeedbackName = Literal["none", "plain", "lowpass"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A compression method: a frozen value that can be compared, hashed, and written to a plan.

    A subclass lives in ``methods/<id>.py``, is decorated with ``hvdcompress.registry.method``, and
    declares its hyper-parameters as dataclass fields; a wrong one is a ``ValueError`` that names it.
    """

    id: ClassVar[str] = ""  #: the file's name; set by the registry
    paper: ClassVar[str] = ""  #: one-line citation
    sends: ClassVar[str] = ""  #: one-line wire cost, for people
    needs_feedback: ClassVar[bool] = False  #: diverges or is badly biased without a residual
    wide: ClassVar[bool] = False  #: works in float64 on float64 gradients, others in float32
    rides: ClassVar[bool] = False  #: one float32 all-reduce is all it does: it can be the stock optimizer's own
    phases: ClassVar[tuple[str, ...]] = ("compress",)  #: collectives are fixed within a phase

    feedback: FeedbackName = "none"
    """What becomes of what was not sent: "none" (lost), "plain" (kept as a residual and added to the
    next gradient) or "lowpass" (plain, through a low-pass filter of factor ``beta``)."""
    beta: Share = 1.0
    """Low-pass factor of the residual, used with feedback "lowpass"; 1 is plain feedback."""

    def hyperparameters(self) -> dict[str, Any]:
        """Field names and values, as a plan writes them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def phase_of(self, step: int) -> int:
        """Index into ``phases`` of the phase that is on at ``step``."""
        return 0

    def state(self, spec: TensorSpec) -> dict[str, Slot]:
        """The method's own slots for one tensor (the residual belongs to ``parts/feedback.py``)."""
        return {}

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
        """Payload bytes a rank hands to its collectives for one tensor of ``spec`` in a step."""
        raise NotImplementedError

    def scan(self, gradient: Array, residual: Array, scale: float, out: Array, ops: Any) -> Any:
        """Write ``scale·gradient + residual`` into ``out`` and return what else that pass over memory saw.

        Override it to take, say, moments in the same pass; ``exchange`` finds the answer in ``me.seen``.
        """
        ops.accumulate(gradient, residual, scale, out)
        return None

    def encode(self, x: Array, state: dict[str, Array], me: Turn, ops: Any) -> Array:
        """``x`` [n] float32 -> this rank's payload, uint8 for an all-gather. Never writes ``x``."""
        raise NotImplementedError

    def decode(self, payload: Array, me: Turn, ops: Any) -> Sparse:
        """A payload of any rank -> what it stands for. Raises ``WireError`` on bytes that are no payload."""
        raise NotImplementedError

    def exchange(self, x: Array, state: dict[str, Array], me: Turn, ops: Any) -> Exchange:
        """The choreography. By default: encode, all-gather, decode; entries of different ranks add up."""
        pieces = yield AllGather(self.encode(x, state, me, ops))
        shares = [self.decode(piece, me, ops) for piece in pieces]
        total = Sparse(ops.concat([s.index for s in shares]), ops.concat([s.values for s in shares]))
        return Reduced(total=total, own=shares[me.rank])
