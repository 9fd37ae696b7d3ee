"""Momentum of optimizers: how the library reads it, and training without it.

Error feedback has the effect of momentum, so the momentum of the optimizer is adapted for tensors whose method keeps a
residual (``parts/momentum.py``). Drivers read the momentum at every step:

* ``hvd.DistributedOptimizer`` and Keras optimizers are found automatically;
* ``ddp.attach(model, method, optimizer=optimizer)`` receives the optimizer;
* programs without an optimizer object, for example under MPI, describe it with :class:`SGD`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdcompress.parts.momentum import Momentum, adapts
from hvdcompress.plan import Plan

UNKNOWN_OPTIMIZER = (
    "the optimizer is unknown, so its momentum adds to the effect of the residuals, which costs accuracy; pass "
    "optimizer=hvdcompress.optimizers.SGD(momentum=...) with the optimizer's settings to the Compressor, or set "
    'optimizer_momentum="keep" if the optimizer has no momentum'
)

Reader = Callable[[str], "Momentum | None"]  #: returns the momentum of a tensor by its name


@dataclass
class SGD:
    """Description of SGD with momentum, for programs that have no optimizer object.

    The momentum buffer is v = momentum·v + (1 − dampening)·gradient. With ``learning_rate`` it is, as in Keras,
    v = momentum·v − learning_rate·gradient. If a training schedule changes these numbers, set the attributes.

    Args:
        momentum: the momentum factor, at least 0 and less than 1.
        nesterov: whether it is Nesterov's momentum.
        dampening: as in ``torch.optim.SGD``.
        learning_rate: the learning rate, if the buffer includes it; otherwise None.

    Raises:
        ValueError: the momentum is not in [0, 1).
    """

    momentum: float
    nesterov: bool = False
    dampening: float = 0.0
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum = {self.momentum!r} must be at least 0 and less than 1")

    def read(self, name: str = "") -> Momentum:
        """Return the momentum that the optimizer applies to a tensor in the next step."""
        rate = 1.0 - self.dampening if self.learning_rate is None else self.learning_rate
        return Momentum(self.momentum, rate, rate, self.nesterov)


def momentum_reader(optimizer: Any, rates: Mapping[str, float] | None = None) -> Reader:
    """Return a function that reads the momentum of an :class:`SGD` or of a Keras optimizer.

    Args:
        optimizer: the optimizer.
        rates: {tensor name: learning rate} of the present step of a Keras optimizer. Without it, the optimizer's
            current learning rate is used.

    Raises:
        TypeError: the optimizer is neither.
    """
    if optimizer is None:
        return lambda name: None
    if isinstance(optimizer, SGD):
        return optimizer.read
    if keras_momentum(optimizer) is None and not hasattr(optimizer, "learning_rate"):
        raise TypeError(f"optimizer must be an hvdcompress.optimizers.SGD or a Keras optimizer, not {optimizer!r:.60}")
    return lambda name: keras_momentum(optimizer, rates.get(name) if rates else None)


def keras_momentum(optimizer: Any, rate: float | None = None) -> Momentum | None:
    """Return the momentum of a Keras SGD optimizer; None for other optimizers, whose momentum cannot be adapted."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    names = {cls.__name__ for cls in type(optimizer).__mro__ if "keras" in cls.__module__}
    if "SGD" not in names or not isinstance(getattr(optimizer, "momentum", None), int | float):
        return None
    rate = float(optimizer.learning_rate) if rate is None else rate
    return Momentum(float(optimizer.momentum), rate, rate, bool(optimizer.nesterov))


def without_momentum(optimizer: Any) -> Any:
    """Remove the momentum of a PyTorch optimizer, at the same effective learning rate.

    The learning rate of SGD becomes lr·(1 − dampening)/(1 − momentum). For Adam, AdamW and other optimizers with
    ``betas``, beta1 becomes 0. Call it on every rank, before creating a learning-rate scheduler.

    Args:
        optimizer: a PyTorch optimizer, or one with the same ``param_groups``. It is modified in place.

    Returns:
        The optimizer.

    Raises:
        TypeError: a parameter group has neither ``momentum`` nor ``betas``.
        ValueError: a scheduler exists already. It would restore the old learning rate.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not groups or not all("momentum" in group or "betas" in group for group in groups):
        raise TypeError(f"{type(optimizer).__name__} has parameter groups with neither momentum nor betas")
    for group in groups:
        if "initial_lr" in group and group.get("momentum"):
            raise ValueError("call without_momentum() before creating the learning-rate scheduler")
    for group in groups:
        if "betas" in group:
            group["betas"] = (0.0, *group["betas"][1:])
        elif group["momentum"]:
            group["lr"] = group["lr"] * (1.0 - group.get("dampening", 0.0)) / (1.0 - group["momentum"])
            group.update({key: 0.0 for key in ("momentum", "dampening") if key in group})
            group["nesterov"] = False
    return optimizer


def without_beta1(optimizer: Any) -> str:
    """Set beta1 of Adam and its relatives to 0, in PyTorch or Keras; other optimizers are left as they are.

    Returns:
        What was done, in words; nothing if nothing was.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of Keras' LossScaleOptimizer
    groups = getattr(optimizer, "param_groups", None)
    before = groups[0].get("betas", (0.0,))[0] if groups else getattr(optimizer, "beta_1", 0.0)
    if not before:
        return ""
    if groups:
        without_momentum(optimizer)
    else:
        optimizer.beta_1 = 0.0
    return (
        f"{type(optimizer).__name__} with beta1 = {float(before):g}: beta1 is 0 from now on, because gradients that "
        "wait in residuals act as momentum, and only that of SGD can be adapted; without_beta1: false in the plan "
        "keeps it"
    )


def may_adapt(plan: Plan) -> bool:
    """Return whether a plan adapts the optimizer's momentum for any tensor."""
    programs = [plan.program, *(rule.program for rule in plan.rules)]
    return any(adapts(method) for program in programs for _, method in program.stages)


def adaptation_summary(momenta: Iterable[tuple[bool, Momentum | None]]) -> str:
    """Return a sentence about the adaptation of momentum; empty if no tensor has any.

    Args:
        momenta: for each tensor, whether its method adapts momentum, and the optimizer's momentum.
    """
    found = list(momenta)
    adapted = [momentum.factor for adapts, momentum in found if adapts and momentum and momentum.factor]
    if not adapted:
        return ""
    factors = ", ".join(f"{factor:g}" for factor in sorted(set(adapted)))
    return (
        f"the optimizer's momentum ({factors}) is adapted for {len(adapted)} of {len(found)} tensors to the delay of "
        "their gradients in residuals; optimizer_momentum: keep turns this off"
    )
