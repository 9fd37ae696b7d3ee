"""What an optimizer does with the gradients that it is handed: its momentum, and training without it.

Error feedback acts as momentum, so the optimizer's own is adapted for tensors whose method keeps a residual
(``parts/momentum.py``). Drivers read it from the optimizer at every step:

* ``hvd.DistributedOptimizer`` and Keras' optimizers are found without being named;
* ``ddp.attach(model, method, optimizer=optimizer)`` is told;
* where there is no optimizer object, as under MPI, an :class:`SGD` describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdcompress.parts.momentum import Momentum, adapts
from hvdcompress.plan import Plan

UNKNOWN = (
    "the optimizer is not known, so its momentum acts on top of the residuals, which costs accuracy: give the "
    "Compressor optimizer=hvdcompress.optimizers.SGD(momentum=…) with the numbers of yours, or "
    'optimizer_momentum="keep" if it has no momentum'
)

Reader = Callable[[str], "Momentum | None"]  #: returns the momentum that is applied to a tensor, by its name


@dataclass
class SGD:
    """Describes SGD with momentum, for programs that have no optimizer object.

    The buffer is v = momentum·v + (1 − dampening)·gradient, or with ``learning_rate``, as in Keras,
    v = momentum·v − learning_rate·gradient. Change the attributes when the training's schedule changes the numbers.

    Args:
        momentum: the momentum factor, at least 0 and less than 1.
        nesterov: whether it is Nesterov's momentum.
        dampening: as in ``torch.optim.SGD``.
        learning_rate: the learning rate, if the buffer contains it.

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
        """Return the momentum that is applied to a tensor in the next step."""
        rate = 1.0 - self.dampening if self.learning_rate is None else self.learning_rate
        return Momentum(self.momentum, rate, rate, self.nesterov)


def described(optimizer: Any, rates: Mapping[str, float] | None = None) -> Reader:
    """Return the reader of an optimizer without named parameters: an :class:`SGD`, or an optimizer of Keras.

    Args:
        optimizer: the optimizer.
        rates: the learning rates at which Keras' optimizer takes the present step, by the tensors' names; without it
            the optimizer's present one.

    Raises:
        TypeError: it is neither.
    """
    if optimizer is None:
        return lambda name: None
    if isinstance(optimizer, SGD):
        return optimizer.read
    if keras_momentum(optimizer) is None and not hasattr(optimizer, "learning_rate"):
        raise TypeError(
            f"optimizer must be an hvdcompress.optimizers.SGD or an optimizer of Keras, not {optimizer!r:.60}"
        )
    return lambda name: keras_momentum(optimizer, rates.get(name) if rates else None)


def keras_momentum(optimizer: Any, rate: float | None = None) -> Momentum | None:
    """Return the momentum of Keras' SGD; None for other optimizers, which have none that can be adapted."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    names = {cls.__name__ for cls in type(optimizer).__mro__ if "keras" in cls.__module__}
    if "SGD" not in names or not isinstance(getattr(optimizer, "momentum", None), int | float):
        return None
    rate = float(optimizer.learning_rate) if rate is None else rate
    return Momentum(float(optimizer.momentum), rate, rate, bool(optimizer.nesterov))


def without_momentum(optimizer: Any) -> Any:
    """Take the momentum out of an optimizer of PyTorch, at the same effective learning rate; returns the optimizer.

    SGD's learning rate becomes lr·(1 − dampening)/(1 − momentum). Of Adam, AdamW, and others with ``betas``, beta1
    becomes 0. Call it before a learning-rate scheduler is made, on every rank.

    Args:
        optimizer: of PyTorch, or one with the same ``param_groups``.

    Raises:
        TypeError: it has neither ``momentum`` nor ``betas``.
        ValueError: a scheduler has been made, which would bring the old learning rate back.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not groups or not all("momentum" in group or "betas" in group for group in groups):
        raise TypeError(f"{type(optimizer).__name__} has parameter groups with neither momentum nor betas")
    for group in groups:
        if "initial_lr" in group and group.get("momentum"):
            raise ValueError("call without_momentum() before you make the learning-rate scheduler")
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
    """Return whether a plan has the optimizer's momentum adapted for some tensors."""
    programs = [plan.program, *(rule.program for rule in plan.rules)]
    return any(adapts(method) for program in programs for _, method in program.stages)


def what_is_done(momenta: Iterable[tuple[bool, Momentum | None]]) -> str:
    """Return in words whether the optimizer's momentum is adapted; nothing if no tensor has any.

    Args:
        momenta: of each tensor, whether momentum is adapted to its method, and what it has.
    """
    found = [(adapts, momentum) for adapts, momentum in momenta]
    adapted = [momentum.factor for adapts, momentum in found if adapts and momentum and momentum.factor]
    if not adapted:
        return ""
    factors = ", ".join(f"{factor:g}" for factor in sorted(set(adapted)))
    return (
        f"the optimizer's momentum ({factors}) is adapted for {len(adapted)} of {len(found)} tensors to how "
        "long their gradients wait in residuals; optimizer_momentum: keep turns this off"
    )
