"""Experiment files: which tasks are trained with which methods and seeds, resolved into a list of runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from experiments.configfile import NAME, ConfigFile, Label, MethodEntry, Real, with_label

__all__ = ["Experiment", "Run", "Task"]


class Task(BaseModel):
    """One task and how it is trained: SGD with momentum, a linear warm-up and a cosine to zero."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    task: str
    """The task's id in ``tasks.py``."""
    net: str | None = None
    """The net that learns it, one of ``tasks.NETS``; the task's own unless given."""
    label: Label
    """The name used in tables; the id unless given."""
    steps: int = Field(600, ge=1)
    batch_size: int = Field(32, ge=1)
    """Examples per rank and step."""
    learning_rate: Real = Field(0.05, gt=0)
    """The largest one, reached after ``warmup_steps``."""
    warmup_steps: int = Field(50, ge=0)
    momentum: Real = Field(0.9, ge=0, lt=1)
    weight_decay: Real = Field(0.0, ge=0)
    clip_norm: Real | None = Field(None, gt=0)
    """Bound on the norm of the whole gradient."""
    clip: Literal["after", "before"] = "after"
    """What ``clip_norm`` bounds. "after": the averaged gradient, once exchanged. "before": each rank's own, before it
    meets its residual; simulated ranks only."""
    log_every: int = Field(10, ge=1)


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
        """Its name, which is valid as a file's name: ``digits.topk.0``."""
        words = (self.task.label, self.method.label, str(self.seed))
        return ".".join(re.sub(r"[^A-Za-z0-9_=+-]+", "-", word) for word in words)

    def spec(self) -> dict[str, Any]:
        """Everything that its result depends on, as plain data."""
        task, method = self.task.model_dump(exclude={"log_every"}), self.method.model_dump(exclude_none=True)
        spec = {"task": task, "method": method, "seed": self.seed, "ranks": self.ranks}
        return spec if self.framework == "torch" else {**spec, "framework": self.framework}


class Experiment(ConfigFile):
    """A checked experiment, from a YAML file such as those in ``configs/experiments/``.

    ::

        name: quickstart            # results go to runs/quickstart/
        ranks: 2
        framework: torch            # or tensorflow
        seeds: [0]
        tasks:
          - task: digits            # an id in tasks.py; the other keys are those of Task below
            steps: 600
            learning_rate: 0.05
        methods:
          - none                    # an id with its defaults ...
          - {method: topk, density: 0.01}                       # ... or anything hvdcompress.load() reads,
          - {label: mild top-k, method: topk, density: 0.1}     # with a label of its own

    Unknown keys, unknown methods and values out of range are errors that name the file, the line and the key.
    """

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
            Run(task, method, seed, self.ranks, self.framework)
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
        """A copy with the command line's options applied; ``methods`` and ``tasks`` are labels to keep.

        Raises:
            ValueError: there is no such label.
        """
        kept_tasks = self._pick("tasks", tasks, "task")
        if steps is not None:
            kept_tasks = [task.model_copy(update={"steps": steps}) for task in kept_tasks]
        kept = self._pick("methods", methods, "method")
        return self.model_copy(update={"tasks": kept_tasks, "methods": kept, "ranks": ranks or self.ranks})
