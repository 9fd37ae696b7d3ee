"""The contenders of the study: methods with settings, and what they do with the optimizer's momentum.

A contender is written ``METHOD[@key=value,…][:plain|:cancelled]``. The method is a name in :data:`METHODS` or
:data:`REMEDIES`, or any method's id. ``:plain`` leaves the optimizer's momentum as it is, ``:cancelled`` cancels it,
and without either the library's default applies. Three keys belong to the optimizer, the others to the method or its
plan:

    lr=2          multiplies the task's learning rate
    mu=0.5        another momentum of SGD or RMSprop
    beta1=0.5     another beta1 of AdamW

``local@every=30,method=powersgd,…`` exchanges parameters every 30 steps, instead of gradients. ``outer_lr``,
``outer_momentum``, ``warmup``, ``fragments``, ``delay`` and ``mixing`` are those of LocalSteps; the momentum that is
kept or cancelled is then that of the outer optimizer.

>>> parse("topk@density=0.002,lr=2:plain").settings
{'method': 'topk', 'density': 0.002}
>>> parse("local@every=30,method=topk,outer_lr=1").local
{'every': 30, 'outer': {'lr': 1, 'momentum': 0.9, 'nesterov': True}}
>>> split("topk@density=0.01,lr=2:plain,dense")
['topk@density=0.01,lr=2:plain', 'dense']
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from experiments.attach import DENSE
from experiments.momentum.remedies import CLASSES, REMEDIES, register
from experiments.training.experiment import Task
from hvdcompress.local_steps import OUTER
from hvdcompress.plan.reading import plan_of, settings_of

OPTIMIZER_MOMENTUM = {"plain": "keep", "cancelled": "cancel"}  #: the plan's ``optimizer_momentum`` by form
LOCAL = "local"
LOCAL_KEYS = ("every", "warmup", "fragments", "delay", "mixing")  #: besides those of the outer optimizer
STEPS = 1500  #: of a run, unless another number is asked for
DENSITIES = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005)

KEPT_IN_BLOCKS = {"match": {"name": "blocks.*"}, "optimizer_momentum": "keep"}
#: Methods by the names that contenders have in this study.
METHODS: dict[str, dict[str, Any]] = {
    DENSE: {"method": "none"},
    "topk": {"method": "topk", "density": 0.01},
    "gaussiank": {"method": "gaussiank", "density": 0.01},
    "scalecom": {"method": "scalecom"},
    "scalecom_48x": {"method": "scalecom", "density": 1 / 35, "values": "fp16"},
    "redsync": {"method": "redsync", "density": 0.01},
    "gtopk": {"method": "gtopk", "density": 0.01},
    "dgc": {"method": "dgc", "density": 0.01},
    "powersgd_r1": {"method": "powersgd", "matrix_rank": 1},
    "powersgd_r2": {"method": "powersgd", "matrix_rank": 2},
    "powersgd_r4": {"method": "powersgd", "matrix_rank": 4},
    "acpsgd_r4": {"method": "acpsgd", "matrix_rank": 4},
    "signsgd": {"method": "signsgd"},
    # Muon's momentum is kept, and that of AdamW adapted
    "topk_kept": {"method": "topk", "density": 0.01, "rules": [KEPT_IN_BLOCKS]},
    "powersgd_kept": {"method": "powersgd", "matrix_rank": 4, "rules": [KEPT_IN_BLOCKS]},
    "randomk": {"method": "randomk", "density": 0.01},
}
NOT_BY_DEFAULT = ("randomk", "signsgd", "topk_kept", "powersgd_kept")


def _forms(name: str) -> list[str]:
    return [name, f"{name}:plain", f"{name}:cancelled"]


#: Lists of contenders by a name that ``--contenders`` takes, too.
GROUPS: dict[str, list[str]] = {
    "main": [DENSE, *_forms("topk"), *_forms("topk@density=0.002")],
    "defaults": [DENSE, "topk:plain", *(name for name in METHODS if name not in (DENSE, *NOT_BY_DEFAULT))],
    "all": [DENSE, *(one for name in METHODS if name != DENSE for one in _forms(name)), *_forms("topk@density=0.002")],
    "remedies": [DENSE, *_forms("topk"), "dgc", "lowpass:plain", "gmc", "regtopk:plain", "regtopk", "ef21_sgdm"],
    "densities": [DENSE, *(one for density in DENSITIES for one in _forms(f"topk@density={density:g}"))],
}


@dataclass(frozen=True)
class Contender:
    """A method and its optimizer's settings.

    Attributes:
        name: as it was written.
        settings: the method's id and hyper-parameters, and keys of the plan.
        form: "plain", "cancelled", or "default" for the library's default.
        lr: a factor of the task's learning rate.
        momentum: the momentum of SGD or RMSprop, or AdamW's beta1, if not the task's.
        local: arguments of LocalSteps; None if gradients are exchanged in every step.
    """

    name: str
    settings: dict[str, Any]
    form: Literal["default", "plain", "cancelled"] = "default"
    lr: float = 1.0
    momentum: float | None = None
    local: dict[str, Any] | None = None

    def plan(self) -> dict[str, Any]:
        """Return the settings, with the form as ``optimizer_momentum``."""
        form = {} if self.form == "default" else {"optimizer_momentum": OPTIMIZER_MOMENTUM[self.form]}
        return {**self.settings, **form}

    def trained(self, task: Task) -> Task:
        """Return the task with the contender's own learning rate and momentum (AdamW: beta1)."""
        momentum = task.momentum if self.momentum is None else self.momentum
        return task.model_copy(update={"learning_rate": self.lr * task.learning_rate, "momentum": momentum})


def split(words: str) -> list[str]:
    """Split a list at its commas, except those between the settings of a contender; replace groups by their members."""
    found: list[str] = []
    for word in words.split(","):
        if "=" in word.partition("@")[0] and found:
            found[-1] += f",{word}"
        else:
            found += GROUPS.get(word, [word])
    return list(dict.fromkeys(found))


def parse(name: str, task: Task | None = None) -> Contender:
    """Read a contender.

    Args:
        name: see the module's docstring.
        task: if given, the contender's keys must fit the task's optimizer.

    Raises:
        ValueError: the form, the method or a setting does not exist, or does not fit the optimizer.
    """
    text, colon, form = name.partition(":")
    if colon and form not in ("plain", "cancelled"):
        raise ValueError(f"{name}: write :plain or :cancelled, not {form!r}")
    method, at, given = text.partition("@")
    if method in CLASSES:
        register()
    known = {**METHODS, **REMEDIES, LOCAL: {"method": "none"}}.get(method, {"method": method})
    settings = {**known, **(settings_of(given.split(",")) if at else {})}
    local = _local(name, settings) if method == LOCAL else None
    lr, momentum = float(settings.pop("lr", 1.0)), None
    for key, optimizers in (("mu", ("sgd", "rmsprop")), ("beta1", ("adamw",))):
        if key in settings:
            momentum = float(settings.pop(key))
            if task is not None and task.optimizer not in optimizers:
                raise ValueError(f"{name}: {key} is for {optimizers}, and the task's optimizer is {task.optimizer}")
    plan_of(settings)  # raises if the method or a setting does not exist
    return Contender(name, settings, form or "default", lr, momentum, local)  # type: ignore[arg-type]


def _local(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments of LocalSteps out of a contender's settings."""
    if "every" not in settings:
        raise ValueError(f"{name}: write {LOCAL}@every=30,method=powersgd,…")
    given = {key: settings.pop(f"outer_{key}") for key in ("lr", "momentum") if f"outer_{key}" in settings}
    outer = {**OUTER, **given}
    arguments = {key: settings.pop(key) for key in LOCAL_KEYS if key in settings}
    return {**arguments, "outer": {**outer, "nesterov": outer["momentum"] > 0}}


def without_rate(name: str) -> str:
    """Return a contender without its factor of the learning rate.

    >>> without_rate("topk@density=0.002,lr=2:plain"), without_rate("dense@lr=2")
    ('topk@density=0.002:plain', 'dense')
    """
    text, colon, form = name.partition(":")
    base, _, given = text.partition("@")
    left = ",".join(word for word in given.split(",") if word and not word.startswith("lr="))
    return f"{base}{'@' if left else ''}{left}{colon}{form}"


def constant(net: str, task: str, learning_rate: float, **more: Any) -> Task:
    """Return a training at a constant learning rate, by default of 64 examples per rank and step."""
    return Task(
        net=net,
        task=task,
        learning_rate=learning_rate,
        **{"label": net, "warmup_steps": 0, "decays": False, "batch_size": 64, **more},
    )


ADAMW: dict[str, Any] = {"optimizer": "adamw", "weight_decay": 0.01}
TASKS = {
    "mlp": constant("mlp", "fashion_mnist_centred", 0.05),
    "mlp_by_label": constant("mlp", "fashion_mnist_by_label", 0.05, label="mlp_by_label"),
    "cnn": constant("cnn", "fashion_mnist_centred", 0.02, batch_size=32),
    "mnist_example": constant("mnist_example", "fashion_mnist_example", 0.02, momentum=0.5),
    "lstm": constant("lstm", "bytes48", 1.0, batch_size=16, clip_norm=0.25, clip="before"),
    "transformer": constant("transformer", "bytes32", 0.002, batch_size=16, **ADAMW),
    "lstm_adamw": constant("lstm", "bytes48", 0.003, batch_size=16, **ADAMW),
    "cnn_adamw": constant("cnn", "fashion_mnist_centred", 0.001, batch_size=32, **ADAMW),
    "transformer_muon": constant("transformer", "bytes32", 0.002, batch_size=16, optimizer="muon", weight_decay=0.01),
    "transformer_rmsprop": constant("transformer", "bytes32", 0.0002, batch_size=16, optimizer="rmsprop"),
    "transformer_adagrad": constant("transformer", "bytes32", 0.02, batch_size=16, optimizer="adagrad", momentum=0.0),
    # those of the papers' claims, near the largest rate that they bear; 300 steps suffice
    "fnn3": constant("fnn3", "fashion_mnist", 0.05, batch_size=32, decays=True),
    "lenet5": constant("lenet5", "fashion_mnist", 0.05, batch_size=32, decays=True),
}
