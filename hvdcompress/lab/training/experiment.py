"""Experiment files: which tasks are trained with which methods and seeds, resolved into a list of runs.

An experiment is written in YAML::

    name: quickstart            # results go to runs/quickstart/
    ranks: 2
    framework: torch            # or tensorflow
    seeds: [0]
    tasks:
      - task: digits            # an id in launch/tasks.py; the other keys are those of Task below
        steps: 600
        learning_rate: 0.05
    methods:
      - none                    # an id with its defaults ...
      - {method: topk, density: 0.01}                       # ... or anything hvdcompress.load() reads,
      - {label: mild top-k, method: topk, density: 0.1}     # with a label of its own, if you like
      - {method: dgc, train: {momentum: 0}}                 # trained otherwise than the task says

Unknown keys, unknown methods and values out of range are errors that name the file, the line and the key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hvdcompress.lab.configfile import NAME, ConfigFile, with_label
from hvdcompress.method import Number
from hvdcompress.plan import Plan, PlanError, load

__all__ = ["Experiment", "MethodEntry", "PlanError", "Run", "Task"]

# Lax, because YAML 1.1 reads 1e-3 (without a point) as text.
Real = Annotated[float, Number, Field(strict=False)]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w .,=+%()/-]{0,39}$")]


class Task(BaseModel):
    """One task and how it is trained: SGD with momentum, a linear warm-up and a cosine to zero."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    task: str
    """The task's id in ``launch/tasks.py``."""
    label: Label
    """What tables call it; the id unless given."""
    steps: int = Field(600, ge=1)
    batch_size: int = Field(32, ge=1)
    """Examples a rank and step."""
    learning_rate: Real = Field(0.05, gt=0)
    """The largest one, reached after ``warmup_steps``."""
    warmup_steps: int = Field(50, ge=0)
    momentum: Real = Field(0.9, ge=0, lt=1)
    weight_decay: Real = Field(0.0, ge=0)
    clip_norm: Real | None = Field(None, gt=0)
    """Bound on the norm of the averaged gradient."""
    log_every: int = Field(10, ge=1)
    path: str | None = None
    """Where the data is, for tasks that read yours."""
    image_size: int = Field(32, ge=8, le=512)
    """Pictures are scaled to this many pixels a side (task "images")."""


class Training(BaseModel):
    """What one method is trained with in place of the task's own: DGC, say, wants an optimizer without momentum."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    learning_rate: Real | None = Field(None, gt=0)
    momentum: Real | None = Field(None, ge=0, lt=1)
    weight_decay: Real | None = Field(None, ge=0)
    clip_norm: Real | None = Field(None, gt=0)


class MethodEntry(BaseModel):
    """A label and the plan under it, as a dict that ``hvdcompress.load`` reads; ``train`` changes its training."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    label: Label
    method: str
    train: Training | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What goes to ``hvdcompress.load``."""
        return self.model_dump(exclude={"label", "train"})

    @property
    def training(self) -> dict[str, Any]:
        """The task's keys that this method changes, and their values."""
        return self.train.model_dump(exclude_none=True) if self.train else {}

    @property
    def plan(self) -> Plan:
        """The validated plan."""
        return load(self.settings)

    @property
    def density(self) -> float | None:
        """The main method's density; None for methods that have none."""
        return getattr(self.plan.program.main, "density", None)


@dataclass(frozen=True)
class Run:
    """One training: a task, a method and a seed."""

    task: Task
    method: MethodEntry
    seed: int
    ranks: int
    framework: str = "torch"

    @property
    def id(self) -> str:
        """Its name, good for a file's name too: ``digits.topk.0``."""
        words = (self.task.label, self.method.label, str(self.seed))
        return ".".join(re.sub(r"[^A-Za-z0-9_=+-]+", "-", word) for word in words)

    def spec(self) -> dict[str, Any]:
        """All that its result depends on, as plain data."""
        task, method = self.task.model_dump(exclude={"log_every"}), self.method.model_dump(exclude_none=True)
        spec = {"task": task, "method": method, "seed": self.seed, "ranks": self.ranks}
        return spec if self.framework == "torch" else {**spec, "framework": self.framework}


class Experiment(ConfigFile):
    """A checked experiment; see the module's text for the file's form."""

    what = "experiment"
    entries = {"tasks": Task}

    name: str = Field("experiment", pattern=NAME)
    ranks: int = Field(2, ge=1, le=1024)
    framework: Literal["torch", "tensorflow"] = "torch"
    seeds: list[Annotated[int, Field(ge=0)]] = Field([0], min_length=1)
    tasks: list[Annotated[Task, with_label("task")]] = Field(min_length=1)
    methods: list[Annotated[MethodEntry, with_label("method")]] = Field(min_length=1)

    def _check(self) -> None:
        for number, entry in enumerate(self.methods):
            self._check_plan(number, entry.settings)
        for key in ("tasks", "methods"):
            self._check_labels(key)
        if len(set(self.seeds)) < len(self.seeds):
            raise self.error(("seeds",), f"{self.seeds} holds a seed twice")
        if len({run.id for run in self.runs()}) < len(self.runs()):
            raise self.error(("methods",), "two labels differ only in punctuation: make them more different")

    def runs(self) -> list[Run]:
        """Every training, task by task, so that the methods to compare come one after the other."""
        return [
            Run(task.model_copy(update=method.training), method, seed, self.ranks, self.framework)
            for task in self.tasks
            for seed in self.seeds
            for method in self.methods
        ]

    def override(
        self,
        ranks: int | None = None,
        steps: int | None = None,
        methods: Sequence[str] = (),
        tasks: Sequence[str] = (),
    ) -> Experiment:
        """A copy with the command line's wishes; ``methods`` and ``tasks`` are labels to keep.

        Raises:
            ValueError: there is no such label.
        """
        kept_tasks = self._pick("tasks", tasks, "task")
        if steps is not None:
            kept_tasks = [task.model_copy(update={"steps": steps}) for task in kept_tasks]
        kept = self._pick("methods", methods, "method")
        return self.model_copy(update={"tasks": kept_tasks, "methods": kept, "ranks": ranks or self.ranks})
