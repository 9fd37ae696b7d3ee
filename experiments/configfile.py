"""The base of experiments' and benchmarks' YAML files, and options of several commands that such files stand behind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from experiments.cluster.hosts import Hosts
from hvdcompress.method import Number
from hvdcompress.plan import Plan, load_plan
from hvdcompress.plan.document import Document
from hvdcompress.registry import available, suggest

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


# -- what commands of several areas share: lists with commas, files of ``configs/``, emulated hosts ----------------

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def split(text: str | None) -> list[str]:
    """Return the words that commas part."""
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


def config_file(given: Path | str, *kinds: str) -> Path:
    """Return the file that a user means: a path that exists, or the name of a file in a folder of ``configs/``.

    Args:
        given: the path or the name.
        kinds: folders of ``configs/``.

    Raises:
        ValueError: it is neither.
    """
    if Path(given).is_file():
        return Path(given)
    known = {file.stem: file for kind in kinds for file in sorted((CONFIGS / kind).glob("*.yaml"))}
    if str(given) not in known:
        hint = suggest(str(given), list(known))
        raise ValueError(
            f"there is no file {given}, and none of that name in configs/{hint}; known: {', '.join(known)}"
        )
    return known[str(given)]


def emulated_hosts(count: int | None, rate: str | None, ranks: int | None = None) -> Hosts | None:
    """Return the emulated hosts that were asked for, or None.

    Raises:
        ValueError: the options contradict each other.
    """
    if (count is None) != (rate is None):
        raise ValueError("emulated hosts need --hosts and the rate of their links, such as --hosts 4 --rate 1gbit")
    if count is None or rate is None:
        return None
    if ranks and ranks % count:
        raise ValueError(f"-np {ranks} and --hosts {count}: each host must get equally many ranks")
    return Hosts(count, rate, ranks_per_host=(ranks or count) // count)


def methods_of(config: str | None, labels: str | None) -> Sequence[MethodEntry]:
    """Return the methods of a file; every method with its defaults for None.

    Raises:
        ValueError, OSError: there is no such file, something in it is wrong, or there is no such label.
    """
    source = {"methods": available()} if config is None else config_file(config, "bench", "experiments")
    return MethodsFile.open(source).pick("methods", split(labels))


def seeds_of(text: str) -> list[int]:
    """Return the seeds of ``1-3,7``, which are 1, 2, 3 and 7.

    Raises:
        ValueError: the text is not of that form.
    """
    found: list[int] = []
    for word in text.split(","):
        first, dash, last = word.partition("-")
        found += range(int(first), int(last if dash else first) + 1)
    return found
