"""Adapt the momentum of PyTorch optimizers to gradients that have waited in residuals (``engine/late.py``).

Hooks run before and after the step of every optimizer of the process. The first one changes the optimizer's first
moment, and the second one takes back what must not stay in it. Parameter groups and gradients are only read, in each
step anew, so schedules, loaded states, added groups and new optimizers need no attention.

A step may begin more than once: ``hvd.DistributedOptimizer`` calls the step of its base class after it has averaged the
gradients, and a closure computes the gradients inside of the step. A step that failed has no second hook. So the first
hook begins by taking back what an earlier call has changed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import hvdcompress.ops
from hvdcompress.engine.late import Late, add_at
from hvdcompress.engine.telemetry import log
from hvdcompress.parts.momentum import Moment, average, corrected_average, heavy_ball

Group = Mapping[str, Any]


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the PyTorch optimizer inside a wrapper of accelerate, Lightning or ZeroRedundancyOptimizer.

    Raises:
        TypeError: the argument is not a PyTorch optimizer and does not contain one.
    """
    while inner := _wrapped(optimizer):
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a PyTorch optimizer, not {optimizer!r:.60}")
    return optimizer


def _wrapped(optimizer: Any) -> torch.optim.Optimizer | None:
    inner = (getattr(optimizer, name, None) for name in ("optimizer", "_optimizer", "optim"))
    return next((each for each in inner if isinstance(each, torch.optim.Optimizer)), None)


def trains(optimizer: torch.optim.Optimizer, parameters: AbstractSet[int]) -> bool:
    """Return whether an optimizer has at least one of the parameters, which are given by their ``id()``."""
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])


# -- the moments of known optimizers ------------------------------------------------------------------------------


def _sgd(group: Group, state: Mapping[str, Any]) -> Moment:
    return heavy_ball(group["momentum"], 1.0 - group["dampening"], group["nesterov"])


def _muon(group: Group, state: Mapping[str, Any]) -> Moment:
    return average(group["momentum"], group["nesterov"])


def _adam(group: Group, state: Mapping[str, Any]) -> Moment:
    beta1 = float(group["betas"][0])
    step = state.get("step", 0)  # a tensor on the device, if the optimizer is fused or capturable
    step = float(step) if getattr(step, "is_cpu", True) else step
    return corrected_average(beta1, 1.0 - beta1 ** (step + 1))


class _Known(NamedTuple):
    """How an optimizer class keeps its first moment.

    Attributes:
        moment: returns how it uses the moment, from its parameter group and the state of the parameter.
        key: the name of the moment in the state of a parameter.
    """

    moment: Callable[[Group, Mapping[str, Any]], Moment]
    key: str


_ADAM = (torch.optim.Adam, torch.optim.AdamW, torch.optim.RAdam, torch.optim.Adamax)
KNOWN: dict[type | None, _Known] = {
    torch.optim.SGD: _Known(_sgd, "momentum_buffer"),
    getattr(torch.optim, "Muon", None): _Known(_muon, "momentum_buffer"),  # since PyTorch 2.9
    **dict.fromkeys(_ADAM, _Known(_adam, "exp_avg")),
}


def _known(optimizer: torch.optim.Optimizer) -> _Known | None:
    """Return how an optimizer keeps its first moment; None if its class has a ``step`` of its own that is not known."""
    own = (cls for cls in type(optimizer).__mro__ if "step" in vars(cls) and not cls.__module__.startswith("horovod."))
    return KNOWN.get(next(own, object))


def needs_ages(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the momentum of an optimizer depends on how long the elements of a gradient have waited."""
    known = _known(optimizer)
    return known is not None and known.key == "momentum_buffer" and any(map(_momentum, optimizer.param_groups))


def describe_adaptation(optimizer: torch.optim.Optimizer) -> str:
    """Return what is done about the momentum of an optimizer, as a sentence; empty if it has none."""
    group = max(optimizer.param_groups, key=_momentum)
    if not _momentum(group) or _wrapped(optimizer):
        return ""
    name = f"{type(optimizer).__name__} with {'beta1' if 'betas' in group else 'momentum'} = {_momentum(group):g}"
    if _known(optimizer):
        return f"{name}: adapted to the delay of gradients in residuals; optimizer_momentum: keep turns this off"
    return (
        f"{name}: momentum on top of residuals costs accuracy, and that of this optimizer is not adapted; use "
        "SGD, Adam, AdamW or Muon of PyTorch, or less momentum. optimizer_momentum: keep hides this warning"
    )


def _momentum(group: Group) -> float:
    """Return the momentum or beta1 of a parameter group; 0 if it has none."""
    betas = group.get("betas") or (group.get("momentum") or 0.0,)
    return float(betas[0])


# -- a step -------------------------------------------------------------------------------------------------------


class Waiting(NamedTuple):
    """Elements of one parameter's gradient that have waited in residuals.

    Attributes:
        late: what the exchange has sent.
        number: index of the tensor in the bucket.
        start: the first element of the parameter in the tensor.
        stop: the end of its elements.
    """

    late: Late
    number: int
    start: int
    stop: int


class _Change(NamedTuple):
    """The change of the first moments of some parameters in a step that has begun.

    Attributes:
        parameters: the parameters: several of a bucket, if their gradients and moments are ordinary arrays on the host.
        late: what the exchange has sent.
        spans: where the parameters are in the vector that ``index`` refers to; empty for a single parameter.
        index: the elements that change; None for all.
        values: c·g of these elements; without an index the gradient of each parameter, if there are spans.
        before: the multiple of ``values`` that was added before the step.
        after: the multiple to subtract after it.
    """

    parameters: list[torch.nn.Parameter]
    late: Late
    spans: list[tuple[int, int]]
    index: Any
    values: Any
    before: Any
    after: Any


class _Step(NamedTuple):
    """A step that has begun.

    Attributes:
        key: the name of the first moment in the state of a parameter.
        changes: the changes of first moments.
        made: parameters whose first moment was made for this step.
    """

    key: str
    changes: list[_Change]
    made: list[torch.nn.Parameter]


def waiting_of(
    late: Iterable[Late], parts: Callable[[str], Iterable[tuple[torch.nn.Parameter, int, int]]], own: Container[int]
) -> dict[int, Waiting]:
    """Return what has waited of some parameters, by ``id()``.

    Args:
        late: what exchanges have sent.
        parts: returns the parameters that make up a tensor, each with its span in the tensor, by the tensor's name.
        own: ids of the parameters.
    """
    return {
        id(parameter): Waiting(each, number, start, stop)
        for each in list(late)
        for number, member in enumerate(each.bucket.members)
        for parameter, start, stop in parts(member.name)
        if id(parameter) in own and id(parameter) not in each.used
    }


_begun: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Step] = weakref.WeakKeyDictionary()
Find = Callable[[torch.optim.Optimizer], Mapping[int, Waiting]]
_finders: list[Find] = []
_handles: list[Any] = []  # of the hooks


def install(find: Find) -> None:
    """Adapt optimizers to what a function finds. The hooks are registered once in a process.

    Args:
        find: returns what has waited of each parameter of an optimizer that is about to take a step, by ``id()``.
    """
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before))
        _handles.append(register_optimizer_step_post_hook(_end))
    if find not in _finders:
        _finders.append(find)


@contextlib.contextmanager
def adapted(optimizer: torch.optim.Optimizer, waiting: Mapping[int, Waiting]) -> Iterator[None]:
    """Context manager around a step of an optimizer whose gradients no driver has exchanged."""

    def find(other: torch.optim.Optimizer) -> Mapping[int, Waiting]:
        return waiting if other is optimizer else {}

    install(find)
    try:
        yield
    finally:
        _finders.remove(find)


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    """Optimizer pre-step hook. With a closure, gradients are exchanged inside of the step."""
    undo(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _begin(optimizer)
        return None

    def adapted_closure() -> Any:
        found = closure()
        undo(optimizer)
        _begin(optimizer)
        return found

    return (args[0], adapted_closure, *args[2:]), {key: each for key, each in kwargs.items() if key != "closure"}


# torch.compile must not trace the hooks of a compiled step: their kernels read memory by its address.
# torch.compiler.disable() would import the compiler, which takes seconds, when this module is imported
@_disable_dynamo
@torch.no_grad()
def undo(optimizer: torch.optim.Optimizer | None = None) -> None:
    """Take back the changes for a step that has not ended, of one optimizer or of all."""
    for each in [optimizer] if optimizer else list(_begun):
        step = _begun.pop(each, _Step("", [], []))
        for change in step.changes:
            _apply(change, -change.before, each, step.key)
        for parameter in step.made:
            del each.state[parameter][step.key]


@_disable_dynamo
@torch.no_grad()
def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Change the first moments of an optimizer before its step."""
    waiting = {key: each for find in _finders for key, each in find(optimizer).items()}
    known = _known(optimizer)
    if known is None or not waiting:
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        log.warn_once("momentum is not adapted in a captured CUDA graph, which costs accuracy")
        return
    step = _begun[optimizer] = _Step(known.key, [], [])
    for group in optimizer.param_groups:
        parameters = [each for each in group["params"] if each.grad is not None and id(each) in waiting]
        if not parameters or not _momentum(group):
            continue
        made = _make_buffers(optimizer, group) if known.key == "momentum_buffer" else []
        step.made.extend(made)
        # Parameters of one bucket change together: a call for each of hundreds would cost more than the change itself
        together: dict[Any, list[torch.nn.Parameter]] = {}
        is_rewritten = _is_rewritten(optimizer, group)
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            late, buffer = waiting[id(parameter)].late, state.get(known.key)
            is_first = (buffer is None, any(each is parameter for each in made))
            is_alone = not (_is_ordinary(parameter.grad) and (buffer is None or _is_ordinary(buffer)))
            # with backend="torch", the indices are tensors
            is_alone |= is_rewritten if late.indices is None else not isinstance(late.indices[0], np.ndarray)
            key = (known.moment(group, state), late, is_first, id(parameter) if is_alone else 0)
            together.setdefault(key, []).append(parameter)
        for (moment, late, (is_new, is_made), is_alone), each in together.items():
            spans = [] if is_alone else [_span(waiting[id(parameter)]) for parameter in each]
            if is_alone:
                index, values, share = _late_values(optimizer, group, moment, each[0], waiting[id(each[0])])
            else:
                index, values, share = _late_parts(optimizer, group, moment, each, late, spans)
            before, after = moment.changes(late.method)
            before -= _entry(group) if is_made else 0.0
            # Adam makes its average in its first step, from zeros
            after = share * (moment.rate if is_new else after)
            change = _Change(each, late, spans, index, values, share * before, after)
            _apply(change, change.before, optimizer, known.key)
            step.changes.append(change)


@_disable_dynamo
@torch.no_grad()
def _end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Change the first moments after the step."""
    step = _begun.pop(optimizer, _Step("", [], []))
    for change in step.changes:
        _apply(change, -change.after, optimizer, step.key)
        change.late.used.update(map(id, change.parameters))


def _is_ordinary(tensor: Any) -> bool:
    """Return whether the array ops of the host can read and write a tensor as a flat array."""
    return type(tensor) is torch.Tensor and tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()


def _is_rewritten(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """Return whether a step uses other gradients than those in ``.grad``, or overwrites them."""
    is_scaled = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
    return is_scaled or any(group.get(name) for name in ("nesterov", "foreach", "maximize"))


def _span(waiting: Waiting) -> tuple[int, int]:
    """Return where a parameter is in the vector of its bucket."""
    first = waiting.late.bucket.spans[waiting.number][0]
    return first + waiting.start, first + waiting.stop


def _late_parts(
    optimizer: torch.optim.Optimizer,
    group: Group,
    moment: Moment,
    parameters: list[torch.nn.Parameter],
    late: Late,
    spans: list[tuple[int, int]],
) -> tuple[Any, Any, float]:
    """As :func:`_late_values`, for several parameters of a bucket at these spans."""
    index, ages = late.joint
    table, share = late.shares(moment)
    gradients = [_vector(parameter.grad) for parameter in parameters]
    if index is None:
        return None, gradients, share
    values = hvdcompress.ops.fast.take_parts(gradients, spans, index, table, None if table is None else ages)
    return index, _as_used(optimizer, group, values), share


def _vector(tensor: Any) -> np.ndarray[Any, Any]:
    """Return an ordinary tensor as a flat array that shares its memory."""
    return tensor.detach().numpy().reshape(-1)


def _late_values(
    optimizer: torch.optim.Optimizer, group: Group, moment: Moment, parameter: torch.nn.Parameter, waiting: Waiting
) -> tuple[Any, Any, float]:
    """Return the elements of a gradient that were sent, and their c·g as an array and a factor of it."""
    index, ages = waiting.late.part(waiting.number, waiting.start, waiting.stop)
    with _flat(parameter.grad, index) as gradient:
        if index is not None and not isinstance(gradient, np.ndarray):
            index, ages = (
                each if each is None else torch.as_tensor(each, device=gradient.device) for each in (index, ages)
            )
        values, share = waiting.late.values(gradient, index, ages, moment)
        # Foreach steps with Nesterov's momentum and fused steps that unscale overwrite .grad
        if index is None and (parameter.is_cuda or _is_rewritten(optimizer, group)):
            values = values.copy() if isinstance(values, np.ndarray) else values.clone()
    return index, _as_used(optimizer, group, values), share


def _as_used(optimizer: torch.optim.Optimizer, group: Group, values: Any) -> Any:
    """Return elements of ``.grad`` as the optimizer uses them in this step."""
    if group.get("maximize"):
        values = -values
    scale = getattr(optimizer, "grad_scale", None)  # a GradScaler leaves the division to fused optimizers
    found_inf = getattr(optimizer, "found_inf", None)
    if isinstance(values, np.ndarray):
        values = values if scale is None else values / np.float32(float(scale))
        return values if found_inf is None or not float(found_inf) else np.zeros_like(values)
    values = values if scale is None else values / scale.to(values.device)
    # No synchronization with the device: the fused step reads the flag there, too
    return values if found_inf is None else torch.where(found_inf.to(values.device) > 0, 0.0, values)


def _entry(group: Group) -> float:
    """Return what a new buffer contains of the gradient, as SGD's first step takes the gradient without dampening."""
    return group.get("dampening", 0.0) / group["momentum"]


def _make_buffers(optimizer: torch.optim.Optimizer, group: Group) -> list[torch.nn.Parameter]:
    """Make the momentum buffers that the first step would make. Return the parameters of the group that had none."""
    made = []
    for parameter in group["params"]:
        has_buffer = optimizer.state.get(parameter, {}).get("momentum_buffer") is not None
        if has_buffer or parameter.grad is None or parameter.grad.is_sparse:
            continue
        buffer = torch.zeros_like(parameter.grad, memory_format=torch.preserve_format)
        if entry := _entry(group):
            gradient = _as_used(optimizer, group, parameter.grad)
            buffer.add_(gradient.add(parameter, alpha=group["weight_decay"]), alpha=entry)
        optimizer.state[parameter]["momentum_buffer"] = buffer
        made.append(parameter)
    return made


def _apply(change: _Change, factor: Any, optimizer: torch.optim.Optimizer, key: str) -> None:
    """Add a multiple of the values of a change to the first moments of its parameters, if they exist."""
    buffers = [optimizer.state.get(parameter, {}).get(key) for parameter in change.parameters]
    if buffers[0] is None:
        return
    if change.spans:
        vectors = [_vector(buffer) for buffer in buffers]
        hvdcompress.ops.fast.add_parts(vectors, change.spans, change.index, change.values, factor)
        return
    with _flat(buffers[0], change.values) as buffer:
        add_at(buffer, change.index, change.values, factor)


@contextlib.contextmanager
def _flat(tensor: Any, like: Any) -> Iterator[Any]:
    """Give a tensor as a flat array in the order of its elements. Changes are written to the tensor.

    Args:
        tensor: a parameter's gradient, or its first moment; of any layout, complex, or a DTensor.
        like: an array of the library to use.
    """
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = tensor.contiguous().view(-1)
    in_numpy = tensor.is_cpu and tensor.dtype != torch.bfloat16 and (like is None or isinstance(like, np.ndarray))
    yield flat.numpy() if in_numpy else flat
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))
