"""THE CONTRACT: what a compression method is, and what it may ask of a network.

A method is a frozen value (its hyper-parameters) with a pure generator, :meth:`Method.exchange`.
It never sees Horovod, MPI, PyTorch or TensorFlow: it *yields* what it wants communicated, is sent
the result, and *returns* a :class:`Reduced`. Drivers do the I/O, so the same method file runs under
the loopback, PyTorch, TensorFlow and MPI drivers unchanged::

    def exchange(self, x, state, ctx, ops):
        payload = self.encode(x, state, ctx, ops)
        pieces = yield AllGather(payload)              # one payload of each rank, in rank order
        shares = [self.decode(piece, ctx, ops) for piece in pieces]
        return Reduced(total=concat(shares), own=shares[ctx.rank])

Most methods write only ``encode`` and ``decode``. Error feedback is not a method's business: a method
that inherits the field ``feedback`` is given ``x = gradient + residual`` (``parts/feedback.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar, dataclass_transform

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from hvdcompress.ops.spec import Array, Ops, Sparse  # noqa: F401 (methods import all three from here)

# -- what travels between a method and its driver ------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """The static facts about one gradient: its parameter's ``name``, its ``shape`` and its ``dtype``.

    ``layout``: how a convolution's four dimensions lie: "oihw" (PyTorch: out, in, height, width) or "hwio"
    (TensorFlow).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: Literal["oihw", "hwio"] = "oihw"

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


@dataclass
class Reduced:
    """What an exchange ends with.

    ``total``: the sum over ranks of what was sent, dense [n] or :class:`Sparse`; equal on all ranks.
    ``own``: this rank's share of that sum, as the others decoded it; may be ``None`` unless ``ctx.needs_own``.
    ``state``: new values of the method's own slots (fresh arrays; the old ones are never written).
    ``trigger``: this rank asks for a restart of every method's schedule (see :class:`Context`).
    """

    total: Array | Sparse
    own: Array | Sparse | None = None
    state: dict[str, Array] = field(default_factory=dict)
    trigger: bool = False


@dataclass(frozen=True)
class Context:
    """Who is asking: one rank, at one step, for one tensor. Methods call it ``ctx``.

    ``step`` counts the tensor's exchanges from 0. ``phase`` is what :meth:`Method.phase_of` said of the steps
    since the method came on, or since the last trigger, of which there were ``triggers``. A trigger is what a rank
    sees and all must act on (a learning rate that dropped, a loss that rose): it is OR-ed over ranks in a
    step's status, and acts in the next step.
    """

    rank: int
    world: int
    step: int
    spec: TensorSpec
    seed: int = 0
    phase: int = 0
    triggers: int = 0
    needs_own: bool = True  #: feedback keeps what is not sent: without it nobody asks for the own share
    scanned: Any = None  #: what :meth:`Method.scan` found on its way over memory
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
    """``x`` (uint8) cut into one piece a rank, the r-th for rank r. Sent back: the pieces, in rank order.

    The pieces are equal, unless ``splits`` tells how many bytes go to each rank; ``receives`` then tells how
    many come from each. That makes it a send and a receive, which Horovod has not: zero to all but the partner.
    """

    x: Array
    splits: tuple[int, ...] | None = None
    receives: tuple[int, ...] | None = None


def add_shares(shares: list[Any], ops: Any) -> Array | Sparse:
    """The sum of several ranks' shares, all dense or all :class:`Sparse`."""
    if isinstance(shares[0], Sparse):
        return Sparse(ops.concat([s.index for s in shares]), ops.concat([s.values for s in shares]))
    return ops.add_all(shares)


Verb = AllReduce | AllGather | Broadcast | AllToAll
Communication = Generator[Verb, Any, Reduced]


# -- hyper-parameter types shared by methods -----------------------------------------------------


def _not_bool(value: object) -> object:
    """YAML's ``yes`` is a bool, and a bool passes for the number 1: refuse it."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not a boolean")
    return value


Number = BeforeValidator(_not_bool)
Density = Annotated[float, Number, Field(gt=0.0, le=1.0)]  #: kept / total
Share = Annotated[float, Number, Field(gt=0.0, le=1.0)]  #: a factor in (0, 1]
Momentum = Annotated[float, Number, Field(ge=0.0, lt=1.0)]  #: a factor in [0, 1)
Count = Annotated[int, Number, Field(ge=1)]  #: a positive whole number


def _known_values(name: str) -> str:
    if not re.fullmatch(r"fp32|fp16|bf16|qsgd[2-8]|rangefloat([4-9]|1[0-6])(m([1-9]|1\d|2[0-2]))?", name):
        raise ValueError(
            "must be fp32, fp16, bf16, qsgd2 … qsgd8 (bits), or rangefloat4 … rangefloat16 (bits), which may name "
            "its mantissa bits, as in rangefloat10m6"
        )
    return name


Values = Annotated[str, AfterValidator(_known_values)]  #: how values are written; ``parts/values.py`` has the codecs
Route = Literal["gather", "scatter"]  #: how quantized tensors are summed; ``parts/route.py``
FeedbackName = Literal["none", "plain", "lowpass", "momentum"]


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
    sparse: ClassVar[bool] = False  #: leaves values out; what is sent, is sent whole but for rounding
    fixed: ClassVar[tuple[str, ...]] = ()  #: hyper-parameters that no schedule may change, as state depends on them
    uneven: ClassVar[bool] = False  #: some ranks send less than ``num_bytes`` says
    linear: ClassVar[bool] = True  #: what rides may be averaged on its way: the result is then the average of results
    exact: ClassVar[bool] = True  #: every array backend sends the same bytes; False where FFT or matrices round
    phases: ClassVar[tuple[str, ...]] = ("compress",)  #: collectives are fixed within a phase
    examples: ClassVar[tuple[dict[str, Any], ...]] = ()  #: settings that tests should try as well

    feedback: FeedbackName = "none"
    """What becomes of what was not sent: "none" (lost), "plain" (kept as a residual and added to the
    next gradient), "lowpass" (plain, through a low-pass filter of factor ``beta``) or "momentum" (plain,
    on gradients that went through momentum on this rank: for plain SGD)."""
    beta: Share = 1.0
    """Low-pass factor of the residual, used with feedback "lowpass"; 1 is plain feedback."""
    momentum: Momentum = 0.9
    """Factor of the momentum, used with feedback "momentum"; the optimizer must then have none of its own."""

    def __post_init__(self) -> None:
        if self.feedback == "momentum" and not self.sparse:
            raise ValueError(
                'feedback: "momentum" clears the momentum wherever something was sent, which here is everywhere; it '
                "is for methods that leave values out, such as topk"
            )

    def hyperparameters(self) -> dict[str, Any]:
        """Field names and values, as a plan writes them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def suits(self, spec: TensorSpec) -> bool:
        """Whether the method is defined for such a tensor; a plan sends others dense, and says so."""
        return True

    def phase_of(self, age: int) -> int:
        """Index into ``phases`` of the phase that is on, ``age`` steps after the method came on or was restarted."""
        return 0

    def piggyback(self, spec: TensorSpec, phase: int, state: dict[str, Array]) -> int | None:
        """Length of the float32 all-reduce that is all it does in this phase, so that the stock optimizer's own
        all-reduce can carry it; None if it does anything else."""
        return None

    def notices(self, metric: str, value: float, low: float, high: float) -> bool:
        """Whether a metric that the user observes ("loss", "learning_rate") calls for a trigger.

        ``low`` and ``high`` are the least and the greatest value since the last trigger, this one included.
        """
        return False

    def state(self, spec: TensorSpec) -> dict[str, Slot]:
        """The method's own slots for one tensor (the residual belongs to ``parts/feedback.py``)."""
        return {}

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
        """Payload bytes a rank hands to its collectives for one tensor of ``spec`` in a step.

        A method with several phases takes two more arguments, ``phase`` and ``state``.
        """
        raise NotImplementedError

    def places(self, spec: TensorSpec) -> int:
        """The number of places that a sparse payload's indices tell apart: the elements, or say frequencies."""
        return spec.size

    def clip(self, gradient: Array, scale: float, ctx: Context, ops: Any) -> float:
        """The factor to multiply this rank's ``gradient`` with before it meets the residual; ``scale`` undoes
        the loss scale. Override it to clip."""
        return scale

    def scan(self, gradient: Array, residual: Array, scale: float, out: Array, ops: Any) -> Any:
        """Write ``scale·gradient + residual`` into ``out`` and return what else that pass over memory saw.

        Override it to take, say, moments in the same pass; ``exchange`` finds the answer in ``ctx.scanned``.
        """
        ops.accumulate(gradient, residual, scale, out)
        return None

    def encode(self, x: Array, state: dict[str, Array], ctx: Context, ops: Any) -> Array:
        """``x`` [n] float32 -> this rank's payload, uint8 for an all-gather. Never writes ``x``."""
        raise NotImplementedError

    def decode(self, payload: Array, ctx: Context, ops: Any) -> Array | Sparse:
        """A payload of any rank -> what it stands for. Raises ``WireError`` on bytes that are no payload."""
        raise NotImplementedError

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, ops: Any) -> Communication:
        """The choreography. By default: encode, all-gather, decode; entries of different ranks add up."""
        pieces = yield AllGather(self.encode(x, state, ctx, ops))
        shares = [self.decode(piece, ctx, ops) for piece in pieces]
        return Reduced(total=add_shares(shares, ops), own=shares[ctx.rank])


M = TypeVar("M", bound=type[Method])


@dataclass_transform(frozen_default=True, kw_only_default=True)
def method(cls: M) -> M:
    """Class decorator of a method: a frozen, validated dataclass whose id is its module's name."""
    cls.id = cls.__module__.rpartition(".")[2]
    return pydantic_dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})(cls)  # type: ignore
