"""The door: find the DistributedDataParallel module, refuse what cannot work, and register the hook."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hvdcompress._torch.compressor import plain_name
from hvdcompress.ddp.compressor import Compressor
from hvdcompress.method import Method
from hvdcompress.plan import Plan

Hook = Callable[[Compressor, Any], "torch.futures.Future[torch.Tensor]"]

#: an attribute of DDP's, what it comes from, and why there is no hook with it
REFUSED = (
    ("mixed_precision", "mixed_precision=", "it is a communication hook of its own; use torch.autocast"),
    ("_delay_all_reduce_params", "delay_all_reduce_named_params=", "those gradients go past the hook"),
    ("skip_all_reduce_unused_params", "skip_all_reduce_unused_params=True", "ranks would exchange different tensors"),
    ("_use_python_reducer", 'torch._dynamo.config.optimize_ddp = "python_reducer"', "it calls hooks in another way"),
)


def attach(
    model: torch.nn.Module, method: str | Method | Plan | Mapping[str, Any] = "auto", **settings: Any
) -> Compressor:
    """Compress what a ``DistributedDataParallel`` model exchanges.

    Call it on every rank, before the first backward pass.

    Args:
        model: the DDP module, or one that holds it, as accelerate's, Fabric's and torch.compile's do.
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, or a plan's dict. "auto" is
            top-k of 1 % in 4 bits, which is given up if the first steps show that it does not save time.
        settings: ``optimizer``, ``loss_scale``, ``ops``, hyper-parameters and plan keys; see
            :class:`~hvdcompress.ddp.compressor.Compressor`.

    Returns:
        The Compressor. Parameters go by the names that they have in the wrapped module.

    Raises:
        ValueError: there is no DDP module, or several; it has a hook, or an option with which there is none; the plan
            is wrong.
    """
    module = _find(model)
    _refuse(module)
    compressor = _compressor_of(module.module, method, process_group=module.process_group, **settings)
    try:
        module.register_comm_hook(compressor, _receive)
    except RuntimeError as error:  # of a hook that DDP keeps in C++ there is no other trace
        raise ValueError(f"the model has a built-in communication hook: DDP takes one, and once ({error})") from None
    module._comm_hooks = _NotCopied(module._comm_hooks)
    module.register_forward_pre_hook(_BeforeForward(compressor))
    if module.find_unused_parameters or module.static_graph:
        compressor.used = set()
        for name, parameter in compressor.parameters.items():
            parameter.register_post_accumulate_grad_hook(_note(weakref.ref(compressor), name))
    return compressor


def hook(
    model: torch.nn.Module, method: str | Method | Plan | Mapping[str, Any], **settings: Any
) -> tuple[Compressor, Hook]:
    """The two arguments of ``register_comm_hook``, for frameworks that register a hook themselves.

    Such a model cannot be asked for its options: it must have no unused parameters, whose residuals would be lost.

    Args:
        model: the module that will be wrapped.
        method: a method id with hyper-parameters in ``settings``, a Method, a Plan, or a plan's dict.
        settings: as for :func:`attach`, and ``process_group`` if DDP uses another than all ranks.

    Returns:
        The state, which is the Compressor, and the hook.

    Raises:
        ValueError: the plan is wrong.
    """
    compressor = _compressor_of(model, method, **settings)
    model.register_forward_pre_hook(_BeforeOwnForward(compressor))
    return compressor, _receive


def _compressor_of(model: torch.nn.Module, method: Any, **settings: Any) -> Compressor:
    """Return a Compressor of what a module trains."""
    names = _names(model)
    trained = [(name, parameter) for name, parameter in names.items() if parameter.requires_grad]
    compressor = Compressor(method, trained, **settings)
    compressor.model_parameters = {plain_name(name): parameter for name, parameter in names.items()}
    return compressor


def _names(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by name, without those that DDP is told to ignore."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    return {name: parameter for name, parameter in model.named_parameters() if name not in ignored}


def _refuse_others(model: torch.nn.Module, compressor: Compressor) -> None:
    """Raise if a parameter requires a gradient that nobody will reduce."""
    for name, parameter in _names(model).items() if torch.is_grad_enabled() else ():
        if parameter.requires_grad and not compressor.knows(parameter):
            raise RuntimeError(
                f"{plain_name(name)!r} requires a gradient, which DistributedDataParallel will not reduce: it was "
                "frozen, or was another parameter, when DDP was made. Wrap the model again, and attach again"
            )


# DDP looks at annotations: where they are strings it refuses the hook
def _receive(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return state.receive(bucket)


def _find(model: torch.nn.Module) -> DistributedDataParallel:
    found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} holds {len(found) or 'no'} DistributedDataParallel module{'s' * (len(found) != 1)}"
            + ("; attach to each of them" if found else "; wrap it first, and attach to what comes out")
        )
    return found[0]


def _refuse(module: DistributedDataParallel) -> None:
    for attribute, option, reason in REFUSED:
        if getattr(module, attribute, None):
            raise ValueError(f"{option} does not go with compression: {reason}")
    if problem := _stepped_in_backward(module):
        raise ValueError(problem)
    if module._comm_hooks:
        there = getattr(module._comm_hooks[0][0], "__qualname__", "one")
        fused = ", of an optimizer fused into the backward pass (_register_fused_optim)" * ("optimizer" in there)
        raise ValueError(f"the model has a communication hook, {there}{fused}: DDP takes one, and once")


def _stepped_in_backward(module: DistributedDataParallel) -> str:
    """What is wrong where an optimizer steps inside of the backward pass, or nothing."""
    if not any(hasattr(parameter, "_in_backward_optimizers") for parameter in module.parameters()):
        return ""
    return (
        "an optimizer that steps in the backward pass (_apply_optimizer_in_backward) does not go with compression: "
        "DDP takes its own hook for it"
    )


class _BeforeOwnForward:
    """A forward pre-hook of what DDP wraps. A copy of the model, pickled or deep, is not compressed, and has none."""

    def __init__(self, compressor: Compressor):
        self._compressor = weakref.ref(compressor)

    def __call__(self, model: torch.nn.Module, inputs: Any) -> None:
        if compressor := self._compressor():
            _refuse_others(model, compressor)

    def __reduce__(self) -> Any:
        return _no_hook, ()


class _BeforeForward(_BeforeOwnForward):
    """The same of DDP itself."""

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        assert isinstance(module, DistributedDataParallel)
        if compressor := self._compressor():
            compressor.cut_short()
            _refuse_others(module.module, compressor)
        if not module._lazy_init_ran and (problem := _stepped_in_backward(module)):
            raise ValueError(problem)
        if module.static_graph and not module.require_backward_grad_sync and torch.is_grad_enabled():
            raise RuntimeError(
                "static_graph=True does not go with no_sync(): DDP stops exchanging gradients (PyTorch's issue 187732)"
            )
        if module._join_config.enable:
            raise RuntimeError("join() does not go with compression: there is no telling what ranks without data owe")


class _NotCopied(list[Any]):
    """DDP's list of hooks, with ours in it: a copy of a model has a reducer of its own, without a hook."""

    def __reduce__(self) -> Any:
        return list, ()


def _nothing(module: torch.nn.Module, inputs: Any) -> None:
    pass


def _no_hook() -> Callable[[torch.nn.Module, Any], None]:
    return _nothing


def _note(compressor: weakref.ref[Compressor], name: str) -> Callable[[torch.Tensor], None]:
    def note(parameter: torch.Tensor) -> None:
        there = compressor()
        if there is not None and there.used is not None:
            there.used.add(name)

    return note
