"""A loopback network that notes every collective, data from the package's own hash, and what a check is given."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from hvdcompress import registry
from hvdcompress.loopback import Loopback
from hvdcompress.method import Broadcast, Density, Method, Sparse, TensorSpec, Values, Verb
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import seed
from hvdcompress.plan import Plan, Program, plan_of

Array = np.ndarray[Any, Any]


def require(condition: object, message: str) -> None:
    """``assert`` that survives ``python -O``."""
    if not condition:
        raise AssertionError(message)


# -- data: the package's own integer hash, so the same on every machine and in every version of numpy ------

Kind = Literal["normal", "smooth", "shifted", "heavy", "sparse", "zero", "constant", "huge", "denormal", "mixed"]


def numbers(shape: tuple[int, ...], *key: int, kind: Kind = "normal") -> Array:
    """float32 numbers of ``shape``, fixed by ``key``: reproducible to the bit, from no generator of numpy's.

    "normal" has unit variance and is nearly bell-shaped; "smooth" is a low-pass of it; "heavy" has heavy tails;
    "sparse" is one tenth non-zero; "mixed" spans 24 powers of ten; "huge" reaches 1e37, "denormal" is below 1e-38.
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


# -- a network that watches -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """One round of one tensor; ``sent`` is every rank's memory (of a broadcast: the root's)."""

    name: str
    step: int
    verb: str
    op: str
    dtypes: tuple[str, ...]
    lengths: tuple[int, ...]
    sent: tuple[bytes, ...]
    num_bytes: tuple[int, ...]
    root: int | None = None
    splits: bool = False  #: an all-to-all of unequal pieces


def plan_for(method: Method | Plan, **settings: Any) -> Plan:
    """A plan that gives every tensor ``method``, however small; an unregistered method will do."""
    if isinstance(method, Plan):
        return method
    settings = {"min_elements": 0, **settings}
    if registry.classes().get(method.id) is type(method):
        return plan_of(method, **settings)
    return Plan(Program(((0, method),)), source=json.dumps({"method": method.id}), **settings)


class Trial(Loopback):
    """A loopback whose collectives are all noted in ``log``.

    Arrays go in and out as numpy arrays, whichever backend ``ops`` is: torch receives views of their memory.
    """

    def __init__(self, method: Method | Plan, world: int, *, ops: Any = None, loss_scale: Any = 1.0, **settings: Any):
        given = {} if ops is None else {"ops": adapted(ops)}
        super().__init__(plan_for(method, **settings), world, loss_scale=loss_scale, **given)
        self.log: list[Collective] = []

    def _carry_out(self, name: str, verbs: list[Any]) -> list[Any]:
        first = verbs[0]
        step = self.ranks[0].steps.get(name, 0)
        verbs = [_on_host(verb) for verb in verbs]
        if isinstance(first, Broadcast):
            made = verbs[int(first.root) % self.world].make()
            arrays, num_bytes = [made], tuple(int(verb.num_bytes) for verb in verbs)
        else:
            arrays = [verb.x for verb in verbs]
            num_bytes = tuple(array.nbytes for array in arrays)
        root = int(first.root) if isinstance(first, Broadcast) else None
        self.log.append(
            Collective(
                name,
                step,
                type(first).__name__,
                getattr(first, "op", ""),
                tuple(str(array.dtype) for array in arrays),
                tuple(len(array) for array in arrays),
                tuple(array.tobytes() for array in arrays),
                num_bytes,
                root,
                getattr(first, "splits", None) is not None,
            )
        )
        results = super()._carry_out(name, verbs)
        return [[to_ops(self.ops, a) for a in r] if isinstance(r, list) else to_ops(self.ops, r) for r in results]

    def saved(self) -> list[dict[str, Any]]:
        """Every rank's ``state_dict``, with numpy arrays."""
        return [_numpy_tree(worker.state_dict()) for worker in self.ranks]

    def restore(self, saved: Sequence[Mapping[str, Any]], specs: Sequence[TensorSpec]) -> None:
        """Load what :meth:`saved` gave, into the tensors of ``specs``."""
        buckets = self.plan.buckets(specs)
        for worker, one in zip(self.ranks, saved, strict=True):
            worker.load_state_dict(one, buckets, lambda parts: to_ops(self.ops, np.concatenate(parts)))

    def residual(self, name: str, rank: int) -> Array:
        """As the loopback's, and always a fresh numpy array."""
        return to_numpy(super().residual(name, rank)).copy()


def _on_host(verb: Verb) -> Verb:
    if isinstance(verb, Broadcast):
        return Broadcast(lambda: to_numpy(verb.make()), int(verb.root), int(verb.num_bytes))
    return replace(verb, x=to_numpy(verb.x))  # type: ignore[union-attr]


def to_numpy(x: Any) -> Array:
    return x.detach().cpu().numpy() if hasattr(x, "detach") else np.asarray(x)


def _numpy_tree(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numpy_tree(item) for key, item in value.items()}
    return to_numpy(value) if hasattr(value, "detach") else value


class _TorchOps:
    """The verbs of ``ops/torch``, taking numpy arrays as views where a driver would hand over tensors."""

    def __init__(self, module: Ops):
        self.module = module

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.module, name)
        if name == "asarray":  # its argument is a host array by contract
            return verb
        return lambda *args, **kwargs: verb(*map(_tensors, args), **{k: _tensors(v) for k, v in kwargs.items()})


def _tensors(value: Any) -> Any:
    """Return an argument of a verb with tensors, which share memory, in the place of numpy arrays."""
    if isinstance(value, np.ndarray):
        import torch

        if not value.size:  # torch is particular about the strides of empty arrays
            return torch.from_numpy(value.copy()).new_zeros(value.shape)
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    if isinstance(value, list):
        return [_tensors(item) for item in value]
    if isinstance(value, Sparse):
        return Sparse(*map(_tensors, value))
    return value


def adapted(ops: Any) -> Any:
    """Return a backend as :class:`Trial` runs it: torch's takes numpy arrays, the others do anyway."""
    return _TorchOps(ops) if getattr(ops, "__name__", "") == "hvdcompress.ops.torch" else ops


def to_ops(ops: Any, array: Any) -> Any:
    """Return a numpy array as a driver would hand it to the backend."""
    return _tensors(array) if isinstance(ops, _TorchOps) else array


def backends() -> dict[str, Ops]:
    """Import the array backends that this machine has, by name; "numpy" is the reference."""
    import hvdcompress.ops as package

    found: dict[str, Any] = {}
    for info in pkgutil.iter_modules(package.__path__):
        if not info.ispkg:  # the spec, and what backends share
            continue
        try:
            found[info.name] = importlib.import_module(f"{package.__name__}.{info.name}")
        except ImportError as error:
            if (error.name or "").startswith(package.__name__):
                raise
    return found


# -- hyper-parameters -------------------------------------------------------------------------------------


VALUES = ("fp32", "fp16", "bf16", "qsgd4", "rangefloat8", "qsgd2", "rangefloat11m5")  #: those that are tried


def variants(cls: type[Method], density: float = 0.06) -> dict[str, dict[str, Any]]:
    """Settings that between them give every option of a method's hyper-parameters at least once.

    Read off the fields' types, so that a new field is varied without anybody listing it: each choice and each
    flag, densities 1, tiny and default, and feedback none, plain and low-pass (β = 1 and 0.3) with each width
    of values. Combinations that the method refuses are left out.
    """
    hints = get_type_hints(cls, include_extras=True)
    names = [f.name for f in fields(cls) if f.name not in ("beta", "momentum")]
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
            found.setdefault(cls(**settings), settings)
        except ValueError:  # pydantic's ValidationError is one
            continue
    return {",".join(f"{k}={v}" for k, v in s.items()) or "defaults": s for s in found.values()}


# -- the checks -------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One method in one world: what a check is given."""

    method: Method
    world: int = 2
    ops: Any = None
    sizes: Sequence[int] = (0, 1, 2, 7, 97, 1000)
    steps: int = 4
    rounding: float = 1e-5
    unbiased: bool = False
    seed: int = 0
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """``sizes`` as shapes that the method suits."""
        return [self.shape(n) for n in self.sizes]

    def shape(self, n: int) -> tuple[int, ...]:
        """A shape of n elements, or a few less, that the method suits: a vector, a matrix or a convolution.

        Where none does, as for a single element and a method for matrices, it is a vector, which goes dense.
        """
        side = math.isqrt(n)
        wide = max(1, n // 24)
        for shape in ((n,), (side, n // max(side, 1)), (4, wide, 2, 3), (2, max(1, n // 12), 3, 2)):
            if math.prod(shape) and self.method.suits(TensorSpec("w", shape)):
                return shape
        return (n,)

    def trial(self, **settings: Any) -> Trial:
        """A fresh network."""
        settings.setdefault("seed", self.seed)
        return Trial(self.method, self.world, ops=self.ops, **settings)

    def gradients(self, n: int | tuple[int, ...], step: int = 0, kind: Kind = "normal") -> list[Array]:
        """Every rank's gradient."""
        shape = n if isinstance(n, tuple) else self.shape(n)
        return [numbers(shape, self.seed, rank, step, kind=kind) for rank in range(self.world)]


def equal(a: Array, b: Array) -> bool:
    """To the bit (a NaN equals the same NaN, and 0 differs from −0)."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def same_states(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> bool:
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
