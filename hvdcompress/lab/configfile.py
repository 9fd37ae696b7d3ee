"""What the files of experiments and benchmarks have in common: labelled entries, and errors that name the line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, PrivateAttr, ValidationError

from hvdcompress.plan import PlanError, load
from hvdcompress.plan.document import Document, Path_
from hvdcompress.registry import suggest

NAME = r"^[A-Za-z0-9][\w.-]*$"  # good for a folder's name


def with_label(key: str) -> BeforeValidator:
    """``digits`` is short for ``{task: digits, label: digits}``, if the key is ``task``."""

    def expand(value: Any) -> Any:
        value = {key: value} if isinstance(value, str) else value
        if isinstance(value, Mapping) and "label" not in value and key in value:
            value = {"label": value[key], **value}
        return value

    return BeforeValidator(expand)


class ConfigFile(BaseModel):
    """A checked file; subclasses add keys and ``_check``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    what: ClassVar[str]
    """What messages call it."""
    entries: ClassVar[dict[str, type[BaseModel]]]
    """Lists in it whose entries take no keys but these models'."""

    name: str
    _document: Document = PrivateAttr(default_factory=lambda: Document({}))

    @classmethod
    def open(cls, source: str | Path | Mapping[str, Any]) -> Self:
        """Read and check a file, or a dict with the same keys.

        Raises:
            PlanError: (a ``ValueError``) it names the file, the line and the key.
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

    def _check(self) -> None:
        """What a single key does not tell."""

    def _check_labels(self, key: str, taken: Sequence[str] = ()) -> None:
        labels = [entry.label for entry in getattr(self, key)]
        for number, label in enumerate(labels):
            if label in labels[:number] or label in taken:
                raise self.error((key, number), f"{label!r} is there twice: give one of them a label: of its own")

    def _check_plan(self, number: int, settings: dict[str, Any]) -> None:
        """The plan of ``methods[number]``; plans count lines from their own beginning."""
        try:
            load(settings)
        except PlanError as error:
            key, _, message = str(error).partition(": ")
            path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
            raise self.error(("methods", number, *path), message) from None

    def error(self, loc: Path_, message: str) -> PlanError:
        """A complaint about the key at ``loc``, with its line."""
        return Document({}, loc, self._document.lines, self._document.file).error(None, message)

    def save(self, file: Path) -> None:
        """Write it with every default filled in; :meth:`open` reads it back to the same."""
        text = yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False, allow_unicode=True)
        file.write_text(f"# The {self.what} as it was run, every default filled in.\n" + text, encoding="utf-8")

    def _pick(self, key: str, labels: Iterable[str], kind: str) -> list[Any]:
        """The entries with these labels, or all.

        Raises:
            ValueError: there is no such label.
        """
        entries = getattr(self, key)
        known = [entry.label for entry in entries]
        for label in labels:
            if label not in known:
                hint = suggest(label, known)
                raise ValueError(f"the {self.what} has no {kind} {label!r}{hint}; it has: {', '.join(known)}")
        return [entry for entry in entries if not labels or entry.label in labels]

    @classmethod
    def _explain(cls, error: ValidationError, document: Document) -> PlanError:
        """Pydantic's first complaint in our words: line, key, what is wrong, and what was probably meant."""
        first = error.errors()[0]
        loc, message = tuple(first["loc"]), first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            model = cls.entries.get(str(loc[0]), cls) if len(loc) > 1 else cls
            known = list(model.model_fields)
            message = f"unknown key{suggest(str(loc[-1]), known)}; known: {', '.join(known)}"
        elif first["type"] == "missing":
            message = "is missing"
        elif loc:
            message = f"{first['input']!r}: {message}"
        return Document({}, loc, document.lines, document.file).error(None, message)
