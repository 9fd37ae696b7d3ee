"""The conformance suite: what every compression method must hold, for ours and for third parties'.

    from hvdcompress.testing import check_method
    check_method(MyMethod(density=0.01))              # raises AssertionError, which names what broke

A method is run by :class:`Trial`, a loopback network that notes every collective, and put through
each of :data:`CHECKS` in several worlds. No test framework is needed, and ``python -O`` switches
nothing off. A method need not be registered; only then its round trip through a plan is checked too.

>>> import hvdcompress
>>> check_method(hvdcompress.get("topk", density=0.1), worlds=(2,), sizes=(1, 50))
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import pkgutil
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from hvdcompress import registry
from hvdcompress.loopback import Loopback
from hvdcompress.method import AllReduce, Broadcast, Density, Method, Sparse, TensorSpec, Turn, Verb
from hvdcompress.parts import feedback, seed
from hvdcompress.plan import Plan, Program, load, plan_of
from hvdcompress.wire import WireError

Array = np.ndarray[Any, Any]

__all__ = ["CHECKS", "Case", "Collective", "Trial", "backends", "check_method", "numbers", "variants"]


def require(condition: object, message: str) -> None:
    """``assert`` that survives ``python -O``."""
    if not condition:
        raise AssertionError(message)


# -- data: the package's own integer hash, so the same on every machine and in every version of numpy ------

Kind = Literal["normal", "shifted", "heavy", "sparse", "zero", "constant", "huge", "denormal", "mixed"]


def numbers(shape: tuple[int, ...], *key: int, kind: Kind = "normal") -> Array:
    """float32 numbers of ``shape``, fixed by ``key``: reproducible to the bit, from no generator of numpy's.

    "normal" has unit variance and is nearly bell-shaped; "heavy" has heavy tails; "sparse" is one tenth
    non-zero; "mixed" spans 24 powers of ten; "huge" reaches 1e37, "denormal" is below 1e-38.
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

    Arrays go in and out as numpy's, whichever backend ``ops`` is: torch's is handed views of their memory.
    """

    def __init__(
        self, method: Method | Plan, world: int, *, ops: Any = None, loss_scale: Any = 1.0, **settings: Any
    ):
        given = {} if ops is None else {"ops": adapted(ops)}
        super().__init__(plan_for(method, **settings), world, loss_scale=loss_scale, **given)
        self.log: list[Collective] = []

    def _carry_out(self, name: str, verbs: list[Any]) -> list[Any]:
        first = verbs[0]
        step = self.workers[0].steps.get(name, 0)
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
            )
        )
        results = super()._carry_out(name, verbs)
        return [
            [_to_ops(self.ops, a) for a in r] if isinstance(r, list) else _to_ops(self.ops, r)
            for r in results
        ]

    def saved(self) -> list[dict[str, Any]]:
        """Every rank's ``state_dict``, with numpy arrays."""
        return [_numpy_tree(worker.state_dict()) for worker in self.workers]

    def restore(self, saved: Sequence[Mapping[str, Any]], specs: Sequence[TensorSpec]) -> None:
        """Load what :meth:`saved` gave, into the tensors of ``specs``."""
        units = self.plan.units(specs)
        for worker, one in zip(self.workers, saved, strict=True):
            worker.load_state_dict(one, units, lambda parts: _to_ops(self.ops, np.concatenate(parts)))

    def residual(self, name: str, rank: int) -> Array:
        """As the loopback's, and always a fresh numpy array."""
        return _numpy(super().residual(name, rank)).copy()


def _on_host(verb: Verb) -> Verb:
    if isinstance(verb, Broadcast):
        return Broadcast(lambda: _numpy(verb.make()), int(verb.root), int(verb.num_bytes))
    if isinstance(verb, AllReduce):
        return AllReduce(_numpy(verb.x), verb.op)
    return type(verb)(_numpy(verb.x))


def _numpy(x: Any) -> Array:
    return x if isinstance(x, np.ndarray) else x.detach().cpu().numpy()


def _numpy_tree(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numpy_tree(item) for key, item in value.items()}
    return _numpy(value) if hasattr(value, "detach") else value


class _TorchOps:
    """ops/torch.py, taking numpy arrays as views where a driver would hand over tensors."""

    def __init__(self, module: Any):
        self.module = module

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.module, name)
        if not callable(verb) or name == "asarray":  # asarray's argument is a host array by contract
            return verb
        return lambda *args, **kwargs: verb(
            *map(_tensors, args), **{k: _tensors(v) for k, v in kwargs.items()}
        )


def _tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        import torch

        if not value.size:  # torch is particular about the strides of nothing
            return torch.from_numpy(value.copy()).new_zeros(value.shape)
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    if isinstance(value, list):
        return [_tensors(item) for item in value]
    if isinstance(value, Sparse):
        return Sparse(*map(_tensors, value))
    return value


def adapted(ops: Any) -> Any:
    """A backend as :class:`Trial` runs it."""
    name = getattr(ops, "__name__", "")
    if name in ("hvdcompress.ops.tensorflow",):
        raise ValueError("the TensorFlow backend runs inside graphs only: it is tested with its driver")
    return _TorchOps(ops) if name == "hvdcompress.ops.torch" else ops


def _to_ops(ops: Any, array: Any) -> Any:
    return _tensors(array) if isinstance(ops, _TorchOps) else array


def backends() -> dict[str, Any]:
    """The array backends that this machine can run in a :class:`Trial`, by name; "numpy" is the reference."""
    import hvdcompress.ops as package

    found: dict[str, Any] = {}
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("_") or info.name == "tensorflow":
            continue
        try:
            found[info.name] = importlib.import_module(f"{package.__name__}.{info.name}")
        except ImportError as error:
            if (error.name or "").startswith(package.__name__):
                raise
    return found


# -- hyper-parameters -------------------------------------------------------------------------------------


def variants(cls: type[Method], density: float = 0.06) -> dict[str, dict[str, Any]]:
    """Settings that between them give every option of a method's hyper-parameters at least once.

    Read off the fields' types, so that a new field is varied without anybody listing it: each choice and each
    flag, densities 1, tiny and default, and feedback none, plain and low-pass (β = 1 and 0.3) with each width
    of values. Combinations that the method refuses are left out.
    """
    hints = get_type_hints(cls, include_extras=True)
    names = [f.name for f in fields(cls) if f.name != "beta"]
    base = {"density": density} if "density" in names else {}
    wanted: list[dict[str, Any]] = [{}, base, {**base, "feedback": "lowpass", "beta": 0.3}]
    for name in names:
        options: Sequence[Any] = ()
        if get_origin(hints[name]) is Literal:
            options = get_args(hints[name])
        elif hints[name] is bool:
            options = (False, True)
        elif name == "density" and hints[name] == Density:
            options = (1.0, 0.34, 1e-9)
        wanted += [{**base, name: option} for option in options]
        if name not in ("feedback",):
            wanted += [{**base, name: option, "feedback": "none"} for option in options]
        if name == "values":
            wanted += [{**base, name: option, "feedback": "lowpass", "beta": 0.3} for option in options]
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

    def trial(self, **settings: Any) -> Trial:
        """A fresh network."""
        settings.setdefault("seed", self.seed)
        return Trial(self.method, self.world, ops=self.ops, **settings)

    def gradients(self, n: int | tuple[int, ...], step: int = 0, kind: Kind = "normal") -> list[Array]:
        """Every rank's gradient."""
        shape = n if isinstance(n, tuple) else (n,)
        return [numbers(shape, self.seed, rank, step, kind=kind) for rank in range(self.world)]


def _equal(a: Array, b: Array) -> bool:
    """To the bit (a NaN equals the same NaN, and 0 differs from −0)."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _same_states(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> bool:
    return all(
        one["steps"] == two["steps"]
        and one["state"].keys() == two["state"].keys()
        and all(
            slots.keys() == two["state"][name].keys()
            and all(_equal(array, two["state"][name][slot]) for slot, array in slots.items())
            for name, slots in one["state"].items()
        )
        for one, two in zip(a, b, strict=True)
    )


def check_value(case: Case) -> None:
    """A method is a frozen, hashable value, equal to another with the same fields, and survives a plan."""
    method, settings = case.method, case.method.hyperparameters()
    twin = type(method)(**settings)
    require(
        twin == method and hash(twin) == hash(method), f"{method} made again from its fields is another value"
    )
    require(twin is not method and {method, twin} == {method}, "equal methods must count as one in a set")
    for name in settings:
        try:
            setattr(method, name, settings[name])
        except (FrozenInstanceError, AttributeError):
            continue
        raise AssertionError(f"field {name!r} can be written: methods are frozen")
    for text in ("id", "paper", "sends"):
        require(getattr(method, text), f"the method has no {text!r}")
    require(
        json.loads(json.dumps(settings)) == settings, f"hyper-parameters cannot go through JSON: {settings}"
    )
    if registry.classes().get(method.id) is type(method):
        require(
            registry.get(method.id, **settings) == method, "get(id, **hyperparameters()) is another method"
        )
        plan = plan_of(method)
        again = load(json.loads(json.dumps(plan.to_dict())))
        require(plan.program.main == method, f"the plan made from {method} holds {plan.program.main}")
        require(again == plan and again.program.main == method, "load(plan.to_dict()) differs from the plan")
        require(again.fingerprint == plan.fingerprint, "load(plan.to_dict()) has another fingerprint")


def check_shapes(case: Case) -> None:
    """Any shape, size and dtype comes back as it went in; inputs stay untouched; nothing is aliased."""
    net = case.trial()
    shapes: list[tuple[int, ...]] = [(n,) for n in case.sizes] + [(), (3, 5, 7), (0, 4)]
    for number, shape in enumerate(shapes):
        for dtype in ("float32", "float64", "float16"):
            given = [g.astype(dtype) for g in case.gradients(shape, number)]
            before = [g.copy() for g in given]
            for g in given:
                g.flags.writeable = False  # writing one would raise, and say where
            for kept in (
                net.allreduce(given, f"{dtype}.{number}"),
                net.allreduce(given, f"{dtype}.{number}"),
            ):
                for rank, out in enumerate(kept):
                    where = f"shape {shape}, {dtype}, rank {rank}"
                    require(
                        out.shape == shape and out.dtype == dtype,
                        f"{where}: {out.shape} {out.dtype} came back",
                    )
                    require(np.isfinite(out).all(), f"{where}: the result is not finite")
                    require(_equal(given[rank], before[rank]), f"{where}: the input was changed")
                    require(not np.shares_memory(out, given[rank]), f"{where}: the result aliases the input")
                    others = [other for r, other in enumerate(kept) if r != rank]
                    require(
                        not any(np.shares_memory(out, o) for o in others),
                        f"{where}: results alias each other",
                    )


def check_layout(case: Case) -> None:
    """How a gradient lies in memory (transposed, strided) makes no difference."""
    layouts: dict[str, Callable[[Array], Array]] = {"F-ordered": np.asfortranarray, "strided": _strided}
    for name, layout in layouts.items():
        given = case.gradients((4, 6), 99)
        plain = case.trial().allreduce(given, "w")
        other = case.trial().allreduce([layout(g) for g in given], "w")
        require(
            all(map(np.array_equal, plain, other)), f"a gradient that is {name} in memory gets another result"
        )


def _strided(x: Array) -> Array:
    wide = np.zeros((x.shape[0], 2 * x.shape[1]), x.dtype)
    wide[:, ::2] = x
    return wide[:, ::2]


def check_results(case: Case) -> None:
    """All ranks end bit-identical, an average is the sum over the world, and no result is a reused buffer."""
    summing, averaging = case.trial(), case.trial()
    for n in case.sizes:
        earlier: list[tuple[Array, Array]] = []
        for step in range(case.steps):
            given = case.gradients(n, step, "heavy" if step % 2 else "normal")
            total = summing.allreduce(given, str(n), op="sum")
            mean = averaging.allreduce(given, str(n))
            for rank in range(1, case.world):
                require(
                    _equal(mean[0], mean[rank]),
                    f"n = {n}, step {step}: ranks 0 and {rank} got different results",
                )
            spread = 1e-5 * float(np.sum(np.abs(given), axis=0).max(initial=0.0))
            close = np.allclose(mean[0] * np.float32(case.world), total[0], rtol=1e-5, atol=spread)
            require(close, f"n = {n}, step {step}: average × world is not the sum")
            require(
                all(_equal(*pair) for pair in earlier),
                f"n = {n}, step {step}: an earlier result was overwritten",
            )
            earlier.append((mean[-1], mean[-1].copy()))


def check_finite(case: Case) -> None:
    """Finite in, finite out: zeros, constants, denormals, 24 powers of ten, and magnitudes up to 1e37."""
    kinds: tuple[Kind, ...] = ("zero", "constant", "denormal", "mixed", "huge", "sparse", "shifted")
    for n in [n for n in case.sizes if n <= 100][-3:]:
        for kind in kinds:
            # an unbiased result may be n times its input, and there is no float32 beyond 3.4e38
            shrink = np.float32(1 / max(n, 1)) if case.unbiased else np.float32(1)
            net = case.trial()
            for step in range(2):
                given = [g * shrink for g in case.gradients(n, step, kind)]
                outs = net.allreduce(given, "w")
                where = f"{kind} gradients, n = {n}, step {step}"
                require(all(np.isfinite(out).all() for out in outs), f"{where}: the result is not finite")
                for rank in range(case.world):
                    finite = np.isfinite(net.residual("w", rank)).all()
                    require(finite, f"{where}: rank {rank}'s residual is not finite")
                if kind == "zero":
                    require(
                        not any(out.any() for out in outs),
                        f"{where}: zeros in, {outs[0][outs[0] != 0][:3]} out",
                    )


def check_conservation(case: Case) -> None:
    """Nothing is lost: Σ sent = Σ gradients − Σ (residual_T − residual_0)/β, over steps and ranks.

    β is 1 for plain feedback. For a method without feedback there is nothing to check here.
    """
    if case.method.feedback == "none":
        return
    beta = feedback.beta(case.method)
    for n in case.sizes:
        net = case.trial()
        sent, given, largest = np.zeros(n), np.zeros(n), 0.0
        residuals = np.zeros(n)
        for step in range(case.steps + case.world):
            gradients = case.gradients(n, step, "heavy" if step % 3 == 2 else "normal")
            total = net.allreduce(gradients, "w", op="sum")[0].astype(np.float64)
            sent, given = sent + total, given + np.sum(gradients, axis=0, dtype=np.float64)
            residuals = np.sum(
                [net.residual("w", rank) for rank in range(case.world)], axis=0, dtype=np.float64
            )
            per_rank = [np.abs(x).max(initial=0) for x in gradients]
            largest = max(largest, float(np.sum(per_rank)), float(np.abs(total).max(initial=0)))
            gap = np.abs(sent - (given - residuals / beta)).max(initial=0.0)
            allowed = case.rounding * (step + 1) * (largest + np.abs(residuals).max(initial=0) / beta)
            require(
                gap <= allowed,
                f"n = {n}, step {step}: sent + residual is not the sum of the gradients: off by {gap:.3g}, "
                f"{allowed:.3g} is rounding",
            )


def check_unbiased(case: Case) -> None:
    """Where declared: the mean over steps is the gradient, within six standard errors."""
    if not case.unbiased:
        return
    n, steps = 24, 300
    net = case.trial()
    given = case.gradients(n)
    outs = np.array([net.allreduce(given, "w")[0] for _ in range(steps)], np.float64)
    error = np.abs(outs.mean(axis=0) - np.mean(given, axis=0, dtype=np.float64))
    allowed = 6 * outs.std(axis=0) / math.sqrt(steps) + case.rounding
    worst = int((error - allowed).argmax())
    text = f"biased: place {worst} is off by {error[worst]:.3g}, allowed {allowed[worst]:.3g}"
    require((error <= allowed).all(), text)


def check_bytes(case: Case) -> None:
    """The ledger's bytes are those of the payloads that really went, and the method's own formula."""
    net = case.trial()
    for n in case.sizes:
        for dtype in ("float32", "float64", "float16"):
            name = f"{dtype}.{n}"
            spec = TensorSpec(name, (n,), dtype)
            before = [net.ledger.bytes_sent(rank) for rank in range(case.world)]
            net.log.clear()
            net.allreduce([g.astype(dtype) for g in case.gradients(n)], name)
            formula = case.method.num_bytes(spec, case.world)
            for rank in range(case.world):
                sent = net.ledger.bytes_sent(rank) - before[rank]
                payloads = sum(collective.num_bytes[rank] for collective in net.log)
                where = f"n = {n}, {dtype}, rank {rank}"
                require(
                    sent == payloads, f"{where}: the ledger says {sent} bytes, the payloads have {payloads}"
                )
                require(
                    sent == formula,
                    f"{where}: num_bytes() says {formula}, the payloads have {payloads} bytes",
                )
    small = Trial(plan_for(case.method, min_elements=50), case.world, ops=case.ops)
    small.allreduce(case.gradients(49), "small")
    require(
        small.ledger.bytes_sent(0) == 4 * 49,
        "a tensor below min_elements must go dense, at 4 bytes an element",
    )
    require(not small.residual("small", 0).any(), "a tensor below min_elements must have a residual of zeros")


def check_choreography(case: Case) -> None:
    """Verbs and dtypes are fixed by spec, phase and world, whatever the data, rank and step."""
    known: dict[tuple[int, int], list[tuple[str, str, str]]] = {}
    kinds: tuple[Kind, ...] = ("normal", "zero", "heavy")
    for n in case.sizes:
        for kind in kinds:
            net = case.trial(seed=case.seed + len(kind))
            for step in range(case.steps if kind == "normal" else 2):
                net.log.clear()
                net.allreduce(case.gradients(n, step, kind), "w")
                verbs = []
                for collective in net.log:
                    where = f"n = {n}, {kind}, step {step}, {collective.verb}"
                    dtypes, lengths = set(collective.dtypes), set(collective.lengths)
                    require(len(dtypes) == 1, f"{where}: ranks give different dtypes: {sorted(dtypes)}")
                    dtype = dtypes.pop()
                    if collective.verb != "AllReduce":
                        require(dtype == "uint8", f"{where} carries {dtype}, not uint8")
                    if collective.verb != "AllGather":
                        require(
                            len(lengths) == 1, f"{where}: ranks give different lengths: {sorted(lengths)}"
                        )
                    if collective.verb == "Broadcast":
                        size = collective.num_bytes[0]
                        require(size % 4 == 0, f"{where}: {size} bytes are no int32s")
                    if collective.verb == "AllToAll":
                        even = lengths.pop() % case.world == 0
                        require(even, f"{where} cannot be cut into {case.world} equal pieces")
                    verbs.append((collective.verb, collective.op, dtype))
                key = (n, case.method.phase_of(step))
                first = known.setdefault(key, verbs)
                require(
                    verbs == first, f"n = {n}, {kind}, step {step}: the verbs are {verbs}, they were {first}"
                )


def check_deterministic(case: Case) -> None:
    """The same seed gives the same bytes; numpy's and Python's global generators are left alone."""
    with _generators_untouched():
        nets = [case.trial(), case.trial()]
        for step in range(case.steps):
            outs = []
            for number, net in enumerate(nets):
                np.random.seed(number)  # what the global generator holds must not matter
                random.seed(number)
                state, python = np.random.get_state()[1].copy(), random.getstate()  # type: ignore[union-attr, index]
                outs.append(net.allreduce(case.gradients(200, step), "w")[0])
                same = (np.random.get_state()[1] == state).all() and random.getstate() == python  # type: ignore[index]
                require(same, f"step {step}: a global random generator was used")
            require(_equal(*outs), f"step {step}: the same seed gave different results")
        require(nets[0].log == nets[1].log, "the same seed gave different payloads")


@contextmanager
def _generators_untouched() -> Iterator[None]:
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def check_nonfinite(case: Case) -> None:
    """A NaN or Inf on one rank: NaN everywhere, states exactly as before, and then as if it had not been."""
    for number, bad in enumerate((np.nan, np.inf, -np.inf)):
        rank = number % case.world
        net, spared = case.trial(), case.trial()
        for step in range(case.steps):
            both = zip(case.gradients(60, step), case.gradients(33, 9 + step), strict=True)
            given = [{"a": a, "b": b} for a, b in both]
            if step:
                before = net.saved()
                broken = [{name: g.copy() for name, g in one.items()} for one in given]
                broken[rank]["b"][-1] = bad
                for r, out in enumerate(net.allreduce_many(broken)):
                    for name in ("a", "b"):
                        nan = np.isnan(out[name]).all()
                        require(
                            nan,
                            f"{bad} in 'b' of rank {rank}: rank {r} did not get NaN everywhere in {name!r}",
                        )
                require(
                    _same_states(before, net.saved()), f"{bad} on rank {rank} at step {step} changed a state"
                )
            outs, expected = net.allreduce_many(given), spared.allreduce_many(given)
            for r in range(case.world):
                for name in ("a", "b"):
                    same = _equal(outs[r][name], expected[r][name])
                    require(
                        same, f"{bad} at step {step}: the next step differs from a run that was spared it"
                    )
        same = _same_states(net.saved(), spared.saved())
        require(same, f"{bad}: states differ from those of a run that was spared it")


def check_resume(case: Case) -> None:
    """State saved and loaded is state: the run goes on bit-exactly, and what was saved stays a copy."""
    straight, first, second = case.trial(), case.trial(), case.trial()
    specs = [TensorSpec("v", (3, 5)), TensorSpec("w", (70,))]

    def gradients(step: int) -> list[dict[str, Array]]:
        vs, ws = case.gradients((3, 5), step), case.gradients(70, 50 + step)
        return [{"v": v, "w": w} for v, w in zip(vs, ws, strict=True)]

    for step in range(3):
        straight.allreduce_many(gradients(step))
        first.allreduce_many(gradients(step))
    saved = first.saved()
    untouched = copy.deepcopy(saved)
    for one in saved:
        for slots in one["state"].values():
            for slot, array in slots.items():
                kind = type(array)
                require(
                    kind is np.ndarray, f"slot {slot!r} is saved as {kind.__name__}, not as a plain array"
                )
    for rank in range(case.world):  # a saved state is not a view into a live one
        first.allreduce_many(gradients(77 + rank))
    require(_same_states(saved, untouched), "a saved state changed as the run went on")
    second.restore(saved, specs)
    for step in range(3, 6):
        for a, b in zip(
            straight.allreduce_many(gradients(step)), second.allreduce_many(gradients(step)), strict=True
        ):
            for name in a:
                require(
                    _equal(a[name], b[name]), f"{name!r}, step {step}: resumed and uninterrupted runs differ"
                )
    require(
        _same_states(straight.saved(), second.saved()),
        "resumed and uninterrupted runs end with different states",
    )
    require(_same_states(saved, untouched), "the resumed run wrote into what it was loaded from")


def check_loss_scale(case: Case) -> None:
    """Residuals are kept in unscaled units: a loss scale that changes shows in the result's scale only.

    Without feedback nothing is kept, and a loss scale changes nothing.
    """
    now = [1.0]
    plain, scaled = case.trial(), case.trial(loss_scale=lambda: now[0])
    for step in range(case.steps):
        now[0] = float(2 ** (3 * step % 7))  # a power of two scales exactly
        factor = np.float32(now[0])
        given = case.gradients(90, step)
        where = f"step {step}, loss scale {now[0]}"
        out = scaled.allreduce([g * factor for g in given], "w")[0]
        if case.method.feedback == "none":
            expected = plain.allreduce([g * factor for g in given], "w")[0]
        else:
            expected = plain.allreduce(given, "w")[0] * factor
        close = np.allclose(out, expected, rtol=case.rounding, atol=case.rounding * float(factor))
        require(close, f"{where}: the result is {out[:3]}…, should be {expected[:3]}…")
        for rank in range(case.world):
            kept, other = plain.residual("w", rank), scaled.residual("w", rank)
            close = np.allclose(kept, other, rtol=case.rounding, atol=case.rounding)
            require(close, f"{where}: rank {rank}'s residual is not in unscaled units")


def check_state(case: Case) -> None:
    """The state is what the method declares: the same slots, sizes and dtypes after every step."""
    n = 65
    net = case.trial()
    declared = feedback.slots(case.method, TensorSpec("w", (n,)))
    for step in range(case.steps):
        net.allreduce(case.gradients(n, step), "w")
        for rank, worker in enumerate(net.workers):
            state = worker.states["w"]
            require(
                state.keys() == declared.keys(),
                f"slots {sorted(state)} are kept, {sorted(declared)} declared",
            )
            for slot, array in state.items():
                host, want = _numpy(array), declared[slot]
                kept = f"step {step}, rank {rank}: slot {slot!r}"
                require(
                    host.size == math.prod(want.shape),
                    f"{kept} has {host.size} elements, declared {want.shape}",
                )
                require(str(host.dtype) == want.dtype, f"{kept} is {host.dtype}, declared {want.dtype}")
    for slot, want in declared.items():
        if want.scope == "shared":
            copies = [_numpy(worker.states["w"][slot]).tobytes() for worker in net.workers]
            require(len(set(copies)) == 1, f"slot {slot!r} is declared shared, and differs between ranks")


def check_wire(case: Case) -> None:
    """Damaged payloads raise ``WireError``, or decode to something that fits the tensor."""
    if type(case.method).decode is Method.decode:
        return
    n = 120
    net = case.trial()
    net.allreduce(case.gradients(n), "w")
    payloads = [np.frombuffer(sent, np.uint8) for c in net.log if c.verb == "AllGather" for sent in c.sent]
    me = Turn(0, case.world, 0, TensorSpec("w", (n,)), case.seed)
    ops = net.ops
    for payload in payloads[:2]:
        share = case.method.decode(_to_ops(ops, payload.copy()), me, ops)
        _fits(share, n, "an undamaged payload")
        hashes = seed.uniform(seed._key(case.seed, len(payload)), 90)
        for number, u in enumerate(hashes):
            bad = payload.copy()
            place = int(u * len(bad)) if len(bad) else 0
            if number % 3 == 0:
                bad = bad[:place].copy()
            elif number % 3 == 1:
                bad[place] ^= np.uint8(1 << number % 8)
            else:
                bad = np.concatenate([bad, bad[:place]])
            try:
                _fits(case.method.decode(_to_ops(ops, bad), me, ops), n, "a damaged payload")
            except WireError:
                continue


def _fits(share: Any, n: int, what: str) -> None:
    if isinstance(share, Sparse):
        index, values = _numpy(share.index), _numpy(share.values)
        require(len(index) == len(values), f"{what} decodes to {len(index)} indices and {len(values)} values")
        require(((index >= 0) & (index < n)).all(), f"{what} decodes to an index outside of the tensor")
    else:
        require(len(_numpy(share)) == n, f"{what} decodes to {len(_numpy(share))} elements instead of {n}")


Check = Callable[[Case], None]
CHECKS: tuple[Check, ...] = (
    check_value, check_shapes, check_layout, check_results, check_finite, check_conservation, check_unbiased,
    check_bytes, check_choreography, check_deterministic, check_nonfinite, check_resume, check_loss_scale,
    check_state, check_wire,
)  # fmt: skip
"""Every check, in the order in which :func:`check_method` runs them."""

ROUNDING = {"fp16": 2.0**-9, "bf16": 2.0**-6}


def rounding_of(method: Method) -> float:
    """Relative rounding error of a sum of the method's values, by its id or its ``values``."""
    return max(
        (ROUNDING.get(str(word), 1e-5) for word in (method.id, getattr(method, "values", ""))), default=1e-5
    )


def check_method(
    method: Method,
    *,
    worlds: Sequence[int] = (1, 2, 3, 5),
    sizes: Sequence[int] = (0, 1, 2, 7, 97, 1000),
    steps: int = 4,
    ops: Any = None,
    rounding: float | None = None,
    unbiased: bool | None = None,
    seed: int = 0,
    checks: Sequence[Check] = CHECKS,
) -> None:
    """Put a method through the conformance suite.

    Args:
        method: the method, with the hyper-parameters to check.
        worlds: numbers of ranks.
        sizes: numbers of elements.
        steps: steps of each run; a method with phases needs enough to go through them.
        ops: the array backend (default: the CPU drivers').
        rounding: relative error of one sum of decoded values (default: by the width of its ``values``).
        unbiased: whether results are declared unbiased (default: its field ``unbiased``, else False).
        seed: of the method's randomness and of the data.
        checks: some of :data:`CHECKS`.

    Raises:
        AssertionError: something does not hold; the message names the method, the check and what broke.
    """
    for world in worlds:
        for check in checks:
            case = Case(
                method,
                world,
                ops,
                sizes,
                steps,
                rounding_of(method) if rounding is None else rounding,
                bool(getattr(method, "unbiased", False)) if unbiased is None else unbiased,
                seed,
            )
            try:
                check(case)
            except Exception as error:
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                text = f"{method} does not hold {check.__name__} with {world} ranks: {kind}{error}"
                raise AssertionError(text) from error
