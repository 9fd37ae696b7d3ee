"""The base of experiments' and benchmarks' YAML files: labelled entries, methods, errors that name the line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hvdcompress.method import Number
from hvdcompress.plan import Plan, load_plan
from hvdcompress.plan.document import Document
from hvdcompress.registry import suggest

NAME = r"^[A-Za-z0-9][\w.-]*$"  # valid as a folder's name
# Lax, because YAML 1.1 reads 1e-3 (without a point) as text.
Real = Annotated[float, Number, Field(strict=False)]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w .,=+%()/-]{0,39}$")]


class Entry(BaseModel):
    """An entry of a list. ``digits`` is short for ``{task: digits, label: digits}``, if ``named_by`` is "task"."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    named_by: ClassVar[str]
    """The key whose value is the label, too, unless another one is given."""
    label: Label
    """The name used in tables."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        value = {cls.named_by: value} if isinstance(value, str) else value
        if isinstance(value, Mapping) and "label" not in value and cls.named_by in value:
            value = {"label": value[cls.named_by], **value}
        return value


class MethodEntry(Entry):
    """An entry of ``methods:``, a label and the plan under it as ``hvdcompress.load_plan`` reads it."""

    model_config = ConfigDict(extra="allow")

    named_by = "method"
    method: str
    """The method's id; the entry's other keys are its hyper-parameters and the plan's options."""

    @model_validator(mode="after")
    def _is_a_plan(self) -> Self:
        load_plan(self.settings)
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """The plan as plain data, for ``hvdcompress.load_plan``."""
        own = set(type(self).model_fields) - {"method"}
        return self.model_dump(exclude=own)

    @property
    def plan(self) -> Plan:
        """The validated plan."""
        return load_plan(self.settings)

    @property
    def density(self) -> float | None:
        """The main method's density; None for methods that have none."""
        return getattr(self.plan.program.main, "density", None)


class ConfigFile(BaseModel):
    """A checked file; subclasses add keys."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field("unnamed", pattern=NAME)
    methods: Sequence[MethodEntry] = Field(min_length=1)

    @classmethod
    def open(cls, source: str | Path | Mapping[str, Any]) -> Self:
        """Read and check a file, or a dict with the same keys.

        Raises:
            PlanError: (a ``ValueError``) something is wrong in it; the message names the file, the line and the key.
            FileNotFoundError: there is no such file.
        """
        document = Document.open(source)
        try:
            found = cls.model_validate(document.value)
        except ValidationError as error:
            first = error.errors()[0]
            message = first["msg"].removeprefix("Value error, ")
            raise Document({}, first["loc"], document.lines, document.file).error(None, message) from None
        if "name" not in document.value and document.file:
            found.name = re.sub(r"[^\w.-]+", "-", Path(document.file).stem)
        return found

    @model_validator(mode="after")
    def _labels_differ(self) -> Self:
        for key, values in self:
            labels = [one.label for one in values if isinstance(one, Entry)] if isinstance(values, list) else []
            if twice := {label for label in labels if labels.count(label) > 1}:
                raise ValueError(f"{key}: {twice.pop()!r} is there twice: give one of them a label: of its own")
        return self

    def save(self, file: Path) -> None:
        """Write the configuration with every default filled in; :meth:`open` reads the same back."""
        text = yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False, allow_unicode=True)
        file.write_text(f"# As it was run, every default filled in.\n{text}", encoding="utf-8")

    def pick(self, key: str, labels: Iterable[str]) -> list[Any]:
        """The entries of a list with these labels, or all.

        Raises:
            ValueError: there is no such label.
        """
        entries = getattr(self, key)
        known = [entry.label for entry in entries]
        for label in labels:
            if label not in known:
                hint = suggest(label, known)
                raise ValueError(f"the file has no {key[:-1]} {label!r}{hint}; it has: {', '.join(known)}")
        return [entry for entry in entries if not labels or entry.label in labels]


class MethodsFile(ConfigFile):
    """The methods of any file; its other keys are left out."""

    model_config = ConfigDict(extra="ignore")
