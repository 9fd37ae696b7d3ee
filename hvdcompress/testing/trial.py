"""Building blocks of the checks: test data, a loopback network that records every collective, and a case to check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from hvdcompress.engine.lockstep import to_numpy
from hvdcompress.engine.transport import Request
from hvdcompress.loopback import Loopback
from hvdcompress.method import Method, TensorSpec
from hvdcompress.ops.spec import Ops
from hvdcompress.parts import seed
from hvdcompress.plan import Grouping, Plan, plan_of

Array = np.ndarray[Any, Any]


def require(condition: object, message: str) -> None:
    """Raise AssertionError with ``message`` unless ``condition`` is true. Unlike ``assert``, it works with ``-O``."""
    if not condition:
        raise AssertionError(message)


# -- data, from the package's integer hash: the same on every machine and with every version of numpy -------

Kind = Literal["normal", "smooth", "shifted", "heavy", "sparse", "zero", "constant", "huge", "denormal", "mixed"]


def numbers(shape: tuple[int, ...], *key: int, kind: Kind = "normal") -> Array:
    """Return pseudo-random test data, reproducible to the bit.

    Args:
        shape: the shape.
        *key: integers that select the data, such as the rank and the step.
        kind: "normal" is nearly Gaussian with unit variance; "smooth" is low-pass filtered; "shifted" has mean 10;
            "heavy" has heavy tails; "sparse" has one tenth non-zero elements; "zero" and "constant" (0.375) have equal
            elements; "mixed" spans 24 powers of ten; "huge" reaches 1e37; "denormal" is below 1e-38.

    Returns:
        A float32 array of ``shape``.
    """
    return _numbers(shape, key, kind).copy()


@lru_cache(maxsize=4096)
def _numbers(shape: tuple[int, ...], key: tuple[int, ...], kind: Kind) -> Array:
    n = math.prod(shape)
    u = seed.uniform(seed._key(*key, 17), 6 * n).reshape(6, n)
    x = (u[0] + u[1] + u[2] + u[3] - np.float32(2)) * np.float32(math.sqrt(3))
    sign = np.where(u[4] < 0.5, np.float32(-1), np.float32(1))
    kinds: dict[Kind, Callable[[], Array]] = {
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
    }
    return kinds[kind]().astype(np.float32).reshape(shape)


# -- a network that records ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """A recorded collective: one round of one tensor, with the payloads of all ranks (of a broadcast, the root's)."""

    name: str  #: name of the tensor
    step: int  #: step of the tensor, from 0
    collective: str  #: class name of the collective
    op: str  #: "sum" or "max" for an all-reduce, else ""
    dtypes: tuple[str, ...]  #: dtypes of the payloads
    lengths: tuple[int, ...]  #: numbers of elements of the payloads
    sent: tuple[bytes, ...]  #: the payloads
    num_bytes: tuple[int, ...]  #: bytes that the ledger charges, by rank
    root: int | None = None  #: root of a broadcast
    splits: bool = False  #: whether it is an all-to-all with pieces of unequal length


#: kind of a request -> class name of the collective
COLLECTIVES = {"all_reduce": "AllReduce", "all_gather": "AllGather", "all_to_all": "AllToAll", "broadcast": "Broadcast"}


def plan_for(method: Method | Plan, **settings: Any) -> Plan:
    """Return a plan that uses ``method`` for tensors of any size. The method need not be registered."""
    return method if isinstance(method, Plan) else plan_of(method, **{"min_elements": 0, **settings})


class Trial(Loopback):
    """A loopback network that records every collective in ``log``.

    Gradients and results are numpy arrays with all array ops. The method gets arrays of the ops' library.

    Args:
        method: a method, or a plan.
        world_size: number of ranks.
        ops: the array ops, one of :func:`backends` (default: those of the CPU drivers).
        loss_scale: the loss scale, or a function that returns it.
        grouping: how tensors are grouped into buckets; by default they are not.
        **settings: plan keys.

    Attributes:
        log: the recorded collectives, oldest first.
    """

    def __init__(
        self,
        method: Method | Plan,
        world_size: int,
        *,
        ops: Ops | None = None,
        loss_scale: Any = 1.0,
        grouping: Grouping | None = None,
        **settings: Any,
    ):
        plan = plan_for(method, **settings)
        super().__init__(plan, world_size, loss_scale=loss_scale, ops=ops, grouping=grouping)
        self.log: list[Collective] = []

    def _carry_out(self, name: str, requests: Sequence[Request]) -> list[Any]:
        requests = [replace(request, payload=to_numpy(request.payload)) for request in requests]
        first = requests[0]
        if first.kind == "broadcast":
            arrays = [requests[first.root or 0].payload]
            num_bytes = tuple((request.send_lengths or (0,))[0] for request in requests)
        else:
            arrays = [request.payload for request in requests]
            num_bytes = tuple(array.nbytes for array in arrays)
        state = self.ranks[0].states.get(name)  # None in the first step of the tensor
        self.log.append(
            Collective(
                name=name,
                step=state.step if state else 0,
                collective=COLLECTIVES[first.kind],
                op=first.op if first.kind == "all_reduce" else "",
                dtypes=tuple(str(array.dtype) for array in arrays),
                lengths=tuple(len(array) for array in arrays),
                sent=tuple(array.tobytes() for array in arrays),
                num_bytes=num_bytes,
                root=first.root,
                splits=first.kind == "all_to_all"
                and any(len(set(request.send_lengths or ())) > 1 for request in requests),
            )
        )
        return super()._carry_out(name, requests)

    def saved(self) -> list[dict[str, Any]]:
        """Return the ``state_dict`` of every rank, with numpy arrays."""
        return [_numpy_tree(rank.state_dict()) for rank in self.ranks]

    def restore(self, saved: Sequence[Mapping[str, Any]], specs: Sequence[TensorSpec]) -> None:
        """Restore the states that :meth:`saved` returned, for the tensors of ``specs``."""
        self._last = None  # the restored tensors may have other owners
        for rank, state in zip(self.ranks, saved, strict=True):
            rank.load_state_dict(state, partial(rank.group, specs, self.grouping, {}))


def _numpy_tree(value: Any) -> Any:
    """Convert the tensors in nested dictionaries to numpy arrays."""
    if isinstance(value, dict):
        return {key: _numpy_tree(item) for key, item in value.items()}
    return to_numpy(value) if hasattr(value, "detach") else value


def backends() -> dict[str, Ops]:
    """Return all array ops that run on the CPU, by name; "numpy" is the reference. Frameworks must be installed."""
    installed = ["numpy", *filter(find_spec, ("numba", "torch"))]  # Triton needs a GPU
    return {name: import_module(f"hvdcompress.ops.{name}").ops for name in installed}


# -- the checks -------------------------------------------------------------------------------------------


@dataclass
class Case:
    """The argument of a check."""

    method: Method
    world_size: int = 2
    sizes: Sequence[int] = (0, 1, 2, 7, 97, 1000)  #: numbers of elements to try
    steps: int = 4  #: steps per run; a method with phases needs enough steps to reach all of them
    ops: Ops | None = None  #: the array ops; by default those of the CPU drivers
    rounding: float = 1e-5  #: relative rounding error to allow in one sum of decoded values
    unbiased: bool = False  #: whether results are unbiased
    seed: int = 0  #: seed of the method's random numbers and of the data

    def shape(self, n: int) -> tuple[int, ...]:
        """Return a shape of n elements, or slightly fewer, that the method can compress: vector, matrix, convolution.

        If there is none, such as for one element and a method for matrices, return a vector, which is sent
        uncompressed.
        """
        side = math.isqrt(n)
        wide = max(1, n // 24)
        for shape in ((n,), (side, n // max(side, 1)), (4, wide, 2, 3), (2, max(1, n // 12), 3, 2)):
            if 0 < math.prod(shape) <= n and self.method.suits(TensorSpec("w", shape)):
                return shape
        return (n,)

    def trial(self, **settings: Any) -> Trial:
        """Return a new :class:`Trial` of the method."""
        settings.setdefault("seed", self.seed)
        return Trial(self.method, self.world_size, ops=self.ops, **settings)

    def gradients(self, n: int | tuple[int, ...], step: int = 0, kind: Kind = "normal") -> list[Array]:
        """Return the gradients of all ranks, for a number of elements or a shape ``n``."""
        shape = n if isinstance(n, tuple) else self.shape(n)
        return [numbers(shape, self.seed, rank, step, kind=kind) for rank in range(self.world_size)]


def equal(a: Array, b: Array) -> bool:
    """Return whether two arrays are bitwise equal: NaNs with the same bits are equal, and 0 and −0 differ."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def same_arrays(a: Sequence[Mapping[str, Array]], b: Sequence[Mapping[str, Array]]) -> bool:
    """Return whether the named arrays of all ranks of two networks are bitwise equal."""
    return all(equal(mine[name], other[name]) for mine, other in zip(a, b, strict=True) for name in mine)


def same_states(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the state dicts of all ranks of two networks are bitwise equal."""
    return all(
        mine["steps"] == other["steps"]
        and mine["state"].keys() == other["state"].keys()
        and all(slots.keys() == other["state"][name].keys() for name, slots in mine["state"].items())
        and all(same_arrays([slots], [other["state"][name]]) for name, slots in mine["state"].items())
        for mine, other in zip(a, b, strict=True)
    )
