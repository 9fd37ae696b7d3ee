"""The base of experiments' and benchmarks' YAML files: labelled entries, methods, errors that name the line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from hvdcompress.method import Number
from hvdcompress.plan import Plan, PlanError, load_plan
from hvdcompress.plan.document import Document, Path_
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
    """A checked file; subclasses add keys and ``_check``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    what: ClassVar[str]
    """The word for such a file in messages."""

    name: str = Field("unnamed", pattern=NAME)
    methods: Sequence[MethodEntry] = Field(min_length=1)
    _document: Document = PrivateAttr(default_factory=lambda: Document({}))

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
            raise cls._explain(error, document) from None
        if "name" not in document.value and document.file:
            found.name = re.sub(r"[^\w.-]+", "-", Path(document.file).stem)
        found._document = document
        found._check()
        return found

    def _check(self, taken: Sequence[str] = ()) -> None:
        """Check plans, whose errors get this file's line numbers, and that labels differ, also from those ``taken``."""
        for number, entry in enumerate(self.methods):
            try:
                load_plan(entry.settings)
            except PlanError as error:
                key, _, message = str(error).partition(": ")
                path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
                raise self.error(("methods", number, *path), message) from None
        for key, values in self:
            labels = [one.label for one in values if isinstance(one, Entry)] if isinstance(values, list) else []
            for number, label in enumerate(labels):
                if label in labels[:number] or label in taken:
                    raise self.error((key, number), f"{label!r} is there twice: give one of them a label: of its own")

    def error(self, loc: Path_, message: str) -> PlanError:
        """An error about the key at ``loc``, with its file and line."""
        return Document({}, loc, self._document.lines, self._document.file).error(None, message)

    def save(self, file: Path) -> None:
        """Write the configuration with every default filled in; :meth:`open` reads the same back."""
        text = yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False, allow_unicode=True)
        file.write_text(f"# The {self.what} as it was run, every default filled in.\n" + text, encoding="utf-8")

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
                raise ValueError(f"the {self.what} has no {key[:-1]} {label!r}{hint}; it has: {', '.join(known)}")
        return [entry for entry in entries if not labels or entry.label in labels]

    @classmethod
    def _explain(cls, error: ValidationError, document: Document) -> PlanError:
        """Pydantic's first error as ours: file, line, key, what is wrong, and the key that was probably meant."""
        first = error.errors()[0]
        loc, message = tuple(first["loc"]), first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            model = get_args(cls.model_fields[str(loc[0])].annotation)[0] if len(loc) > 1 else cls
            known = list(model.model_fields)
            message = f"unknown key{suggest(str(loc[-1]), known)}; known: {', '.join(known)}"
        elif first["type"] == "missing":
            message = "is missing"
        elif loc:
            message = f"{first['input']!r}: {message}"
        return Document({}, loc, document.lines, document.file).error(None, message)


class MethodsFile(ConfigFile):
    """The methods of any file; its other keys are left out."""

    model_config = ConfigDict(extra="ignore")
    what = "file"
