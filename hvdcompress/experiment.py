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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from hvdcompress.method import Number
from hvdcompress.plan import Plan, PlanError, load
from hvdcompress.registry import suggest
from hvdcompress.yamlfile import Document

__all__ = ["Experiment", "MethodEntry", "PlanError", "Run", "Task"]

# Lax, because YAML 1.1 reads 1e-3 (without a point) as text.
Real = Annotated[float, Number, Field(strict=False)]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w .,=+%()/-]{0,39}$")]
Loc = tuple[str | int, ...]


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


def _with_label(key: str) -> BeforeValidator:
    """``digits`` is short for ``{task: digits, label: digits}``."""

    def expand(value: Any) -> Any:
        value = {key: value} if isinstance(value, str) else value
        if isinstance(value, Mapping) and "label" not in value and key in value:
            value = {"label": value[key], **value}
        return value

    return BeforeValidator(expand)


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


class Experiment(BaseModel):
    """A checked experiment; see the module's text for the file's form."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field("experiment", pattern=r"^[A-Za-z0-9][\w.-]*$")
    ranks: int = Field(2, ge=1, le=1024)
    framework: Literal["torch", "tensorflow"] = "torch"
    seeds: list[Annotated[int, Field(ge=0)]] = Field([0], min_length=1)
    tasks: list[Annotated[Task, _with_label("task")]] = Field(min_length=1)
    methods: list[Annotated[MethodEntry, _with_label("method")]] = Field(min_length=1)
    _document: Document = PrivateAttr(default_factory=lambda: Document({}))

    @classmethod
    def open(cls, source: str | Path | Mapping[str, Any]) -> Experiment:
        """Read and check an experiment's file, or a dict with the same keys.

        Raises:
            PlanError: (a ``ValueError``) it names the file, the line and the key.
            FileNotFoundError: there is no such file.
        """
        document = Document.open(source)
        try:
            experiment = cls.model_validate(document.value)
        except ValidationError as error:
            raise _explain(error, document) from None
        if "name" not in document.value and document.file:
            experiment.name = re.sub(r"[^\w.-]+", "-", Path(document.file).stem)
        experiment._document = document
        experiment._check()
        return experiment

    def _check(self) -> None:
        for number, entry in enumerate(self.methods):
            try:
                load(entry.settings)
            except PlanError as error:
                raise self._relocate(error, number) from None
        for kind, labels in (("tasks", [t.label for t in self.tasks]), ("methods", [m.label for m in self.methods])):
            for number, label in enumerate(labels):
                if label in labels[:number]:
                    raise self.error((kind, number), f"{label!r} is there twice: give one of them a label: of its own")
        if len(set(self.seeds)) < len(self.seeds):
            raise self.error(("seeds",), f"{self.seeds} holds a seed twice")
        if len({run.id for run in self.runs()}) < len(self.runs()):
            raise self.error(("methods",), "two labels differ only in punctuation: make them more different")

    def _relocate(self, error: PlanError, number: int) -> PlanError:
        """The same complaint, with the line it has in this file: plans count from their own beginning."""
        key, _, message = str(error).partition(": ")
        path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        return self.error(("methods", number, *path), message)

    def error(self, loc: Loc, message: str) -> PlanError:
        """A complaint about the key at ``loc``, with its line."""
        return Document({}, loc, self._document.lines, self._document.file).error(None, message)

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
        kept_tasks = _pick(self.tasks, tasks, "task")
        if steps is not None:
            kept_tasks = [task.model_copy(update={"steps": steps}) for task in kept_tasks]
        changes = {"tasks": kept_tasks, "methods": _pick(self.methods, methods, "method"), "ranks": ranks or self.ranks}
        return self.model_copy(update=changes)

    def save(self, file: Path) -> None:
        """Write it with every default filled in; :meth:`open` reads it back to the same runs."""
        text = yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False, allow_unicode=True)
        file.write_text("# The experiment as it was run, every default filled in.\n" + text, encoding="utf-8")


def _pick(entries: Sequence[Any], labels: Iterable[str], kind: str) -> list[Any]:
    known = {entry.label: entry for entry in entries}
    for label in labels:
        if label not in known:
            hint = suggest(label, list(known))
            raise ValueError(f"the experiment has no {kind} {label!r}{hint}; it has: {', '.join(known)}")
    return [entry for entry in entries if not labels or entry.label in labels]


def _explain(error: ValidationError, document: Document) -> PlanError:
    """Pydantic's first complaint in our words: line, key, what is wrong, and what was probably meant."""
    first = error.errors()[0]
    loc, message = tuple(first["loc"]), first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        model = Task if loc[0] == "tasks" and len(loc) > 1 else Experiment
        known = list(model.model_fields)
        message = f"unknown key{suggest(str(loc[-1]), known)}; known: {', '.join(known)}"
    elif first["type"] == "missing":
        message = "is missing"
    elif loc:
        message = f"{first['input']!r}: {message}"
    return Document({}, loc, document.lines, document.file).error(None, message)
