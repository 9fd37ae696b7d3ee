"""The contract of a compression method: its inputs, its outputs, and the collectives that it may use.

A method is a frozen value (its hyper-parameters) with a pure generator, :meth:`Method.exchange`. The generator
*yields* the collectives it needs, is sent their results, and *returns* a :class:`Reduced`. It never sees Horovod,
MPI, PyTorch or TensorFlow: drivers do the I/O, so one method file runs under all of them::

    def exchange(self, x, state, ctx, work):
        payload = self.encode(x, state, ctx, work)
        payloads = yield AllGather(payload)                        # one payload per rank, in rank order
        shares = [self.decode(p, ctx, work) for p in payloads]     # what each rank sent
        return Reduced(total=add_shares(shares, work.ops), own=shares[ctx.rank])

Most methods define only ``encode`` and ``decode``. Error feedback is not implemented by methods: if the field
``feedback`` is set, the engine passes ``x = gradient + residual`` (``parts/feedback.py``).
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
from hvdcompress.ops.vectors import Array as Array
from hvdcompress.ops.vectors import Coded, Shares
from hvdcompress.ops.vectors import Sparse as Sparse

# -- data that the engine and a method exchange ------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of a gradient, known before the gradient is computed.

    A bucket of several tensors has a spec too. It has one dimension, and its name is made from the names of its
    members.
    """

    name: str
    """The parameter's name, equal on all ranks."""
    shape: tuple[int, ...]
    """The gradient's shape."""
    dtype: str = "float32"
    """The gradient's dtype as a NumPy name."""
    layout: Literal["oihw", "hwio"] = "oihw"
    """Order of a convolution's four dimensions: "oihw" (PyTorch: out, in, height, width) or "hwio" (TensorFlow)."""
    members: tuple[TensorSpec, ...] = ()
    """For a bucket: its tensors, in bucket order. Empty for a single tensor."""

    @cached_property
    def size(self) -> int:
        """Number of elements, n."""
        return math.prod(self.shape)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Number of elements of each tensor in the vector: several entries for a bucket, otherwise ``(n,)``."""
        return tuple(member.size for member in self.members) or (self.size,)


@dataclass(frozen=True)
class Slot:
    """Declaration of one array of state, for one tensor on one rank.

    The engine allocates the array (as zeros), saves it in checkpoints and restores it.
    """

    shape: tuple[int, ...]
    """Shape of the array. Methods receive it as a flat array."""
    dtype: str = "float32"
    """The array's dtype as a NumPy name."""
    scope: Literal["rank", "shared"] = "rank"
    """Whether values may differ between ranks. "rank": they may, as in a residual. "shared": all ranks hold equal
    values."""
    merge: Literal["sum", "keep"] = "sum"
    """How a checkpoint is converted to another number of ranks. "sum": the sum over ranks is preserved. "keep": the
    values of any one rank are copied."""


def add_shares(shares: list[Any], ops: Ops) -> Array | Shares:
    """Sum the shares of several ranks.

    Args:
        shares: one share per rank, either all dense [n] or all :class:`Sparse`.
        ops: the array backend.

    Returns:
        The sum: dense [n], or :class:`Shares`, which are added when the result is written.
    """
    return Shares(shares) if isinstance(shares[0], Sparse) else ops.add_all(shares)


@dataclass
class Reduced:
    """The result of an exchange."""

    total: Array | Sparse | Shares | Coded
    """Sum over ranks of the transmitted values: dense [n], :class:`Sparse`, or coded [n]; equal on all ranks. Coded
    values are decoded when the result is written (``ops/vectors.py``)."""
    own: Array | Sparse | Coded | None = None
    """This rank's contribution to ``total``, as the other ranks decode it. May be None if ``ctx.needs_own`` is
    False."""
    state: dict[str, Array] = field(default_factory=dict)
    """New values of the method's slots, in new arrays. A method must not write to the old arrays: a discarded step goes
    back to them."""
    trigger: bool = False
    """Whether this rank requests a trigger: all ranks restart the phases of their methods (see :class:`Context`)."""


@dataclass(frozen=True, slots=True)
class Context:
    """Read-only facts about one exchange: the rank, the step and the tensor. Methods call it ``ctx``.

    A *trigger* restarts the phases of all methods on all ranks, for example after the learning rate dropped or the loss
    rose. Any rank may request one (:attr:`Reduced.trigger`, :meth:`Method.wants_trigger`). The ranks agree on it
    through the status of the step, and it takes effect in the next step.
    """

    rank: int
    """This rank, 0 to world_size − 1."""
    world_size: int
    """Number of ranks, p."""
    step: int
    """Number of exchanges of this tensor so far, from 0."""
    spec: TensorSpec
    """The tensor, or the bucket of several tensors."""
    seed: int = 0
    """The plan's seed, equal on all ranks."""
    phase: int = 0
    """Index into :attr:`Method.phases`, as returned by :meth:`Method.phase_of`."""
    triggers: int = 0
    """Number of triggers so far."""
    needs_own: bool = True
    """Whether the caller uses ``Reduced.own``. False without error feedback."""


@dataclass(slots=True, eq=False)
class Workspace:
    """Buffers, scan results and counters of one exchange, and the array ops. Methods call it ``work``."""

    ops: Ops
    """The array backend. A method calls only these array functions, so that it runs on every backend."""
    scratch: dict[str, Array] = field(default_factory=dict)
    """Arrays that :meth:`buffer` reuses from step to step. They are not state: checkpoints do not contain them."""
    scanned: list[Found] | None = None
    """Results of :meth:`Method.scan`, one per part of the vector; None if nothing was scanned."""
    counters: dict[str, Any] = field(default_factory=dict)
    """Counts that the engine adds to the ledger, such as {"kept": 120}."""
    bucket: Workspace | None = None
    """The workspace of the whole bucket, if the method runs on each tensor of a bucket separately; otherwise None."""
    span: tuple[int, int] = (0, 0)
    """(start, stop) of the vector in the bucket's vector."""

    def buffer(self, name: str, n: int, dtype: str, like: Array) -> Array:
        """Return an array [n] for large intermediate results, the same array in every step.

        Allocating fresh memory takes longer than writing to it. The contents are undefined. The array may become
        ``Reduced.total`` or ``Reduced.own``, but not the new value of a slot, because the next step overwrites it.

        Args:
            name: identifies the buffer among the buffers of this tensor.
            n: number of elements.
            dtype: NumPy name of the dtype.
            like: an array on the device on which to allocate.
        """
        found = self.scratch.get(name)
        if found is None or len(found) != n:
            bucket = self.bucket
            start, stop = self.span
            if bucket is not None and n == stop - start:
                # Buffers of neighbouring tensors are slices of one bucket buffer, so that their payloads
                # can be sent as one collective without a copy.
                found = bucket.buffer(name, bucket.span[1], dtype, like)[start:stop]
            else:
                found = self.ops.zeros(n, dtype, like)
            self.scratch[name] = found
        return found


# -- collectives: the only communication that a method may use ------------------------------------------


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Sum, or take the elementwise maximum of, the arrays of all ranks.

    The generator is sent an array like ``x``, equal on all ranks.
    """

    x: Array
    """This rank's array [n]. Length and dtype must be equal on all ranks."""
    op: Literal["sum", "max"] = "sum"
    """The reduction: "sum" or elementwise "max"."""
    may_overwrite: bool = False
    """Whether the result may be written into the memory of ``x``, because the method does not read ``x`` again."""


@dataclass(frozen=True, eq=False)
class AllGather:
    """Collect the payloads of all ranks.

    The generator is sent a list with one array per rank, in rank order.
    """

    x: Array
    """This rank's payload, uint8 [bytes]. Lengths may differ between ranks only if every payload starts with a wire
    header, which contains the length (``parts/wire.py``)."""
    fixed_length: bool = False
    """Whether the payload has the same length on all ranks and in every step of the phase. Networks that must know
    lengths in advance then exchange them only in the first step of the phase."""
    lengths: tuple[int, ...] = ()
    """Set by the engine only: byte lengths of the payloads of several tensors that were concatenated into ``x``. Every
    rank has the same number of them. The result list then has one array per rank and tensor, rank by rank."""


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Send one rank's payload to all ranks. The generator is sent the payload, on every rank.

    Horovod neither fuses nor caches broadcasts. Drivers therefore send one as an int32 *sum* to which the other ranks
    contribute zeros, and charge ``num_bytes`` to every rank.
    """

    make: Callable[[], Array]
    """Function that returns the payload, uint8 [num_bytes]. Only the root calls it, so the other ranks skip its
    work."""
    root: int
    """The sending rank."""
    num_bytes: int
    """Length of the payload in bytes. It must be equal on all ranks and a multiple of 4."""


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Send a different piece to each rank.

    The generator is sent the list of pieces that arrived, in rank order.
    """

    x: Array
    """The concatenated pieces, uint8 [bytes]; piece r goes to rank r. All pieces have the same length unless ``splits``
    is given."""
    splits: tuple[int, ...] | None = None
    """Bytes to send to each rank. With zeros for all ranks but one this is a point-to-point send, which Horovod does
    not offer."""
    receives: tuple[int, ...] | None = None
    """Bytes to receive from each rank. None with ``splits``: this rank does not know them. Then every piece, an empty
    one too, starts with a wire header, which contains its length (``parts/wire.py``)."""
    tensors: int = 1
    """Set by the engine only: the number of tensors whose pieces for one rank were concatenated, if ``receives`` is
    unknown. The result list then has one piece per rank and tensor, rank by rank."""

    @property
    def receives_unknown(self) -> bool:
        """Whether only the headers of the pieces tell their lengths."""
        return self.splits is not None and self.receives is None


Collective = AllReduce | AllGather | Broadcast | AllToAll
#: Type of ``Method.exchange``: it yields collectives, is sent their results, and returns a Reduced
Communication = Generator[Collective, Any, Reduced]


# -- hyper-parameter types that several methods use ----------------------------------------------


def _not_bool(value: object) -> object:
    """Reject booleans: YAML's ``yes`` is True, which Python accepts as the number 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not a boolean")
    return value


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


def _known_values(name: str) -> str:
    """Reject unknown names of value formats; ``rangefloat10m6`` has 10 bits per value, 6 of them mantissa."""
    levels = r"int4|int8|fp8_e4m3|fp8_e5m2|dynamic8|natural4?"
    if not re.fullmatch(rf"fp32|fp16|bf16|{levels}|qsgd[2-8]|rangefloat([4-9]|1[0-6])(m([1-9]|1\d|2[0-2]))?", name):
        raise ValueError(
            "must be fp32, fp16, bf16, int8, int4, fp8_e4m3, fp8_e5m2, dynamic8, natural4, natural, "
            "qsgd2 … qsgd8 (the number is the bits per value), or rangefloat4 … rangefloat16 (bits per value; "
            "mantissa bits are chosen from the data unless given, as in rangefloat10m6)"
        )
    return name


Number = BeforeValidator(_not_bool)
PowerOfTwo = AfterValidator(_power_of_two)
Density = Annotated[float, Number, Field(gt=0.0, ge=1e-12, le=1.0)]  #: kept elements / all elements; one at least
Fraction = Annotated[float, Number, Field(gt=0.0, le=1.0)]  #: a number in (0, 1]
Momentum = Annotated[float, Number, Field(ge=0.0, lt=1.0)]  #: a number in [0, 1)
Count = Annotated[int, Number, Field(ge=1)]  #: a positive integer
#: number format of sent values; codecs in ``parts/codecs.py``
Values = Annotated[
    str,
    AfterValidator(_known_values),
    Field(
        description="`fp32` | `fp16` | `bf16` | `int8` | `int4` | `fp8_e4m3` | `fp8_e5m2` | `dynamic8` | "
        "`natural4` | `natural` | `qsgd2` … `qsgd8` | `rangefloat4` … `rangefloat16`, also as `rangefloat10m6`"
    ),
]
Route = Literal["gather", "scatter"]  #: how quantized tensors are summed; see ``parts/sums.py``
FeedbackName = Literal["none", "plain", "lowpass", "momentum"]  #: see ``parts/feedback.py``
OptimizerMomentum = Literal["adapt", "cancel", "keep"]  #: see ``parts/momentum.py``
Granularity = Literal["tensor", "part", "element"]  #: see :attr:`Method.granularity`


# -- a method ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Method:
    """A compression method: a frozen, hashable value made of hyper-parameters.

    A subclass is a file ``methods/<id>.py`` with one class that is decorated with :func:`method`. It sets the class
    variables below and declares its hyper-parameters as dataclass fields. A value that does not fit its field raises a
    ``ValueError`` that names the field.

    The argument ``state`` of the methods below maps slot names to their current arrays. ``ctx`` and ``work`` are the
    :class:`Context` and the :class:`Workspace` of the exchange.
    """

    id: ClassVar[str] = ""
    """Name of the method in plans. :func:`method` sets it from the file name."""
    paper: ClassVar[str] = ""
    """Citation of the paper, in one line."""
    published: ClassVar[dict[str, Any]] = {}
    """Hyper-parameters of the paper that differ from the defaults. A plan selects them with ``paper: true``."""
    sends: ClassVar[str] = ""
    """Description of the payload in one line, for tables in the documentation."""
    needs_feedback: ClassVar[bool] = False
    """Whether training without a residual diverges or is strongly biased."""
    keeps_float64: ClassVar[bool] = False
    """Whether float64 gradients are processed in float64. Otherwise the engine converts them to float32."""
    sparse: ClassVar[bool] = False
    """Whether the method sends some elements and omits the others. The sent values are exact up to rounding."""
    delay: ClassVar[int] = 1
    """Approximate number of steps over which a gradient arrives, with error feedback, for methods that are not
    ``sparse``. The optimizer's momentum is adapted to it (``parts/momentum.py``). With 1 the momentum is left
    unchanged."""
    unschedulable: ClassVar[tuple[str, ...]] = ()
    """Hyper-parameters that a schedule cannot change, because the shape or meaning of the state depends on them."""
    identity: ClassVar[bool] = False
    """Whether the method, without feedback, sums the gradient itself. The stock optimizer can then do the
    all-reduce."""
    granularity: ClassVar[Granularity] = "tensor"
    """How the method runs on a bucket that the driver formed automatically. In every case the result of a tensor
    equals, bit for bit, its result outside of a bucket. "tensor": the method runs on each tensor, and their payloads
    are sent as one collective (``engine/fused.py``). "part": the method runs once and treats each of ``ctx.spec.parts``
    separately. "element": the method runs once; the result of an element depends on that element only, and the method
    has no state."""
    variable_length: ClassVar[bool] = False
    """Whether payload lengths may differ between ranks or between steps of a phase. :meth:`num_bytes` is then the upper
    limit."""
    exact: ClassVar[bool] = True
    """Whether all array backends send the same bytes. False if an FFT or a matrix product rounds differently."""
    phases: ClassVar[tuple[str, ...]] = ("compress",)
    """Names of the phases. Within a phase the number, kinds and dtypes of the collectives are fixed."""
    needs: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        "beta": ("feedback", ("lowpass",)),
        "momentum": ("feedback", ("momentum",)),
        "local_clip_norm": ("feedback", ("plain", "lowpass", "momentum")),
    }
    """{hyper-parameter: (another one, its values)}: with other values it has no effect, and setting it is an error. A
    subclass adds its own."""
    examples: ClassVar[tuple[dict[str, Any], ...]] = ()
    """Further hyper-parameter settings for the tests to try."""

    feedback: FeedbackName = "none"
    """What happens to the part of the gradient that was not sent. "none": it is lost. "plain": it is kept as a residual
    and added to the next gradient. "lowpass": as "plain", with the residual low-pass filtered by ``beta``. "momentum":
    as "plain", on gradients to which each rank applied momentum locally (for use with plain SGD)."""
    beta: Fraction = 1.0
    """Low-pass factor of the residual with feedback "lowpass"; 1 is the same as "plain"."""
    momentum: Momentum = 0.7
    """Momentum factor of feedback "momentum", which replaces the momentum of the optimizer. The effective learning rate
    remains that of the optimizer, for any factor."""
    optimizer_momentum: OptimizerMomentum = "adapt"
    """What happens to the optimizer's momentum for tensors with a residual, because the residual itself acts as
    momentum. "adapt": an element keeps the part of the momentum that its delay has not replaced. "cancel": momentum is
    removed, at the same effective learning rate. "keep": momentum is left unchanged."""
    local_clip_norm: Annotated[float, Number, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Clip each tensor's gradient on each rank to the norm local_clip_norm/√p before its residual is added; null: no
    clipping."""

    def __post_init__(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        needs = {name: value for cls in type(self).__mro__ for name, value in vars(cls).get("needs", {}).items()}
        for name, (other, values) in needs.items():
            if getattr(self, name) != defaults[name] and getattr(self, other) not in values:
                wanted = " or ".join(map(repr, values))
                raise ValueError(
                    f"{name} has no effect with {other} {getattr(self, other)!r}; it needs {other} {wanted}"
                )
        if self.feedback == "momentum" and not self.sparse:
            raise ValueError(
                'feedback "momentum" needs a sparse method such as topk: it resets the momentum of every sent element, '
                'and this method sends all elements. Use "plain", "lowpass" or "none"'
            )

    def hyperparameters(self) -> dict[str, Any]:
        """Return {name: value} of the hyper-parameters, in the form in which a plan writes them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    # Called by plans and drivers before an exchange.

    def suits(self, spec: TensorSpec) -> bool:
        """Return whether the method supports tensors of ``spec``. A plan sends unsupported tensors uncompressed."""
        return True

    def phase_of(self, age: int) -> int:
        """Return the phase that a step belongs to.

        Args:
            age: number of steps since the method became active for the tensor, or since the last trigger.

        Returns:
            An index into :attr:`phases`.
        """
        return 0

    def wants_trigger(self, metric: str, value: float, low: float, high: float) -> bool:
        """Return whether a metric that the user reported should cause a trigger.

        Args:
            metric: the metric's name: "loss" or "learning_rate".
            value: its new value.
            low: its smallest value since the last trigger, ``value`` included.
            high: its largest value since the last trigger, ``value`` included.
        """
        return False

    @property
    def shard_codec(self) -> Any:
        """The number format of a reduce-scatter between shards, a ``Codec`` (``parts/sums.py``).

        None if the method needs more than each shard's values, such as a whole matrix.
        """
        return None

    def state(self, spec: TensorSpec) -> dict[str, Slot]:
        """Return {name: slot} of the method's state for one tensor, without the residual (``parts/feedback.py``)."""
        return {}

    def num_bytes(self, spec: TensorSpec, world_size: int) -> int:
        """Return the payload bytes that a rank passes to its collectives in one step.

        A method with several phases accepts two more arguments: ``phase: int = 0`` and ``state = None``.

        Args:
            spec: the tensor.
            world_size: number of ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} must define num_bytes()")

    def num_positions(self, spec: TensorSpec) -> int:
        """Return the number of positions that the indices of a sparse payload refer to: elements, or frequencies."""
        return spec.size

    # The exchange, in call order: scan() for each gradient as it arrives, then exchange(), which calls encode() and
    # decode().

    def scan(self, index: int, state: dict[str, Array], ctx: Context, work: Workspace, like: Array) -> Scan:
        """Return the statistics that :meth:`exchange` needs from gradient + residual.

        The engine computes them in the pass over memory that it makes for every arriving gradient, while the values are
        in the CPU cache. It puts them into ``work.scanned[index]``.

        Args:
            index: index of the tensor among the parts of the bucket.
            state: the method's state; read only.
            ctx: rank, world_size, step, and the tensor or the bucket that contains it.
            work: buffers, scan results and counters of this exchange, and the array ops.
            like: an array with the tensor's length, on its device.
        """
        return NOTHING

    def encode(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Array:
        """Compress one rank's gradient into a payload for an all-gather.

        Args:
            x: gradient + residual, float32 [n]; read only.
            state: the method's state.
            ctx: rank, world_size, step and tensor.
            work: buffers, scan results and counters of this exchange, and the array ops.

        Returns:
            The payload, uint8.
        """
        raise NotImplementedError(f"{type(self).__name__} must define exchange(), or encode() and decode()")

    def decode(self, payload: Array, ctx: Context, work: Workspace) -> Array | Sparse:
        """Decompress the payload of any rank.

        Args:
            payload: uint8, as :meth:`encode` returned it on some rank.
            ctx: rank, world_size, step and tensor.
            work: buffers, scan results and counters of this exchange, and the array ops.

        Returns:
            That rank's contribution to the sum: float32 [n], or :class:`Sparse`.

        Raises:
            WireError: the bytes are not a valid payload of this method and tensor.
        """
        raise NotImplementedError(f"{type(self).__name__} must define exchange(), or encode() and decode()")

    def exchange(self, x: Array, state: dict[str, Array], ctx: Context, work: Workspace) -> Communication:
        """Sum ``x`` over ranks with compression. The default encodes, all-gathers, decodes and adds.

        Args:
            x: gradient + residual, float32 [n] (float64 if the method ``keeps_float64``); read only.
            state: the method's state; read only.
            ctx: rank, world_size, step and tensor.
            work: buffers, scan results and counters of this exchange, and the array ops.

        Yields:
            Collectives; each ``yield`` evaluates to the result of its collective.

        Returns:
            The sum, this rank's contribution to it, and the new state.
        """
        pieces = yield AllGather(self.encode(x, state, ctx, work), fixed_length=not self.variable_length)
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
    """Class decorator: turn a class into a method, a frozen dataclass with validated fields.

    ``@method("my_id")`` registers the class under an id. The class may be anywhere, for example in a script or a
    notebook; running a notebook cell again replaces the registered class. ``@method`` without an id uses the name of
    the module, as the files in ``methods/`` do.

    Raises:
        ValueError: the id belongs to a method of this library.
    """
    if not isinstance(given, str):
        return _made(given, given.__module__.rpartition(".")[2])
    if find_spec(f"hvdcompress.methods.{given}"):
        raise ValueError(f"the id {given!r} belongs to a method of hvdcompress; choose another id")

    def register(cls: M) -> M:
        made = REGISTERED[given] = _made(cls, given)
        return made

    return register


def _made(cls: M, id: str) -> M:
    """Set the id of a class and return it as a frozen dataclass with validated fields."""
    cls.id = id
    return pydantic_dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})(cls)  # type: ignore[return-value]
