"""Experiment files: which tasks are trained with which methods and seeds, resolved into a list of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from experiments.configfile import NAME, ConfigFile, Entry, MethodEntry, Real
from experiments.training.tasks import TASKS, Metric


class Task(Entry):
    """One task and how it is trained: by default SGD with momentum, a linear warm-up and a cosine to zero."""

    named_by = "task"
    task: str
    """The task's id in ``tasks.py``."""
    net: str | None = None
    """The net that learns it, one of ``tasks.NETS``; the task's own unless given."""
    steps: int = Field(600, ge=1)
    batch_size: int = Field(32, ge=1)
    """Examples per rank and step."""
    optimizer: Literal["sgd", "adamw", "muon", "rmsprop", "adagrad"] = "sgd"
    learning_rate: Real = Field(0.05, gt=0)
    """The largest one, reached after ``warmup_steps``."""
    warmup_steps: int = Field(50, ge=0)
    decays: bool = True
    """Whether the learning rate falls to zero with a cosine, or stays."""
    momentum: Real = Field(0.9, ge=0, lt=1)
    """That of SGD or RMSprop, or AdamW's beta1; Adagrad has none."""
    weight_decay: Real = Field(0.0, ge=0)
    clip_norm: Real | None = Field(None, gt=0)
    """Bound on the norm of the whole gradient."""
    clip: Literal["after", "before"] = "after"
    """What ``clip_norm`` bounds. "after": the averaged gradient, once exchanged. "before": each rank's own, before it
    meets its residual; simulated ranks only."""
    log_every: int = Field(10, ge=1)

    @property
    def metric(self) -> Metric:
        """The held-out measure."""
        return TASKS[self.task].metric


class Run(NamedTuple):
    """One training: a task, a method and a seed."""

    task: Task
    method: MethodEntry
    seed: int


class Experiment(ConfigFile):
    """A checked experiment, from a YAML file such as those in ``configs/experiments/``.

    ::

        name: quickstart            # results go to runs/quickstart/
        ranks: 2
        seeds: [0]
        tasks:
          - task: digits            # an id in tasks.py; the other keys are those of Task below
            steps: 600
            learning_rate: 0.05
        methods:
          - none                    # an id with its defaults ...
          - {method: topk, density: 0.01}                       # ... or anything hvdcompress.load_plan() reads,
          - {label: mild top-k, method: topk, density: 0.1}     # with a label of its own

    Unknown keys, unknown methods and values out of range are errors that name the file, the line and the key.
    """

    name: str = Field("experiment", pattern=NAME)
    ranks: int = Field(2, ge=1, le=1024)
    seeds: list[Annotated[int, Field(ge=0)]] = Field([0], min_length=1)
    tasks: list[Task] = Field(min_length=1)
    methods: list[MethodEntry] = Field(min_length=1)

    def runs(self) -> list[Run]:
        """Every training, task by task, so that the methods to compare come one after the other."""
        return [Run(task, method, seed) for task in self.tasks for seed in self.seeds for method in self.methods]

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
        chosen = [task.model_copy(update={"steps": steps or task.steps}) for task in self.pick("tasks", tasks)]
        return self.model_copy(
            update={"tasks": chosen, "methods": self.pick("methods", methods), "ranks": ranks or self.ranks}
        )
