"""Base class of the PyTorch Compressors: named parameters, their buckets, saved state as tensors, the optimizer.

How gradients arrive and how ranks communicate belongs to the drivers: ``ddp/``, ``fsdp.py`` and ``horovod/torch/``.
"""

from __future__ import annotations

import contextlib
import re
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from hvdcompress._torch.framework import TorchFramework, to_host
from hvdcompress._torch.optimizers import Waiting, describe_adaptation, install, needs_ages, undo, waiting_of
from hvdcompress.engine import compressor
from hvdcompress.engine.agreement import SharedConfig
from hvdcompress.engine.compressor import Op
from hvdcompress.engine.exchange import ExchangeError
from hvdcompress.engine.nodes import Location
from hvdcompress.engine.saving import checkpoint, snapshot
from hvdcompress.engine.saving.snapshot import Ages
from hvdcompress.engine.step import Step
from hvdcompress.engine.telemetry import log
from hvdcompress.loopback import warm_up
from hvdcompress.method import TensorSpec
from hvdcompress.ops.vectors import dtype_name
from hvdcompress.plan import Bucket, Grouping, Plan

#: dtype of a gradient that can be reduced -> its own dtype or, for complex numbers, the dtype of their two parts
REAL = {
    **{dtype: dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)},
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")  #: parts of names that PyTorch's wrappers add

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)
_compressors: weakref.WeakSet[TensorCompressor] = weakref.WeakSet()  # of this process


def _find(optimizer: torch.optim.Optimizer) -> dict[int, Waiting]:
    """Return what has waited of each parameter of an optimizer that is about to take a step, by ``id()``."""
    return {key: waiting for each in list(_compressors) for key, waiting in each._waiting(optimizer).items()}


def named(given: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Check ``named_parameters`` and return them as a list, with names as in the plain, unwrapped model.

    Args:
        given: an iterable of (name, parameter), or a mapping from names to parameters.

    Raises:
        TypeError: a model, a class, or parameters without names were given.
    """
    expected = "named_parameters must be (name, parameter) pairs, such as model.named_parameters()"
    if isinstance(given, type | torch.nn.Module):
        raise TypeError(f"{expected}, not the model or its class")
    pairs = list(given.items() if isinstance(given, Mapping) else given)
    if not pairs:
        raise TypeError(f"{expected}; it is missing, or empty")
    if any(isinstance(pair, torch.Tensor) for pair in pairs):
        raise TypeError(f"{expected}; these parameters have no names, like those of model.parameters()")
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"{expected}, not {pair!r:.60}")
    return [(plain_name(name), parameter) for name, parameter in pairs]


def plain_name(name: str) -> str:
    """Return a parameter's name without the components that ``torch.compile`` and activation checkpointing add."""
    return WRAPPERS.sub("", name)


def averaged_by_ddp(model: torch.nn.Module, named_tensors: Iterable[tuple[str, _Tensor]]) -> dict[str, _Tensor]:
    """Return parameters or buffers of a model by plain name, without those that DDP is told to ignore."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    return {plain_name(name): tensor for name, tensor in named_tensors if name not in ignored}


def spec_of(name: str, parameter: torch.Tensor) -> TensorSpec:
    """Return the engine's description of a parameter. A complex one is described as real numbers [*shape, 2].

    Raises:
        ValueError: gradients of this dtype cannot be reduced.
    """
    if parameter.dtype not in REAL:
        raise ValueError(f"{name!r}: gradients of {dtype_name(parameter)} cannot be reduced; use float32, for example")
    shape = (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
    return TensorSpec(name, shape, str(REAL[parameter.dtype]).removeprefix("torch."))


class TensorCompressor(compressor.Compressor):
    """Base class of a driver's Compressor for the gradients of named PyTorch parameters.

    Args:
        plan: the plan: which method each tensor gets, and with which hyper-parameters.
        rank: this rank.
        world_size: number of ranks.
        named_parameters: names and parameters. State is kept by name.
        loss_scale: the factor by which the loss is multiplied: a number, or a function that returns it.
        backend: "auto" (the numpy core for CPU gradients, Triton for CUDA where it is installed), or "torch".
        location: where the launcher has put this rank; None if it does not tell, or if not all of its ranks take part.

    Attributes:
        parameters: the parameters by name.
        buckets: the buckets by name; the tensors of a bucket are exchanged in one go.
        framework: the engine's access to PyTorch tensors.

    Raises:
        TypeError: ``named_parameters`` is a model, or parameters without names.
        ValueError: ``backend`` has another value; two parameters have the same name; another driver already compresses
            one of the parameters.
    """

    _framework: TorchFramework
    _grouping: Grouping  #: how the driver groups small tensors into buckets

    def __init__(
        self,
        plan: Plan,
        rank: int,
        world_size: int,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        loss_scale: float | Callable[[], float] = 1.0,
        backend: str = "auto",
        location: Location | None = None,
    ):
        if backend not in ("auto", "torch"):
            raise ValueError(f'backend = {backend!r} must be "auto" or "torch"')
        super().__init__(plan, rank, world_size, loss_scale, location)
        pairs = named(named_parameters)
        self.parameters = dict(pairs)
        if len(self.parameters) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"two parameters have the same name: {sorted({n for n in names if names.count(n) > 1})}")
        self._refuse_two_drivers()
        self._framework = TorchFramework(backend == "torch", self.parameters)
        self.rank_state.copy = self._framework.concatenated
        specs = self._group({})
        self._config = SharedConfig(self.plan.to_dict(), {spec.name: f"{spec.shape} {spec.dtype}" for spec in specs})
        self.rank_state.warn_about_unused(specs)
        self._noticed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._frozen: frozenset[str] = frozenset()  # names of the parameters that do not require a gradient any more
        self._warm_up(specs)

    def _warm_up(self, specs: Sequence[TensorSpec]) -> None:
        """Import and compile the array ops of the first step, which would otherwise keep the other ranks waiting."""
        if not self._framework.force_torch and all(parameter.is_cpu for parameter in self.parameters.values()):
            with contextlib.suppress(ImportError):  # without Numba there is nothing to compile
                from hvdcompress.ops.numba.sharing import nothing_is_compiled

                if self.rank_state.rank == 0 and nothing_is_compiled():
                    log.info_once("the first run compiles kernels, which takes a few seconds; later runs load them")
            with contextlib.suppress(ExchangeError):  # the first step raises it again, with the name of the tensor
                warm_up(self.plan, specs, self._grouping)

    def _group(self, ages: Ages) -> list[TensorSpec]:
        """Group the parameters into buckets; return the engine's description of each parameter.

        Args:
            ages: progress in the plan's schedules, by name, for parameters that are not at their start; see
                :meth:`RankState.ages`.
        """
        specs = [spec_of(name, parameter) for name, parameter in self.parameters.items()]
        self.buckets = {bucket.spec.name: bucket for bucket in self.rank_state.group(specs, self._grouping, ages)}
        self._bucket_and_index = {m.name: (b, i) for b in self.buckets.values() for i, m in enumerate(b.members)}
        return specs

    def _refuse_two_drivers(self) -> None:
        """Raise ValueError if a Compressor of another driver has one of the parameters."""
        own = {id(parameter): name for name, parameter in self.parameters.items()}
        for other in _compressors:
            shared = [own[id(p)] for p in other.parameters.values() if id(p) in own]
            if shared and other.driver != self.driver:
                raise ValueError(
                    f"{shared[0]!r} would be exchanged twice: by a Compressor under {other.driver}, and by this one "
                    f"under {self.driver}; make only one of them"
                )
        _compressors.add(self)
        install(_find)

    # -- state ----------------------------------------------------------------------------------------------

    def residual(self, name: str) -> torch.Tensor:
        """Return a copy of this rank's residual of a parameter; zeros if the method keeps none.

        Args:
            name: the parameter's name.

        Returns:
            A tensor in the parameter's shape; [*shape, 2] for a complex parameter, with real and imaginary parts.

        Raises:
            KeyError: there is no such parameter.
        """
        parameter = self.parameters[name]
        shape = spec_of(name, parameter).shape
        flat = self.rank_state.find(name)[1] if name in self.rank_state.names() else None
        if flat is None:
            return torch.zeros(shape, dtype=torch.float32, device=parameter.device)
        return torch.as_tensor(flat, device=parameter.device).clone().reshape(shape)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state as bytes: ``{"rank-3-of-4": …}``, with the plan, step counts and residuals.

        Ranks differ, so save the state of each: in one file per rank, or all of them with
        ``torch.distributed.checkpoint``.

        Raises:
            RuntimeError: a step is under way.
        """
        return checkpoint.by_rank(self._state())

    def _state(self) -> dict[str, Any]:
        if self._is_under_way():
            raise RuntimeError("a step is under way: save the state after optimizer.step(), or before backward()")
        saved = super()._state()
        state = {
            name: {slot: torch.as_tensor(array, device="cpu") for slot, array in slots.items()}
            for name, slots in saved["state"].items()
        }
        return {**saved, "state": state}

    @torch.inference_mode(False)
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned on this rank. Residuals move to the parameters' device.

        The states of all ranks together, in one dict, are re-sharded if their number was another one.

        Parameters that the saved state does not contain, because they were frozen, start with a residual of zero.

        Raises:
            ValueError: the state belongs to another rank, number of ranks, or model; nothing is changed.
        """
        if "format" not in saved:
            saved = checkpoint.of_rank(saved, self.rank_state.rank, self.rank_state.world_size, self.rank_state.nodes)
        snapshot.check(saved)
        ages = snapshot.ages(saved["steps"], saved["restarts"])
        before = (self.buckets, self._bucket_and_index)

        def group() -> list[Bucket]:
            self._group(ages)
            return self._buckets()

        try:
            self.rank_state.load_state_dict(saved, group)
        except ValueError:
            self.buckets, self._bucket_and_index = before
            raise
        new = sorted(self.parameters.keys() - saved["steps"].keys())
        if saved["steps"] and new and self.rank_state.rank == 0:
            log.warn_once(f"the saved state does not contain {log.first_names(new)}: their residuals start at zero")

    def _to_host(self, array: Any) -> Any:
        return to_host(array)

    def _buckets(self) -> list[Bucket]:
        return list(self.buckets.values())

    def _is_under_way(self) -> bool:
        """Return whether a step is under way: it has gradients, and has not ended."""
        return self._step is not None

    # -- a step ---------------------------------------------------------------------------------------------

    def _open_step(self, config: SharedConfig) -> Step:
        self._framework.begin()
        undo()  # an optimizer's step has failed, or was interrupted
        step = super()._open_step(config)
        step.unused = set(self._frozen)
        return step

    def _note_frozen(self) -> None:
        """Update which parameters are frozen. Ranks compare them in the next step, because they must be the same."""
        frozen = frozenset(name for name, parameter in self.parameters.items() if not parameter.requires_grad)
        if frozen != self._frozen:
            self._frozen = frozen
            self._require_equal(frozen=sorted(frozen))

    def _allreduce(
        self, tensors: Mapping[str, torch.Tensor], op: Op, out: Mapping[str, torch.Tensor] | None
    ) -> dict[str, torch.Tensor]:
        outs: dict[str, torch.Tensor] = {}

        def add(step: Step) -> None:  # may raise an error, which the other ranks are then told about
            outs.update(_outs_of(tensors, out))
            self._add_named(step, outs)

        self._reduce_with(add, op)
        for late in self.rank_state.late.values():
            for member in late.bucket.members:
                gradient = self.parameters[member.name].grad
                if gradient is None or gradient.data_ptr() != tensors[member.name].data_ptr():
                    self.is_adapted = True  # no optimizer uses this tensor as a gradient
                    late.used.add(id(self.parameters[member.name]))
        return outs

    def _reduce_in_place(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Average named tensors, whose results no optimizer uses as gradients."""
        self._reduce_with(lambda step: self._add_named(step, tensors), "average")

    @torch.inference_mode(False)
    def _reduce_with(self, add: Callable[[Step], None], op: Op) -> None:
        self._refuse_in_step("call allreduce() between steps")
        began = time.perf_counter()
        factor = 1.0 / self.rank_state.world_size if op == "average" else 1.0
        with torch.no_grad():
            self._run_step(add, factor)
        self.rank_state.note_step(began, time.perf_counter())

    def _run_step(self, add: Callable[[Step], None], factor: float) -> None:
        """Run one step of the engine, outside of a backward pass.

        Args:
            add: function that adds all gradients to the step.
            factor: factor of sums over ranks.
        """
        raise NotImplementedError(f"allreduce() is not available under {self.driver}")

    def _add_named(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add all tensors of :meth:`allreduce`, bucket by bucket."""
        if tensors.keys() != self.parameters.keys():
            missing = log.first_names(sorted(self.parameters.keys() - tensors.keys())) or "none"
            unknown = log.first_names(sorted(tensors.keys() - self.parameters.keys())) or "none"
            raise ValueError(
                "allreduce() needs one tensor for each parameter of the Compressor, all in one call; missing: "
                f"{missing}; unknown: {unknown}"
            )
        for bucket in self.buckets.values():
            members = [tensors[member.name] for member in bucket.members]
            members = [torch.view_as_real(each) if each.is_complex() else each for each in members]
            vectors = [self._framework.vector(step, bucket, tensor) for tensor in members]
            with step.batch():
                step.add(bucket, range(len(vectors)), vectors)

    # -- the optimizer --------------------------------------------------------------------------------------

    def _require_equal(self, **settings: Any) -> None:
        """Name further settings that must be equal on all ranks. The next exchange compares them."""
        self._config = SharedConfig({**self._config.plan, **settings}, self._config.tensors)

    def _waiting(self, optimizer: torch.optim.Optimizer) -> dict[int, Waiting]:
        """Return what has waited of each parameter of an optimizer, by ``id()``.

        A hook calls this method before every step of every optimizer in the process.
        """
        if not self.rank_state.late:
            return {}
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = waiting_of(self.rank_state.late.values(), self._parts, own)
        if found:
            self.is_adapted = True
            self.rank_state.tracks_ages = needs_ages(optimizer) or bool(self.rank_state.tracks_ages)
            if optimizer not in self._noticed:
                self._noticed.add(optimizer)
                if self.rank_state.rank == 0 and (text := describe_adaptation(optimizer)):
                    log.warn_once(text)
        return found

    def _parts(self, name: str) -> Iterable[tuple[torch.nn.Parameter, int, int]]:
        """Return the parameters that make up an exchanged tensor, each with its span in the tensor."""
        parameter = self.parameters[name]
        return [(parameter, 0, parameter.numel() * (2 if parameter.is_complex() else 1))]

    def _flat(self, array: Any) -> Any:
        return self._framework.flat(array)


def _outs_of(tensors: Mapping[str, torch.Tensor], out: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Return the tensors that are reduced in place: those of ``out``, with the values of ``tensors``, or copies."""
    if out is None:
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        found = out.get(name)
        if found is None or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(f"out[{name!r}] must be a tensor of shape {tuple(tensor.shape)} and of {tensor.dtype}")
        if found is not tensor:
            found.copy_(tensor)
    return {name: out[name] for name in tensors}
