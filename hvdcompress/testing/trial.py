"""What the checks are made of: a loopback network that records every collective, test data, and a case to check."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Literal, TypedDict, get_args, get_origin, get_type_hints

import numpy as np

from hvdcompress import registry
from hvdcompress.engine.transport import Request
from hvdcompress.loopback import Loopback
from hvdcompress.method import Density, Method, Sparse, TensorSpec, Values
from hvdcompress.ops.spec import Ops
from hvdcompress.ops.vectors import Coded
from hvdcompress.parts import seed
from hvdcompress.plan import BY_NAME, Bucket, Grouping, Plan, Program, plan_of

Array = np.ndarray[Any, Any]


def require(condition: object, message: str) -> None:
    """Raise AssertionError with ``message`` unless ``condition`` holds; unlike ``assert``, also under ``python -O``."""
    if not condition:
        raise AssertionError(message)


# -- data: from the package's integer hash, so it is the same on every machine and with every numpy ---------

Kind = Literal["normal", "smooth", "shifted", "heavy", "sparse", "zero", "constant", "huge", "denormal", "mixed"]


def numbers(shape: tuple[int, ...], *key: int, kind: Kind = "normal") -> Array:
    """Return test data, reproducible to the bit.

    Args:
        shape: its shape.
        *key: integers that select the data, such as the rank and the step.
        kind: "normal" has unit variance and is nearly bell-shaped; "smooth" is low-pass filtered; "shifted" has mean
            10; "heavy" has heavy tails; "sparse" is one tenth non-zero; "zero" and "constant" (0.375) have equal
            elements; "mixed" spans 24 powers of ten; "huge" reaches 1e37; "denormal" is below 1e-38.

    Returns:
        float32 of ``shape``.
    """
    return _numbers(shape, key, kind).copy()


@lru_cache(maxsize=4096)
def _numbers(shape: tuple[int, ...], key: tuple[int, ...], kind: Kind) -> Array:
    n = math.prod(shape)
    u = seed.uniform(seed._key(*key, 17), 6 * n).reshape(6, n)
    x = (u[0] + u[1] + u[2] + u[3] - np.float32(2)) * np.float32(math.sqrt(3))
    sign = np.where(u[4] < 0.5, np.float32(-1), np.float32(1))
    made = {
        "normal": lambda: x,
        "smooth": lambda: np.convolve(x, np.hanning(9))[4 : 4 + n] if n else x,
        "shifted": lambda: x + np.float32(10),
        "heavy": lambda: sign / (u[5] + np.float32(1e-3)),
        "sparse": lambda: np.where(u[5] < 0.1, x, np.float32(0)),
        "zero": lambda: np.zeros(n, np.float32),
        "constant": lambda: np.full(n, 0.375, np.float32),
        "huge": lambda: sign * np.float32(1e37) * (np.float32(1) - u[5] / 2),
        "denormal": lambda: (sign * np.floor(u[5] * 9) * np.float32(1.4e-45)).astype(np.float32),
        "mixed": lambda: (sign * 10.0 ** (24 * u[5].astype(np.float64) - 12)).astype(np.float32),
    }[kind]()
    return made.astype(np.float32).reshape(shape)


# -- a network that records ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """One recorded collective: one round of one tensor."""

    name: str  #: of the tensor
    step: int
    collective: str  #: name of the collective's class
    op: str  #: "sum" or "max" of an all-reduce, else ""
    dtypes: tuple[str, ...]  #: by rank; of a broadcast, only the root's
    lengths: tuple[int, ...]  #: elements, by rank; of a broadcast, only the root's
    sent: tuple[bytes, ...]  #: payloads, by rank; of a broadcast, only the root's
    num_bytes: tuple[int, ...]  #: bytes charged, by rank
    root: int | None = None  #: of a broadcast
    splits: bool = False  #: whether it is an all-to-all of unequal pieces


#: what a request of each kind is in ``Collective.collective``
COLLECTIVES = {"all_reduce": "AllReduce", "all_gather": "AllGather", "all_to_all": "AllToAll", "broadcast": "Broadcast"}


def plan_for(method: Method | Plan, **settings: Any) -> Plan:
    """Return a plan that uses ``method`` for tensors of any size. The method need not be registered."""
    if isinstance(method, Plan):
        return method
    settings = {"min_elements": 0, **settings}
    if registry.classes().get(method.id) is type(method):
        return plan_of(method, **settings)
    return Plan(Program(((0, method),)), source=json.dumps({"method": method.id}), **settings)


@dataclass(frozen=True)
class Grouped(Plan):
    """A plan whose tensors come together in every step, and so travel together as a network lets them.

    ``Grouped.of(plan)`` makes one of a plan.
    """

    network: Grouping = BY_NAME

    @classmethod
    def of(cls, plan: Plan, network: Grouping = BY_NAME) -> Plan:
        """The plan, for that network."""
        given = {each.name: getattr(plan, each.name) for each in fields(plan)}
        return cls(**{**given, "network": network})

    def buckets(self, specs: Any, grouping: Grouping | None = None, ages: Any = None) -> list[Bucket]:
        """As :meth:`Plan.buckets`, for all tensors of a step."""
        return super().buckets(specs, grouping or self.network, ages)


class Trial(Loopback):
    """A loopback network that records every collective in ``log``.

    Gradients and results are numpy arrays with any backend. The torch backend works on views of their memory.

    Args:
        method: the method, or a plan.
        world: number of ranks.
        ops: the array backend, one of :func:`backends` (default: that of the CPU drivers).
        loss_scale: the loss scale, or a function that returns it.
        **settings: plan keys.
    """

    def __init__(
        self, method: Method | Plan, world: int, *, ops: Ops | None = None, loss_scale: Any = 1.0, **settings: Any
    ):
        given = {} if ops is None else {"ops": adapted(ops)}
        super().__init__(plan_for(method, **settings), world, loss_scale=loss_scale, **given)
        self.log: list[Collective] = []

    def _carry_out(self, name: str, requests: Sequence[Request]) -> list[Any]:
        requests = [replace(request, payload=to_numpy(request.payload)) for request in requests]
        first, kind = requests[0], requests[0].kind
        if kind == "broadcast":
            made = requests[first.root or 0].payload
            arrays, num_bytes = [made], tuple((request.send_lengths or (0,))[0] for request in requests)
        else:
            arrays = [request.payload for request in requests]
            num_bytes = tuple(array.nbytes for array in arrays)
        known = self.ranks[0].states.get(name)  # none in its first step
        self.log.append(
            Collective(
                name,
                known.step if known else 0,
                COLLECTIVES[kind],
                first.op if kind == "all_reduce" else "",
                tuple(str(array.dtype) for array in arrays),
                tuple(len(array) for array in arrays),
                tuple(array.tobytes() for array in arrays),
                num_bytes,
                first.root,
                kind == "all_to_all" and any(len(set(request.send_lengths or ())) > 1 for request in requests),
            )
        )
        return [to_ops(self.ops, result) for result in super()._carry_out(name, requests)]

    def saved(self) -> list[dict[str, Any]]:
        """Return every rank's ``state_dict``, with numpy arrays."""
        return [_numpy_tree(rank.state_dict()) for rank in self.ranks]

    def restore(self, saved: Sequence[Mapping[str, Any]], specs: Sequence[TensorSpec]) -> None:
        """Load what :meth:`saved` returned, for the tensors of ``specs``."""
        buckets = self.plan.buckets(specs)
        for rank, one in zip(self.ranks, saved, strict=True):
            rank.load_state_dict(one, lambda parts: to_ops(self.ops, np.concatenate(parts)), buckets)

    def residual(self, name: str, rank: int) -> Array:
        """Return a rank's residual, as a new numpy array."""
        return to_numpy(super().residual(name, rank)).copy()


def to_numpy(x: Any) -> Any:
    """Return an array of any backend as a numpy array; None as it is."""
    if x is None:
        return None
    return x.detach().cpu().numpy() if hasattr(x, "detach") else np.asarray(x)


def _numpy_tree(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numpy_tree(item) for key, item in value.items()}
    return to_numpy(value) if hasattr(value, "detach") else value


class _TorchOps:
    """Array ops for tensors, taking numpy arrays as views where a driver would hand over tensors."""

    def __init__(self, module: Ops):
        self.module = module

    def __getattr__(self, name: str) -> Any:
        op = getattr(self.module, name)
        if name == "asarray":  # its argument is a host array by contract
            return op
        return lambda *args, **kwargs: op(*map(_tensors, args), **{k: _tensors(v) for k, v in kwargs.items()})


def _tensors(value: Any) -> Any:
    """Return an argument of an op with tensors, which share memory, in the place of numpy arrays."""
    if isinstance(value, np.ndarray):
        import torch

        if not value.size:  # torch is particular about the strides of empty arrays
            return torch.from_numpy(value.copy()).new_zeros(value.shape)
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    if isinstance(value, list):
        return [_tensors(item) for item in value]
    if isinstance(value, Sparse | Coded):
        return type(value)(*map(_tensors, value))
    return value


def adapted(ops: Ops) -> Any:
    """Return a backend as :class:`Trial` runs it: those for tensors take numpy arrays, the others do anyway."""
    return _TorchOps(ops) if getattr(ops, "__name__", "").endswith((".ops.torch", ".ops.triton")) else ops


def to_ops(ops: Ops, array: Any) -> Any:
    """Return a numpy array as a driver would hand it to the backend."""
    return _tensors(array) if isinstance(ops, _TorchOps) else array


def backends() -> dict[str, Ops]:
    """Import the array backends that this machine's processor runs, by name; "numpy" is the reference."""
    import hvdcompress.ops as package

    found: dict[str, Any] = {}
    for info in pkgutil.iter_modules(package.__path__):
        if not info.ispkg or info.name == "triton":  # the spec, and what backends share; that one is for GPUs
            continue
        try:
            found[info.name] = importlib.import_module(f"{package.__name__}.{info.name}")
        except ImportError as error:
            if (error.name or "").startswith(package.__name__):
                raise
    return found


# -- hyper-parameters -------------------------------------------------------------------------------------


VALUES = ("fp32", "fp16", "bf16", "qsgd4", "rangefloat8", "qsgd2", "rangefloat11m5")  #: number formats to try


def variants(cls: type[Method], density: float = 0.06) -> dict[str, dict[str, Any]]:
    """Return settings that together use every option of a method's hyper-parameters at least once.

    They are derived from the types of the fields, so new fields need no entry in a list: each choice, each flag, the
    densities 1, 0.34 and 1e-9, and feedback none, plain and low-pass with each number format. Combinations that the
    method refuses are left out.

    Args:
        cls: the method's class.
        density: the density where it is not varied, if the method has one.

    Returns:
        Settings, by a readable name such as "density=0.06,values=fp16".
    """
    hints = get_type_hints(cls, include_extras=True)
    names = [f.name for f in fields(cls) if f.name not in ("beta", "momentum", "optimizer_momentum")]
    base = {"density": density} if "density" in names else {}
    wanted: list[dict[str, Any]] = [{}, base, {**base, "feedback": "lowpass", "beta": 0.3}]
    wanted += [{**base, **example} for example in cls.examples]
    for name in names:
        options: Sequence[Any] = ()
        if get_origin(hints[name]) is Literal:
            options = get_args(hints[name])
        elif hints[name] is bool:
            options = (False, True)
        elif hints[name] == Values:
            options = VALUES
        elif name == "density" and hints[name] == Density:
            options = (1.0, 0.34, 1e-9)
        wanted += [{**base, name: option} for option in options]
        if name not in ("feedback", "values"):
            wanted += [{**base, name: option, "feedback": "none"} for option in options]
        if name == "values":
            wanted += [{**base, name: option, "feedback": "lowpass", "beta": 0.3} for option in ("fp32", "fp16")]
    found: dict[Method, dict[str, Any]] = {}
    for settings in wanted:
        try:
            found.setdefault(cls(**registry.expand_paper_settings(cls, settings)), settings)
        except ValueError:  # pydantic's ValidationError is one
            continue
    return {",".join(f"{k}={v}" for k, v in s.items()) or "defaults": s for s in found.values()}


# -- the checks -------------------------------------------------------------------------------------------


class Settings(TypedDict, total=False):
    """The optional settings of a case, which ``check_method`` takes as keyword arguments."""

    sizes: Sequence[int]
    """Numbers of elements to try."""
    steps: int
    """Steps per run. A method with phases needs enough to reach all of them."""
    ops: Ops | None
    """The array backend. None: that of the CPU drivers."""
    rounding: float
    """Relative error of one sum of decoded values."""
    unbiased: bool
    """Whether results are unbiased."""
    seed: int
    """Seed of the method's random numbers and of the data."""


@dataclass
class Case:
    """What a check is given: one method in one world. See :class:`Settings` for the other fields."""

    method: Method
    world: int = 2
    ops: Ops | None = None
    sizes: Sequence[int] = (0, 1, 2, 7, 97, 1000)
    steps: int = 4
    rounding: float = 1e-5
    unbiased: bool = False
    seed: int = 0
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Return ``sizes`` as shapes that the method suits."""
        return [self.shape(n) for n in self.sizes]

    def shape(self, n: int) -> tuple[int, ...]:
        """Return a shape of n elements, or slightly fewer, that the method suits: vector, matrix or convolution.

        If there is none, as for one element and a method for matrices, it is a vector, which is sent uncompressed.
        """
        side = math.isqrt(n)
        wide = max(1, n // 24)
        for shape in ((n,), (side, n // max(side, 1)), (4, wide, 2, 3), (2, max(1, n // 12), 3, 2)):
            if math.prod(shape) and self.method.suits(TensorSpec("w", shape)):
                return shape
        return (n,)

    def trial(self, **settings: Any) -> Trial:
        """Return a new :class:`Trial` of the method."""
        settings.setdefault("seed", self.seed)
        return Trial(self.method, self.world, ops=self.ops, **settings)

    def gradients(self, n: int | tuple[int, ...], step: int = 0, kind: Kind = "normal") -> list[Array]:
        """Return the gradients of all ranks for ``n`` elements, or for a shape."""
        shape = n if isinstance(n, tuple) else self.shape(n)
        return [numbers(shape, self.seed, rank, step, kind=kind) for rank in range(self.world)]


def equal(a: Array, b: Array) -> bool:
    """Return whether two arrays are equal to the bit (so equal NaNs are equal, and 0 and −0 differ)."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def same_states(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the state dicts of two networks are equal to the bit."""
    return all(
        one["steps"] == two["steps"]
        and one["state"].keys() == two["state"].keys()
        and all(
            slots.keys() == two["state"][name].keys()
            and all(equal(array, two["state"][name][slot]) for slot, array in slots.items())
            for name, slots in one["state"].items()
        )
        for one, two in zip(a, b, strict=True)
    )
