"""Attach a Compressor to a ``DistributedDataParallel`` module: refuse options that do not work, register the hook."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, Unpack, overload

import torch
from torch.nn.parallel import DistributedDataParallel

from hvdcompress._torch.compressor import averaged_by_ddp
from hvdcompress.ddp.compressor import Compressor
from hvdcompress.ddp.local_steps import CountedLocalSteps
from hvdcompress.method import Method
from hvdcompress.plan import Plan
from hvdcompress.settings import DriverSettings, LocalStepsSettings

Hook = Callable[[Compressor, Any], "torch.futures.Future[torch.Tensor]"]

#: (a DDP attribute that is set, the option that sets it, why compression refuses the option)
REFUSED = (
    ("mixed_precision", "mixed_precision=", "DDP implements it as a communication hook; use torch.autocast"),
    ("_delay_all_reduce_params", "delay_all_reduce_named_params=", "DDP reduces those gradients without the hook"),
    ("skip_all_reduce_unused_params", "skip_all_reduce_unused_params=True", "ranks would exchange different tensors"),
    (
        "_use_python_reducer",
        'torch._dynamo.config.optimize_ddp = "python_reducer"',
        "it calls hooks differently",
    ),
)


@overload
def attach(
    model: torch.nn.Module,
    method: str | Method | Plan | Mapping[str, Any] = "auto",
    *,
    local_steps: None = None,
    **settings: Unpack[DriverSettings],
) -> Compressor: ...


@overload
def attach(
    model: torch.nn.Module,
    method: str | Method | Plan | Mapping[str, Any] = "auto",
    *,
    local_steps: int | Literal["auto"],
    **settings: Unpack[LocalStepsSettings],
) -> CountedLocalSteps: ...


def attach(
    model: torch.nn.Module,
    method: str | Method | Plan | Mapping[str, Any] = "auto",
    *,
    local_steps: int | Literal["auto"] | None = None,
    **settings: Any,
) -> Compressor | CountedLocalSteps:
    """Compress the gradients that a ``DistributedDataParallel`` model exchanges, or take local steps.

    Call it on every rank, after the model is wrapped and before the first backward pass.

    Args:
        model: the DDP module, or a module that contains exactly one, such as the wrappers of accelerate, Fabric and
            ``torch.compile``.
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, a plan's dict or YAML file. "auto"
            is top-k of 1 % in 4 bits. It falls back to uncompressed all-reduces if the first steps show that
            compression does not save time. With ``local_steps``, "auto" is QSGD.
        local_steps: exchange parameters every so many steps, instead of gradients in every step; "auto" measures how
            many. A step is a backward pass outside of ``no_sync()``. The exchange takes place at the beginning of the
            next forward pass.
        settings: ``loss_scale``, ``backend``, hyper-parameters and plan keys; see
            :class:`~hvdcompress.ddp.compressor.Compressor`. With ``local_steps``: ``outer``, ``fragments``, ``delay``,
            ``mixing``, ``warmup``, ``checkpoint``, hyper-parameters and plan keys; see
            :class:`~hvdcompress.local_steps.LocalSteps`.

    Returns:
        The Compressor, or LocalSteps. They use the parameter names of the wrapped module, without ``module.``.

    Raises:
        ValueError: the model contains no DDP module or several; the DDP module already has a communication hook, or
            uses an option that compression does not support; the plan is wrong.
    """
    module = _find_ddp_module(model)
    _check_supported(module)
    if local_steps is None:
        compressor = _make_compressor(module.module, method, process_group=module.process_group, **settings)
        _register(module, compressor)
        if module.find_unused_parameters or module.static_graph:
            compressor.used = set()
            for name, parameter in compressor.parameters.items():
                parameter.register_post_accumulate_grad_hook(_record_use(weakref.ref(compressor), name))
        return compressor
    local = CountedLocalSteps(module, every=local_steps, method=method, **settings)
    _register(module, local)
    module.module.register_state_dict_pre_hook(_ModuleHook(local, CountedLocalSteps._before_state_dict))
    return local


def _register(module: DistributedDataParallel, owner: Compressor | CountedLocalSteps) -> None:
    """Register the communication hook of a DDP module, and its forward pre-hook."""
    try:
        module.register_comm_hook(owner, _receive)
    except RuntimeError as error:  # a built-in hook lives in C++, and no Python attribute shows it
        raise ValueError(f"the model has a built-in communication hook; DDP takes one hook, once: {error}") from None
    module._comm_hooks = _NotCopied(module._comm_hooks)
    module.register_forward_pre_hook(_ModuleHook(owner, _before_forward))


def hook(
    model: torch.nn.Module,
    method: str | Method | Plan | Mapping[str, Any] = "auto",
    *,
    process_group: Any = None,
    **settings: Unpack[DriverSettings],
) -> tuple[Compressor, Hook]:
    """Return the two arguments of ``register_comm_hook``, for frameworks that register the hook themselves.

    DDP's options cannot be checked here. The model must use all of its parameters in every step: the residual of an
    unused parameter would be lost.

    Args:
        model: the module that DDP will wrap.
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, a plan's dict or YAML file.
        process_group: the group that DDP uses, if it is not all ranks.
        settings: as for :func:`attach`.

    Returns:
        The hook's state, which is the Compressor, and the hook.

    Raises:
        ValueError: the plan is wrong.
    """
    compressor = _make_compressor(model, method, process_group=process_group, **settings)
    model.register_forward_pre_hook(_ModuleHook(compressor, _check_trained_parameters))
    return compressor, _receive


def _make_compressor(model: torch.nn.Module, method: Any, **settings: Any) -> Compressor:
    """Make a Compressor for the parameters of a module that require a gradient."""
    parameters = averaged_by_ddp(model, model.named_parameters())
    trained = [(name, parameter) for name, parameter in parameters.items() if parameter.requires_grad]
    compressor = Compressor(method, trained, **settings)
    compressor._framework.parameters = parameters
    return compressor


def _check_trained_parameters(owner: Compressor | CountedLocalSteps, model: torch.nn.Module) -> None:
    """Raise RuntimeError if a parameter requires a gradient that DDP does not reduce.

    DDP collects the parameters when it is constructed. It silently ignores a parameter that is unfrozen or replaced
    later, so the ranks' weights would drift apart.
    """
    if not torch.is_grad_enabled():
        return
    for name, parameter in averaged_by_ddp(model, model.named_parameters()).items():
        if parameter.requires_grad and id(parameter) not in owner._names:
            raise RuntimeError(
                f"DistributedDataParallel will not reduce the gradient of {name!r}: the parameter was "
                "frozen, or was another one, when DDP was constructed. Wrap the model again, and attach again"
            )


# No annotations: register_comm_hook() compares them with the real types, and rejects the strings that the
# __future__ import makes of them
def _receive(state, bucket):  # type: ignore[no-untyped-def]
    return state._receive(bucket)


def _find_ddp_module(model: torch.nn.Module) -> DistributedDataParallel:
    found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(found) or 'no'} DistributedDataParallel module{'s' * (len(found) != 1)}"
            + ("; attach to each of them" if found else "; wrap it first, and attach to the wrapped model")
        )
    return found[0]


def _check_supported(module: DistributedDataParallel) -> None:
    """Raise ValueError if the module has an option or a hook that compression cannot work with."""
    for attribute, option, reason in REFUSED:
        if getattr(module, attribute, None):
            raise ValueError(f"{option} does not work with compression: {reason}")
    _refuse_in_backward_optimizer(module)
    if any(hook is _receive for hook, _ in module._comm_hooks):
        raise ValueError("ddp.attach was called on this model already: to attach again, wrap the module in DDP again")
    if module._comm_hooks:
        name = getattr(module._comm_hooks[0][0], "__qualname__", "unnamed")
        fused = ", of an optimizer fused into the backward pass (_register_fused_optim)" * ("optimizer" in name)
        raise ValueError(f"the model already has a communication hook, {name}{fused}; DDP takes one hook, once")


def _refuse_in_backward_optimizer(module: DistributedDataParallel) -> None:
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in module.parameters()):
        raise ValueError(
            "an optimizer that steps in the backward pass (_apply_optimizer_in_backward) does not work with "
            "compression: DDP uses its own hook for it"
        )


class _ModuleHook:
    """A hook of a module that calls a function with its owner and the module.

    A pickled or deep copy of the model is not compressed, so its hook has no owner, and does nothing.

    Args:
        owner: a Compressor or local steps; they are not kept alive.
        call: the function.
    """

    def __init__(self, owner: Any = None, call: Callable[[Any, Any], None] | None = None):
        self._owner = weakref.ref(owner) if owner else None
        self._call = call

    def __call__(self, module: torch.nn.Module, *args: Any) -> None:
        if self._call and self._owner and (owner := self._owner()):
            self._call(owner, module)

    def __reduce__(self) -> Any:
        return type(self), ()


def _before_forward(owner: Compressor | CountedLocalSteps, module: Any) -> None:
    """Forward pre-hook of the DDP module: check what can change after :func:`attach`."""
    owner._before_forward(module)
    _check_trained_parameters(owner, module.module)
    if not module._lazy_init_ran:  # DDP installs its hook for in-backward optimizers in the first forward pass
        _refuse_in_backward_optimizer(module)
    if module.static_graph and not module.require_backward_grad_sync and torch.is_grad_enabled():
        raise RuntimeError(
            "static_graph=True does not work with no_sync(): DDP stops exchanging gradients (PyTorch issue 187732)"
        )
    if module._join_config.enable:
        raise RuntimeError(
            "join() does not work with compression: ranks without data cannot know which collectives to join"
        )


class _NotCopied(list[Any]):
    """DDP's list of hooks. A copy of the model gets a plain empty list, because its reducer has no hook."""

    def __reduce__(self) -> Any:
        return list, ()


def _record_use(reference: weakref.ref[Compressor], name: str) -> Callable[[torch.Tensor], None]:
    """Return a gradient hook that records that the backward pass used a parameter."""

    def record(parameter: torch.Tensor) -> None:
        compressor = reference()
        if compressor is not None and compressor.used is not None:
            compressor.used.add(name)

    return record
