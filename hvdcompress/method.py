"""The contract of a compression method: what it is, and what it may ask of a network.

A method is a frozen value (its hyper-parameters) with a pure generator, :meth:`Method.exchange`. The generator
*yields* the collectives it needs, is sent their results, and *returns* a :class:`Reduced`. It never sees Horovod,
MPI, PyTorch or TensorFlow: drivers do the I/O, so one method file runs under all of them::

    def exchange(self, x, state, ctx, work):
        payload = self.encode(x, state, ctx, work)
        payloads = yield AllGather(payload)                        # one payload per rank, in rank order
        shares = [self.decode(p, ctx, work) for p in payloads]     # what each rank sent
        return Reduced(total=add_shares(shares, work.ops), own=shares[ctx.rank])

Most methods define only ``encode`` and ``decode``. Error feedback is not their concern: a method with the field
``feedback`` set is given ``x = gradient + residual`` (``parts/feedback.py``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal, TypeVar, dataclass_transform, overload

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from hvdcompress.ops.scan import NOTHING, Found, Scan
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Array, Coded, Shares, Sparse

# -- what a method and its driver hand each other ------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """What is known about a gradient before it is computed.

    A bucket of several joined tensors has a spec too: one dimension, and a name made from its members.
    """

    name: str
    """The parameter's name, equal on all ranks."""
    shape: tuple[int, ...]
    """The gradient's shape."""
    dtype: str = "float32"
    """The gradient's dtype, by numpy's name."""
    layout: Literal["oihw", "hwio"] = "oihw"
    """Order of a convolution's four dimensions: "oihw" (PyTorch: out, in, height, width) or "hwio" (TensorFlow)."""
    joined: tuple[int, ...] = ()
    """Of a bucket: the sizes of the tensors that it joins, in their order."""

    @cached_property
    def size(self) -> int:
        """Number of elements, n."""
        return math.prod(self.shape)

    @property
    def parts(self) -> tuple[int, ...]:
        """Sizes of the tensors that the vector consists of: several for a bucket, otherwise (n,)."""
        return self.joined or (self.size,)


@dataclass(frozen=True)
class Slot:
    """One declared array of state, for one tensor on one rank.

    The driver allocates it (as zeros), saves it in checkpoints and restores it.
    """

    shape: tuple[int, ...]
    """Shape of the array. Methods receive it flat."""
    dtype: str = "float32"
    """The array's dtype, by numpy's name."""
    scope: Literal["rank", "shared"] = "rank"
    """Whether values differ between ranks. "rank": they do, as in a residual. "shared": they are equal on all ranks."""
    merge: Literal["sum", "keep"] = "sum"
    """What a restart with another number of ranks does: "sum" preserves the sum over ranks, "keep" copies any
    rank's values."""


def add_shares(shares: list[Any], ops: Ops) -> Array | Shares:
    """Sum several ranks' shares.

    Args:
        shares: one share per rank, either all dense [n] or all :class:`Sparse`.
        ops: the array backend.

    Returns:
        The sum: dense [n], or the :class:`Shares`, which are added where they are written.
    """
    return Shares(shares) if isinstance(shares[0], Sparse) else ops.add_all(shares)


@dataclass
class Reduced:
    """The result of an exchange."""

    total: Array | Sparse | Shares | Coded
    """Sum over ranks of what was sent, dense [n], :class:`Sparse` or coded [n]; equal on all ranks. What is coded is
    decoded where it is written (``ops/vectors.py``)."""
    own: Array | Sparse | Coded | None = None
    """This rank's share of ``total``, as the other ranks decoded it. May be None unless ``ctx.needs_own``."""
    state: dict[str, Array] = field(default_factory=dict)
    """New values of the method's slots, in fresh arrays. The old arrays are never written to."""
    trigger: bool = False
    """Whether this rank asks all ranks to restart their methods' phases (see :class:`Context`)."""


@dataclass(frozen=True, slots=True)
class Context:
    """The circumstances of one exchange: which rank, which step, which tensor. Methods call it ``ctx``.

    A *trigger* restarts the phases of all methods on all ranks, for example when the learning rate dropped or the
    loss rose. One rank may ask for it (:attr:`Reduced.trigger`, :meth:`Method.notices`); the ranks agree on it with
    the status of the step, and it takes effect in the next step.
    """

    rank: int
    """This rank, 0 to world − 1."""
    world: int
    """Number of ranks, p."""
    step: int
    """Number of exchanges this tensor has been through, from 0."""
    spec: TensorSpec
    """The tensor, or the bucket of joined tensors."""
    seed: int = 0
    """The plan's seed, equal on all ranks."""
    phase: int = 0
    """Index into :attr:`Method.phases`, as :meth:`Method.phase_of` gave it."""
    triggers: int = 0
    """Number of triggers so far."""
    needs_own: bool = True
    """Whether ``Reduced.own`` is used. It is False without feedback."""


@dataclass(slots=True, eq=False)
class Workspace:
    """Memory, findings and counters of one exchange, and the array ops. Methods call it ``work``."""

    ops: Ops
    """The array backend: every array function that a method may call."""
    scratch: dict[str, Array] = field(default_factory=dict)
    """Arrays that are kept from step to step for :meth:`buffer`. They are not state: checkpoints leave them out."""
    scanned: list[Found] | None = None
    """What :meth:`Method.scan` asked for, in each part of the vector; None if nothing was scanned."""
    counters: dict[str, Any] = field(default_factory=dict)
    """Numbers that the method adds to the ledger, such as "kept"."""
    bucket: Workspace | None = None
    """The workspace of the whole bucket, if the method runs on each tensor of a bucket."""
    span: tuple[int, int] = (0, 0)
    """(start, stop) of the vector in the bucket's vector."""

    def buffer(self, name: str, n: int, dtype: str, like: Array) -> Array:
        """Return an array [n] for large intermediate results of a step: the same array in every step.

        Allocating fresh memory takes longer than writing to it. The contents are undefined. The array may be
        ``Reduced.total`` or ``Reduced.own``, but not the new value of a slot.

        Args:
            name: distinguishes the buffers of one tensor.
            n: number of elements.
            dtype: their dtype, by numpy's name.
            like: an array on the device.
        """
        found = self.scratch.get(name)
        if found is None or len(found) != n:
            bucket, (start, stop) = self.bucket, self.span
            if bucket is not None and n == stop - start:
                # Buffers of neighbouring tensors are adjacent, so that their payloads travel together without a copy.
                found = bucket.buffer(name, bucket.span[1], dtype, like)[start:stop]
            else:
                found = self.ops.zeros(n, dtype, like)
            self.scratch[name] = found
        return found


# -- the collectives: everything a method may ask of a network ----------------------------------------


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Sum, or take the elementwise maximum of, the arrays of all ranks.

    The generator is sent an array like ``x``, equal on all ranks.
    """

    x: Array
    """This rank's array: same length and dtype on all ranks."""
    op: Literal["sum", "max"] = "sum"
    """The reduction."""
    spent: bool = False
    """Whether nobody reads ``x`` afterwards, so that the result may be written over it."""


@dataclass(frozen=True, eq=False)
class AllGather:
    """Collect the payloads of all ranks.

    The generator is sent a list with one array per rank, in rank order.
    """

    x: Array
    """This rank's payload, uint8. Lengths may differ between ranks only if every payload starts with a wire header,
    which contains its length (``parts/wire.py``)."""
    fixed: bool = False
    """Whether the payload has this length on all ranks and in every step of the phase. Networks that must know lengths
    then ask for them in the phase's first step only."""
    lengths: tuple[int, ...] = ()
    """The engine's: bytes of the payloads of several tensors that ``x`` consists of, as many on all ranks. The list
    then has one array per rank and tensor, one rank's after another's."""


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Send one rank's payload to all ranks. The generator is sent the payload, on every rank.

    Horovod neither fuses nor caches broadcasts. Drivers therefore send one as an int32 *sum* to which the other
    ranks contribute zeros, and charge ``num_bytes`` to every rank.
    """

    make: Callable[[], Array]
    """Returns the payload, uint8 [num_bytes]. It is a function because only the root needs to compute it."""
    root: int
    """The sending rank."""
    num_bytes: int
    """Length of the payload in bytes: equal on all ranks, a multiple of 4."""


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Send a different piece to each rank.

    The generator is sent the list of pieces that arrived, in rank order.
    """

    x: Array
    """The pieces one after another, uint8; the r-th goes to rank r. They have equal lengths unless ``splits`` is
    given."""
    splits: tuple[int, ...] | None = None
    """Bytes that go to each rank. With zeros for all ranks but one this is a point-to-point send, which Horovod does
    not have."""
    receives: tuple[int, ...] | None = None
    """Bytes that come from each rank; required with ``splits``."""


Collective = AllReduce | AllGather | Broadcast | AllToAll
#: what ``exchange`` is: yields collectives, is sent their results, returns a Reduced
Communication = Generator[Collective, Any, Reduced]


# -- types of hyper-parameters, shared by methods ------------------------------------------------


def _not_bool(value: object) -> object:
    """Refuse booleans: YAML's ``yes`` is True, which Python accepts as the number 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not a boolean")
    return value


def _known_values(name: str) -> str:
    """fp32 | fp16 | bf16 | qsgd2 … qsgd8 | rangefloat4 … rangefloat16, mantissa bits as in rangefloat10m6."""
    if not re.fullmatch(r"fp32|fp16|bf16|qsgd[2-8]|rangefloat([4-9]|1[0-6])(m([1-9]|1\d|2[0-2]))?", name):
        raise ValueError(
            "must be fp32, fp16, bf16, qsgd2 … qsgd8 (the number is the bits per value), or rangefloat4 … "
            "rangefloat16 (bits per value; mantissa bits are chosen from the data unless given, as in rangefloat10m6)"
        )
    return name


Number = BeforeValidator(_not_bool)
Density = Annotated[float, Number, Field(gt=0.0, le=1.0)]  #: kept elements / all elements
Fraction = Annotated[float, Number, Field(gt=0.0, le=1.0)]  #: a number in (0, 1]
Momentum = Annotated[float, Number, Field(ge=0.0, lt=1.0)]  #: a number in [0, 1)
Count = Annotated[int, Number, Field(ge=1)]  #: a positive integer
Values = Annotated[str, AfterValidator(_known_values)]  #: how values are written; the codecs are in ``parts/codecs.py``
Route = Literal["gather", "scatter"]  #: how quantized tensors are summed; see ``parts/sums.py``
FeedbackName = Literal["none", "plain", "lowpass", "momentum"]  #: see ``parts/feedback.py``
OptimizerMomentum = Literal["adapt", "cancel", "keep"]  #: see ``parts/momentum.py``
Granularity = Literal["tensor", "part", "element"]  #: see :attr:`Method.granularity`


# -- a method ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Method:
    """A compression method: a frozen, hashable value made of hyper-parameters.

    A subclass lives in ``methods/<id>.py``, is decorated with :func:`method`, sets the class variables below, and
    declares its hyper-parameters as dataclass fields. A value that does not fit its field raises a ``ValueError``
    that names the field.

    The argument ``state`` of its methods has the current values of the declared slots, by name. ``ctx`` and ``work``
    are the :class:`Context` and the :class:`Workspace` of the exchange.
    """

    id: ClassVar[str] = ""
    """The name of the file; :func:`method` sets it."""
    paper: ClassVar[str] = ""
    """The citation, in one line."""
    published: ClassVar[dict[str, Any]] = {}
    """The paper's settings, where they are not the defaults: a plan asks for them with ``paper: true``."""
    sends: ClassVar[str] = ""
    """What a rank sends, in one line, for tables."""
    needs_feedback: ClassVar[bool] = False
    """Whether training diverges or is badly biased without a residual."""
    wide: ClassVar[bool] = False
    """Whether float64 gradients are processed in float64. Otherwise they are converted to float32."""
    sparse: ClassVar[bool] = False
    """Whether the method sends some elements and leaves out the others. What it sends is exact up to rounding."""
    waits: ClassVar[int] = 1
    """About how many steps' gradients, with feedback, arrive together, of a method that is not ``sparse``: the
    optimizer's momentum is adapted to it (``parts/momentum.py``). With 1 it is kept."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """Hyper-parameters that no schedule may change, because the state's shape or meaning depends on them."""
    identity: ClassVar[bool] = False
    """Whether the method, without feedback, sends the gradient itself, to be summed: the stock optimizer can do so."""
    granularity: ClassVar[Granularity] = "tensor"
    """How the method runs on a bucket whose tensors the driver joined unasked. A tensor's result never depends, to the
    bit, on the tensors that it is joined with. "tensor": the method runs on each tensor, and their payloads travel
    together (``engine/together.py``). "part": the method runs once, and goes by ``ctx.spec.parts``. "element": the
    method runs once. What it sends of an element depends on that element alone, and it has no state of its own."""
    uneven: ClassVar[bool] = False
    """Whether payloads' lengths differ between ranks, or between steps of a phase: fewer bytes than :meth:`num_bytes`
    says."""
    linear: ClassVar[bool] = True
    """Whether the result is proportional to what was summed. Then a piggybacked payload may be averaged instead of
    summed, and the result is the average (see :meth:`piggyback`)."""
    exact: ClassVar[bool] = True
    """Whether all array backends send the same bytes. False where an FFT or a matrix product rounds differently."""
    phases: ClassVar[tuple[str, ...]] = ("compress",)
    """Names of the phases. Within a phase, the number, kinds and dtypes of the collectives are fixed."""
    examples: ClassVar[tuple[dict[str, Any], ...]] = ()
    """More hyper-parameter settings for the tests to try."""

    feedback: FeedbackName = "none"
    """What happens to the part of the gradient that was not sent. "none": it is lost. "plain": it is kept as a
    residual and added to the next gradient. "lowpass": like plain, with the residual low-pass filtered by ``beta``.
    "momentum": like plain, on gradients that momentum was applied to locally (for use with plain SGD)."""
    beta: Fraction = 1.0
    """Low-pass factor of the residual, used with feedback "lowpass"; 1 is plain feedback."""
    momentum: Momentum = 0.7
    """Momentum factor of feedback "momentum", which takes the place of the optimizer's momentum. The effective learning
    rate stays the optimizer's, whatever the factor."""
    optimizer_momentum: OptimizerMomentum = "adapt"
    """What happens to the optimizer's momentum for tensors with a residual, which acts as momentum itself. "adapt": an
    element has as much momentum as its waiting has not replaced. "cancel": it has none, at the same effective learning
    rate. "keep": nothing happens."""
    local_clip_norm: Annotated[float, Number, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Norm that each tensor's gradient is clipped to, local_clip_norm/√p on each rank, before its residual is added;
    null: no clipping."""

    def __post_init__(self) -> None:
        if self.local_clip_norm is not None and self.feedback == "none":
            raise ValueError(
                'local_clip_norm needs a feedback other than "none": only feedback removes the loss scale from '
                "gradients"
            )
        if self.feedback == "momentum" and not self.sparse:
            raise ValueError(
                'feedback "momentum" needs a method that leaves elements out, such as topk: it resets the momentum of '
                'every element that was sent, and this method sends all of them. Use "plain", "lowpass" or "none"'
            )

    def hyperparameters(self) -> dict[str, Any]:
        """Return the hyper-parameters by name, as a plan writes them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    # What a plan and a driver ask before an exchange.

    def suits(self, spec: TensorSpec) -> bool:
        """Return whether the method is defined for tensors of ``spec``. A plan sends other tensors dense."""
        return True

    def phase_of(self, age: int) -> int:
        """Return the phase of a step.

        Args:
            age: steps since the method came into effect for the tensor, or since the last trigger.

        Returns:
            An index into :attr:`phases`.
        """
        return 0

    def notices(self, metric: str, value: float, low: float, high: float) -> bool:
        """Return whether a metric reported by the user calls for a trigger.

        Args:
            metric: the metric's name: "loss" or "learning_rate".
            value: its new value.
            low: its smallest value since the last trigger, ``value`` included.
            high: its largest value since the last trigger, ``value`` included.
        """
        return False

    def state(self, spec: TensorSpec) -> dict[str, Slot]:
        """Return the method's slots for one tensor, by name. The residual is not among them (``parts/feedback.py``)."""
        return {}

    def num_bytes(self, spec: TensorSpec, world: int) -> int:
        """Return the payload bytes that a rank hands to its collectives in one step.

        A method with several phases takes two more arguments: ``phase: int = 0`` and ``state = None``.

        Args:
            spec: the tensor.
            world: number of ranks.
        """
        raise NotImplementedError

    def num_positions(self, spec: TensorSpec) -> int:
        """Return how many positions the indices of a sparse payload can refer to: elements, or for FFT frequencies."""
        return spec.size

    def piggyback(self, spec: TensorSpec, phase: int, state: dict[str, Array]) -> int | None:
        """Return the length of the method's only all-reduce, if that is all it does in this phase.

        Such a payload can travel inside the stock optimizer's own all-reduce, at no extra cost.

        Args:
            spec: the tensor.
            phase: index into :attr:`phases`.
            state: the method's state.

        Returns:
            The number of float32 elements; None if the exchange is anything but one float32 sum.
        """
        return None

    # The exchange, in the order of the calls: scan for each tensor as it comes, then exchange, which calls encode and
    # decode.

    def scan(self, index: int, state: dict[str, Array], ctx: Context, work: Workspace, like: Array) -> Scan:
        """Return what :meth:`exchange` needs to know about gradient + residual besides their values.

        It is found in the one pass over memory that every gradient makes when it has come, while it is in the
        processor's cache, and is in ``work.scanned[index]``.

        Args:
            index: which part of a bucket's vector the tensor is, from 0.
            state: the method's state; read only.
            ctx: rank, world, step and the tensor, or the bucket that it is part of.
            work: memory, findings and counters of this exchange, and the array ops.
            like: an array of the tensor's length on its device.
        """
        return NOTHING

    def encode(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Array:
        """Compress one rank's gradient into a payload for an all-gather.

        Args:
            x: gradient + residual, float32 [n]; read only.
            state: the method's state.
            ctx: rank, world, step and tensor.
            work: memory, findings and counters of this exchange, and the array ops.

        Returns:
            The payload, uint8.
        """
        raise NotImplementedError

    def decode(self, payload: Array, ctx: Context, work: Workspace) -> Array | Sparse:
        """Decompress a payload of any rank.

        Args:
            payload: what :meth:`encode` returned on some rank, uint8.
            ctx: rank, world, step and tensor.
            work: memory, findings and counters of this exchange, and the array ops.

        Returns:
            That rank's share of the sum: float32 [n], or :class:`Sparse`.

        Raises:
            WireError: the bytes are not such a payload.
        """
        raise NotImplementedError

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        """Sum ``x`` over ranks, compressed. By default: encode, all-gather, decode and add.

        Args:
            x: gradient + residual, float32 [n] (float64 for a ``wide`` method); read only.
            state: the method's state; read only.
            ctx: rank, world, step and tensor.
            work: memory, findings and counters of this exchange, and the array ops.

        Yields:
            The collectives; each ``yield`` evaluates to the collective's result.

        Returns:
            The sum, this rank's share of it, and the new state.
        """
        pieces = yield AllGather(self.encode(x, state, ctx, work), fixed=not self.uneven)
        shares = [self.decode(piece, ctx, work) for piece in pieces]
        return Reduced(total=add_shares(shares, work.ops), own=shares[ctx.rank])


M = TypeVar("M", bound=type[Method])

REGISTERED: dict[str, type[Method]] = {}  #: classes decorated with ``@method("my_id")``, by their id


@overload
def method(given: str) -> Callable[[M], M]: ...


@overload
def method(given: M) -> M: ...


@dataclass_transform(frozen_default=True, kw_only_default=True)
def method(given: M | str) -> M | Callable[[M], M]:
    """Class decorator: make a method of a class, a frozen dataclass with validated fields.

    ``@method("my_id")`` registers it under an id, wherever the class is: in a script, or in a notebook, where running
    the cell again replaces it. ``@method`` alone gives it the name of its module, as for the files in ``methods/``.

    Raises:
        ValueError: this library has a method with that id.
    """
    if not isinstance(given, str):
        return _made(given, given.__module__.rpartition(".")[2])
    if find_spec(f"hvdcompress.methods.{given}"):
        raise ValueError(f"the id {given!r} is that of a method of hvdcompress: choose another one")

    def register(cls: M) -> M:
        made = REGISTERED[given] = _made(cls, given)
        return made

    return register


def _made(cls: M, id: str) -> M:
    """Return a class as a frozen dataclass with validated fields."""
    cls.id = id
    return pydantic_dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})(cls)  # type: ignore
