"""YAML mappings that know the line of each key, so that error messages name the key and the line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hvdcompress.registry import suggest

Path_ = tuple[str | int, ...]
MAX_DEPTH = 20  #: nested mappings and lists; plans and experiments have at most 5


class PlanError(ValueError):
    """A plan or an experiment is invalid. The message names the file, the line and the key."""


class Document:
    """A mapping in a YAML file, or a dict, that knows the line of each of its keys.

    Args:
        value: the mapping.
        path: the keys that lead to this mapping from the top of the file.
        lines: {path: line number in the file}; empty for a dict.
        file: name of the file; empty for a dict.

    Raises:
        PlanError: ``value`` is not a mapping.
    """

    def __init__(self, value: Any, path: Path_ = (), lines: dict[Path_, int] | None = None, file: str = ""):
        self.path = path
        self.lines = lines or {}
        self.file = file
        if not isinstance(value, Mapping):
            raise self.error(None, f"must be a mapping of keys to values, not {value!r}")
        self.value: dict[Any, Any] = dict(value)

    @classmethod
    def open(cls, source: str | Path | Mapping[str, Any]) -> Document:
        """Create a document from a YAML file or from a dict.

        Args:
            source: path of the file, or a dict.

        Raises:
            PlanError: the file is not a YAML mapping, repeats a key, has an alias or a merge key, or is nested too
                deeply.
            FileNotFoundError: the file does not exist.
        """
        if isinstance(source, Mapping):
            return cls(source)
        file = str(source)
        try:
            text = Path(source).read_text(encoding="utf-8")
            _check_syntax(text, file)
            keys = list(_walk(yaml.compose(text), ()))
            value = yaml.safe_load(text)
        except PlanError:
            raise
        except (yaml.YAMLError, ValueError) as error:  # ValueError: for example a date that does not exist
            raise PlanError(f"{file}: is not valid YAML: {error}") from None
        lines: dict[Path_, int] = {}
        for path, line in keys:
            if path in lines:
                raise PlanError(f"{file}, line {line}: key {path[-1]} is repeated (first in line {lines[path]})")
            lines[path] = line
        return cls(value if value is not None else {}, (), lines, file)

    def error(self, key: Any, message: str) -> PlanError:
        """Return an error about a key, with its file and line.

        Args:
            key: the key; None for the mapping as a whole.
            message: the problem.
        """
        path = self.path if key is None else (*self.path, key)
        line = next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), None)
        where = ", ".join(filter(None, [self.file, f"line {line}" if line else ""]))
        name = ".".join(str(part) for part in path)
        return PlanError(": ".join(filter(None, [where, name, message])))

    def without(self, *keys: str) -> Document:
        """Return a copy without these keys."""
        rest = {key: value for key, value in self.value.items() if key not in keys}
        return Document(rest, self.path, self.lines, self.file)

    def child(self, key: Any, value: Any = None) -> Document:
        """Return the mapping under ``key``, or ``value`` instead of it."""
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
        """Raise :class:`PlanError` if the mapping has any other key."""
        for key in self.value:
            if key not in known:
                hint = suggest(str(key), list(known))
                raise self.error(key, f"unknown key{hint}; known keys: {', '.join(known)}")

    def integer(self, key: str, default: Any, least: int) -> Any:
        """Return the integer under ``key``, or ``default``. Raise :class:`PlanError` if it is less than ``least``."""
        value = self.value.get(key, default)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise self.error(key, f"{value!r} must be a whole number, {least} or more")
        return value

    def text(self, key: str) -> str | None:
        """Return the text under ``key``; None if the key is absent."""
        value = self.value.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, f"{value!r} must be text")
        return value


def _check_syntax(text: str, file: str) -> None:
    """Check that YAML has no aliases, no merge keys and no excessive nesting.

    A few lines of aliases can expand to gigabytes, and an alias inside its own value to infinite data. The parser's
    events are checked one by one, before any data is created.

    Raises:
        PlanError: the text has an alias or a merge key, or is nested too deeply.
        yaml.YAMLError: the text is not YAML.
    """
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            wrong = f"aliases (*{event.anchor}) are not supported; repeat the value instead"
        elif isinstance(event, yaml.ScalarEvent) and event.value == "<<" and event.implicit[0]:
            wrong = "merge keys (<<) are not supported; repeat the keys instead"
        elif depth > MAX_DEPTH:
            wrong = f"mappings and lists are nested more than {MAX_DEPTH} levels deep"
        else:
            continue
        line = f", line {event.start_mark.line + 1}" if event.start_mark else ""
        raise PlanError(f"{file}{line}: {wrong}")


def _walk(node: yaml.Node | None, path: Path_) -> Iterator[tuple[Path_, int]]:
    """Yield (path, line number) of every key and list item below ``node``."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = yaml.safe_load(yaml.serialize(key)) if key.tag != "tag:yaml.org,2002:str" else key.value
            yield (*path, name), key.start_mark.line + 1
            yield from _walk(value, (*path, name))
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield (*path, number), item.start_mark.line + 1
            yield from _walk(item, (*path, number))
