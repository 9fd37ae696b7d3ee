"""YAML mappings that know the line of each key, so that every error names the key and the line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hvdcompress.registry import suggest

Path_ = tuple[str | int, ...]
DEEPEST = 20  #: mappings and lists within each other; plans and experiments have 5


class PlanError(ValueError):
    """A plan or an experiment is invalid. The message names the file, the line and the key."""


class Document:
    """A mapping in a YAML file, or a dict, that knows the line of each of its keys.

    Args:
        value: the mapping.
        path: keys from the top of the file to this mapping.
        lines: line of each path in the file; empty for a dict.
        file: the file's name; empty for a dict.

    Raises:
        PlanError: ``value`` is not a mapping.
    """

    def __init__(self, value: Any, path: Path_ = (), lines: dict[Path_, int] | None = None, file: str = ""):
        self.path, self.lines, self.file = path, lines or {}, file
        if not isinstance(value, Mapping):
            raise self.error(None, f"must be a mapping of keys to values, not {value!r}")
        self.value: dict[Any, Any] = dict(value)

    @classmethod
    def open(cls, source: str | Path | Mapping[str, Any]) -> Document:
        """Read a YAML file, or take a dict.

        Args:
            source: the file's path, or a dict.

        Raises:
            PlanError: the file is not a YAML mapping; it has a key twice, an alias or a merge key; it is nested too
                deeply.
            FileNotFoundError: there is no such file.
        """
        if isinstance(source, Mapping):
            return cls(source)
        file = str(source)
        try:
            text = Path(source).read_text(encoding="utf-8")
            _refuse_unwritten(text, file)
            keys, value = list(_walk(yaml.compose(text), ())), yaml.safe_load(text)
        except PlanError:
            raise
        except (yaml.YAMLError, ValueError) as error:  # such as a date that there is not
            raise PlanError(f"{file}: is not valid YAML: {error}") from None
        lines: dict[Path_, int] = {}
        for path, line in keys:
            if path in lines:
                raise PlanError(f"{file}, line {line}: {path[-1]} is given a second time (first in line {lines[path]})")
            lines[path] = line
        return cls(value if value is not None else {}, (), lines, file)

    def error(self, key: Any, message: str) -> PlanError:
        """Return the error that ``message`` describes, about ``key`` (None: about the whole mapping)."""
        path = self.path if key is None else (*self.path, key)
        line = next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), None)
        where = ", ".join(filter(None, [self.file, f"line {line}" if line else ""]))
        name = ".".join(str(part) for part in path)
        return PlanError(": ".join(filter(None, [where, name, message])))

    def without(self, *keys: str) -> Document:
        """Return the same mapping without some keys."""
        rest = {key: value for key, value in self.value.items() if key not in keys}
        return Document(rest, self.path, self.lines, self.file)

    def with_defaults(self, values: Mapping[str, Any], instead_of: str) -> Document:
        """Return the same mapping with other keys for one of its own; keys that it has keep their values."""
        rest = self.without(instead_of).value
        return Document({**values, **rest}, self.path, self.lines, self.file)

    def child(self, key: Any, value: Any = None) -> Document:
        """Return the mapping under ``key``, or ``value`` in its place."""
        value = self.value.get(key) if value is None else value
        return Document(value, (*self.path, key), self.lines, self.file)

    def items(self, key: str) -> Iterator[Document]:
        """Yield the mappings in the list under ``key``; none if the key is absent."""
        given = self.value.get(key) or []
        if not isinstance(given, list | tuple):
            raise self.error(key, f"must be a list, not {given!r}")
        for number, item in enumerate(given):
            yield Document(item, (*self.path, key, number), self.lines, self.file)

    def known_keys(self, known: tuple[str, ...]) -> None:
        """Raise :class:`PlanError` if the mapping has other keys than these."""
        for key in self.value:
            if key not in known:
                hint = suggest(str(key), list(known))
                raise self.error(key, f"unknown key{hint}; known: {', '.join(known)}")

    def whole(self, key: str, default: Any, least: int) -> Any:
        """Return the integer under ``key``, or ``default``; raise :class:`PlanError` if it is less than ``least``."""
        value = self.value.get(key, default)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise self.error(key, f"{value!r} must be a whole number, {least} or more")
        return value

    def text(self, key: str) -> str | None:
        """Return the text under ``key``, or None if the key is absent."""
        value = self.value.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, f"{value!r} must be text")
        return value


def _refuse_unwritten(text: str, file: str) -> None:
    """Refuse YAML whose values do not stand where they are used, or are nested as no plan is.

    A few lines of aliases can stand for gigabytes; and an alias within its own value, for no end of it. Events come one
    by one, before anything is made of them.

    Raises:
        PlanError: it has an alias or a merge key, or is nested too deeply.
        yaml.YAMLError: it is not YAML.
    """
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            wrong = f"aliases (*{event.anchor}) are not supported: write the value in each place"
        elif isinstance(event, yaml.ScalarEvent) and event.value == "<<" and event.implicit[0]:
            wrong = "merge keys (<<) are not supported: write the keys in each place"
        elif (depth := depth + _deeper(event)) > DEEPEST:
            wrong = f"mappings and lists are nested more than {DEEPEST} deep"
        else:
            continue
        line = f", line {event.start_mark.line + 1}" if event.start_mark else ""
        raise PlanError(f"{file}{line}: {wrong}")


def _deeper(event: yaml.Event) -> int:
    return isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)


def _walk(node: yaml.Node | None, path: Path_) -> Iterator[tuple[Path_, int]]:
    """Yield (path, line) of every key and list item below ``node``."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = yaml.safe_load(yaml.serialize(key)) if key.tag != "tag:yaml.org,2002:str" else key.value
            yield (*path, name), key.start_mark.line + 1
            yield from _walk(value, (*path, name))
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield (*path, number), item.start_mark.line + 1
            yield from _walk(item, (*path, number))
