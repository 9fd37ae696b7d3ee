"""What the Compressors of PyTorch's drivers have in common: named parameters, their buckets, state as tensors."""

from __future__ import annotations

import contextlib
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvdcompress._torch.framework import TorchFramework, to_host
from hvdcompress._torch.optimizers import Optimizers, TorchReader, listed
from hvdcompress.engine import compressor
from hvdcompress.engine.agreement import Terms
from hvdcompress.engine.collectives import Collectives
from hvdcompress.engine.exchange import ExchangeError
from hvdcompress.engine.saving import snapshot
from hvdcompress.engine.step import Agree, Step
from hvdcompress.engine.telemetry import log
from hvdcompress.loopback import warm_up
from hvdcompress.method import TensorSpec
from hvdcompress.ops.vectors import dtype_name
from hvdcompress.optimizers import what_is_done
from hvdcompress.parts import momentum
from hvdcompress.plan import Bucket, Grouping, Plan

#: what can be reduced, and the dtype of a complex number's parts
REAL = {
    **{dtype: dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)},
    **{torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64},
}
FROZEN = ", frozen"  #: what ranks say of such a parameter, after its shape and dtype
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  #: that modules put around others add to the names inside

_living: weakref.WeakSet[TensorCompressor] = weakref.WeakSet()
_hooked: list[Any] = []  # the handle of the hook below, once there is a Compressor


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for living in list(_living):
        living.notice(optimizer)


def named(given: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Return names, without wrappers, and parameters.

    Raises:
        TypeError: something else was given; it says what.
    """
    wanted = "named_parameters must be names and parameters, as model.named_parameters() gives them"
    if isinstance(given, type | torch.nn.Module):
        raise TypeError(f"{wanted}, not the {'class' if isinstance(given, type) else 'model'} itself")
    pairs = list(given.items() if isinstance(given, Mapping) else given)
    if any(isinstance(pair, torch.Tensor) for pair in pairs):
        raise TypeError(f"{wanted}; these have no names, as those of model.parameters()")
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"{wanted}, not {pair!r:.60}")
    return [(plain_name(name), parameter) for name, parameter in pairs]


def plain_name(name: str) -> str:
    """Return a parameter's name without what ``torch.compile`` and activation checkpointing add to it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def spec_of(name: str, parameter: torch.Tensor) -> TensorSpec:
    """Return what the engine sees of a parameter: complex numbers are pairs of real ones.

    Raises:
        ValueError: its dtype cannot be reduced.
    """
    if parameter.dtype not in REAL:
        raise ValueError(f"{name!r}: gradients of {dtype_name(parameter)} cannot be reduced: use float32, for example")
    shape = (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
    return TensorSpec(name, shape, str(REAL[parameter.dtype]).removeprefix("torch."))


class TensorCompressor(compressor.Compressor):
    """A driver's Compressor of the gradients of named parameters.

    Args:
        plan: what each tensor gets.
        rank: this rank.
        world: number of ranks.
        named_parameters: names and parameters. State is kept by name.
        loss_scale: a number, or a function that returns one, by which the loss was multiplied.
        ops: "auto" (the numpy core for CPU gradients, Triton for CUDA where it is installed), or "torch".

    Attributes:
        parameters: the parameters by name.
        buckets: what is exchanged together, by name.

    Raises:
        TypeError: ``named_parameters`` is a model, or parameters without names.
        ValueError: ``ops`` is neither; two parameters have one name; another driver compresses one of them.
    """

    grouping: Grouping  #: which tensors travel together

    def __init__(
        self,
        plan: Plan,
        rank: int,
        world: int,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        loss_scale: float | Callable[[], float] = 1.0,
        ops: str = "auto",
    ):
        if ops not in ("auto", "torch"):
            raise ValueError(f'ops = {ops!r} must be "auto" or "torch"')
        super().__init__(plan, rank, world, loss_scale)
        pairs = named(named_parameters)
        self.parameters = dict(pairs)
        self.model_parameters: dict[str, torch.nn.Parameter] = {}  # with those that are not exchanged, if it is known
        if len(self.parameters) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"two parameters have one name: {sorted({n for n in names if names.count(n) > 1})}")
        self._refuse_two_drivers()
        myself = weakref.ref(self)
        self.framework = TorchFramework(ops == "torch", lambda: _all_parameters(myself()))
        specs = self._group({})
        methods = {method for bucket in self.buckets.values() for _, method in bucket.program.stages}
        self._adapts = any(map(momentum.adapts, methods))
        self._terms = Terms(self.plan.to_dict(), {spec.name: f"{spec.shape} {spec.dtype}" for spec in specs})
        self.local.warn_of_what_is_idle(specs)
        self._reader: TorchReader | None = None
        self._noticed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._frozen: frozenset[str] = frozenset()  # names of parameters that need no gradient any more
        self._warm_up(specs)

    def _warm_up(self, specs: Sequence[TensorSpec]) -> None:
        """Import and compile now what the first step needs, so that no rank waits for it there."""
        if not self.framework.force_torch and all(parameter.is_cpu for parameter in self.parameters.values()):
            with contextlib.suppress(ExchangeError):  # the first step raises it, with the tensor that it is about
                warm_up(self.plan, specs, self.grouping)

    def _group(self, ages: Mapping[str, object]) -> list[TensorSpec]:
        """Group the parameters into buckets; returns what the engine sees of them.

        Args:
            ages: where they are in their programs, of those that are not at the start; see :meth:`RankState.ages`.
        """
        specs = [spec_of(name, parameter) for name, parameter in self.parameters.items()]
        self.buckets = {bucket.spec.name: bucket for bucket in self.plan.buckets(specs, self.grouping, ages)}
        self._place = {m.name: (b, i) for b in self.buckets.values() for i, m in enumerate(b.members)}
        return specs

    def _refuse_two_drivers(self) -> None:
        mine = {id(parameter): name for name, parameter in self.parameters.items()}
        for other in _living:
            twice = [mine[id(p)] for p in other.parameters.values() if id(p) in mine]
            if twice and other.driver != self.driver:
                raise ValueError(
                    f"{twice[0]!r} would be exchanged twice: a Compressor under {other.driver} has it, and now one "
                    f"under {self.driver}; use one of them"
                )
        _living.add(self)
        if not _hooked:
            _hooked.append(register_optimizer_step_pre_hook(_before_step))

    # -- state ----------------------------------------------------------------------------------------------

    def residual(self, name: str) -> torch.Tensor:
        """This rank's residual of a parameter, in its shape (a copy); zeros where none is kept.

        Of a complex parameter, the last dimension has the real and the imaginary part.

        Raises:
            KeyError: there is no such parameter.
        """
        shape = spec_of(name, self.parameters[name]).shape
        flat = self.local.residual(name) if name in self.local.names() else None
        return torch.zeros(shape) if flat is None else torch.as_tensor(flat).clone().reshape(shape)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plan, steps, residuals as tensors in host memory. Ranks differ: save one file per rank.

        Raises:
            RuntimeError: a step is under way.
        """
        if self._is_under_way():
            raise RuntimeError("a step is under way: save after optimizer.step(), not between backward() and it")
        saved = super().state_dict()
        state = {
            name: {s: torch.as_tensor(a).cpu() for s, a in slots.items()} for name, slots in saved["state"].items()
        }
        return {**saved, "state": state}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` saved on this rank; residuals go to their parameters' device.

        Parameters of which nothing was saved, as they were frozen then, begin at zero.

        Raises:
            ValueError: it is of another rank or world, or of other parameters; nothing is changed then.
        """
        snapshot.check(saved)
        ages = snapshot.ages(saved["steps"], saved["restarts"])
        anywhere = next(iter(self.parameters.values()), torch.zeros(0))

        def copy(parts: list[Any]) -> Any:
            joined = torch.cat([torch.as_tensor(part).reshape(-1) for part in parts]).clone().to(anywhere.device)
            return self.framework.flat(joined)

        before = (self.buckets, self._place)
        self._group(ages)
        try:
            self.local.load_state_dict(saved, copy, self._buckets())
        except ValueError:
            self.buckets, self._place = before
            raise
        new = sorted(self.parameters.keys() - saved["steps"].keys())
        if saved["steps"] and new and self.local.rank == 0:
            log.warn_once(f"the saved state has nothing of {log.some(new)}: their residuals begin at zero")

    def _to_host(self, array: Any) -> Any:
        return to_host(array)

    def _buckets(self) -> list[Bucket]:
        return list(self.buckets.values())

    @abstractmethod
    def _is_under_way(self) -> bool:
        """Whether a step has begun and not ended."""

    # -- a step ---------------------------------------------------------------------------------------------

    def _new_step(self, collectives: Collectives, agree: Agree) -> Step:
        self.framework.begin()
        if self._adapts and self._reader is None and self.ledger.steps == 2 and self.local.rank == 0:
            log.warn_once(
                "no optimizer of PyTorch has taken a step with these parameters, so its momentum acts on top of the "
                "residuals, which costs accuracy: call use_optimizer(optimizer) of the Compressor, or say "
                'optimizer_momentum="keep" if there is no momentum'
            )
        step = Step(self.local, collectives, self._terms, agree, self.framework)
        step.unused = set(self._frozen)
        return step

    def _note_frozen(self) -> None:
        """Look which parameters are frozen by now; ranks compare that, as all else that they must have alike."""
        frozen = frozenset(name for name, parameter in self.parameters.items() if not parameter.requires_grad)
        if frozen != self._frozen:
            self._frozen = frozen
            plain = {name: text.removesuffix(FROZEN) for name, text in self._terms.tensors.items()}
            tensors = {name: text + FROZEN * (name in frozen) for name, text in plain.items()}
            self._terms = Terms(self._terms.plan, tensors)

    # -- the optimizer --------------------------------------------------------------------------------------

    def use_optimizer(self, optimizer: Optimizers) -> None:
        """Cancel the momentum of an optimizer, or of several, for parameters whose method keeps a residual.

        An optimizer is also found by itself when it takes its first step. Call this on every rank, before the first
        backward pass, to have its momentum adapted from the first exchange on.

        With ``without_beta1`` in the plan, as under "auto", beta1 of Adam and its relatives becomes 0.

        Raises:
            TypeError: it is no optimizer of PyTorch.
        """
        optimizers = listed(optimizer)
        self._without_beta1(optimizers)
        self._reader = self.local.optimizer = TorchReader(optimizers, self._tensors())
        self._terms = Terms({**self._terms.plan, "optimizer": self._reader.kinds()}, self._terms.tensors)
        self._say_what_is_adapted(self._reader)

    def notice(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to take a step: read its momentum from now on, if it trains our parameters."""
        if not self._adapts or optimizer in self._noticed:
            return
        self._noticed.add(optimizer)
        reader = self._reader or TorchReader([], self._tensors())
        if reader.trains(optimizer) and not reader.has(optimizer):
            reader.add(optimizer)
            self._reader = self.local.optimizer = reader
            self._say_what_is_adapted(reader)

    def _say_what_is_adapted(self, reader: TorchReader) -> None:
        """Log, on rank 0, what happens to the optimizer's momentum."""
        programs = {member.name: bucket.program for bucket in self.buckets.values() for member in bucket.members}
        done = what_is_done((momentum.adapts(program.main), reader(name)) for name, program in programs.items())
        others = reader.others() if self._adapts else []
        if done and self.local.rank == 0:
            log.warn_once(done)
        if others and self.local.rank == 0:
            log.warn_once(
                f"{', '.join(others)}: momentum on top of residuals costs accuracy, and only that of SGD can be "
                "adapted; hvdcompress.without_momentum(optimizer) takes it out of the optimizer, as auto does if it is "
                "given optimizer=optimizer"
            )

    def _tensors(self) -> Mapping[str, Sequence[torch.nn.Parameter]]:
        """The parameters that each tensor consists of."""
        return {name: [parameter] for name, parameter in self.parameters.items()}


def _all_parameters(compressor: TensorCompressor | None) -> Mapping[str, torch.nn.Parameter]:
    if compressor is None:
        return {}
    return compressor.model_parameters or compressor.parameters
