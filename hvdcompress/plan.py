"""Plans: which method each tensor gets, with which hyper-parameters, from which step on.

A plan is written in YAML (or as a dict with the same keys)::

    method: scalecom            # the default method ...
    density: 0.01               # ... and its hyper-parameters, beside it
    beta: 0.1
    warmup: {epochs: 5}         # dense until then; or {steps: 500}
    schedule:                   # any hyper-parameter, by steps or by epochs
      density: {epochs: {0: 0.015625, 6: 0.004, 8: 0.001}}      # see schedule.py for another way
    steps_per_epoch: 391        # needed where epochs are spoken of
    min_elements: 1024          # smaller tensors go dense
    bucket_elements: 0          # tensors smaller than this are joined into buckets; 0: off
    seed: 0
    rules:                      # the first that matches a tensor wins
      - match: {name: "conv1.*"}            # a glob
        method: none
      - match: {ndim: 4, min_size: 100000}  # all given conditions must hold
        density: 0.004                      # no method: the default one, with this changed

Unknown keys, wrong types and values out of range are :class:`PlanError`, which names key and line.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from hvdcompress import schedule
from hvdcompress.method import Method, TensorSpec
from hvdcompress.registry import FieldError, classes, get, suggest
from hvdcompress.yamlfile import Document, PlanError

__all__ = ["Plan", "PlanError", "Program", "Rule", "Unit", "load", "plan_of"]


@dataclass(frozen=True)
class Match:
    """Conditions on a tensor; those that are None always hold."""

    name: str | None = None
    ndim: int | None = None
    min_size: int | None = None
    max_size: int | None = None

    def holds(self, spec: TensorSpec) -> bool:
        """Whether all conditions hold; ``name`` is a case-sensitive glob."""
        return (
            (self.name is None or fnmatchcase(spec.name, self.name))
            and (self.ndim is None or len(spec.shape) == self.ndim)
            and (self.min_size is None or spec.size >= self.min_size)
            and (self.max_size is None or spec.size <= self.max_size)
        )


@dataclass(frozen=True)
class Program:
    """The methods that one tensor goes through: ``stages`` are (first step, method), ascending from step 0."""

    stages: tuple[tuple[int, Method], ...]

    def at(self, step: int) -> Method:
        """The method that is on at ``step``."""
        return self.stages[self.stage(step)][1]

    def stage(self, step: int) -> int:
        """The number of the stage that is on at ``step``."""
        return sum(start <= step for start, _ in self.stages) - 1 if len(self.stages) > 1 else 0

    def since(self, step: int) -> int:
        """The step from which on the method's id has been the one that is on at ``step``."""
        if len(self.stages) == 1:  # asked of every tensor in every step
            return 0
        first = step
        for start, method in reversed([stage for stage in self.stages if stage[0] <= step]):
            if method.id != self.at(step).id:
                break
            first = start
        return first

    @property
    def main(self) -> Method:
        """The last stage's method: what the plan is about."""
        return self.stages[-1][1]

    def __str__(self) -> str:
        words = []
        for start, method in self.stages:
            default = {f.name: f.default for f in fields(method)}
            changed = {k: v for k, v in method.hyperparameters().items() if v != default[k] or k == "density"}
            text = " ".join([method.id, *(f"{key}={value}" for key, value in changed.items())])
            words.append(text if start == 0 else f"from step {start}: {text}")
        return "; ".join(words)


@dataclass(frozen=True)
class Rule:
    """A match and the program of the tensors it holds for."""

    match: Match
    program: Program


@dataclass(frozen=True)
class Unit:
    """What is exchanged in one go: one tensor, or a bucket of several joined in name order."""

    spec: TensorSpec
    members: tuple[TensorSpec, ...]
    program: Program


DENSE = Program(((0, get("none")),))


@dataclass(frozen=True)
class Plan:
    """A resolved plan; ``source`` is the dict it was read from, with defaults filled in."""

    program: Program
    rules: tuple[Rule, ...] = ()
    min_elements: int = 1024
    bucket_elements: int = 0
    seed: int = 0
    source: str = "{}"

    def to_dict(self) -> dict[str, Any]:
        """The plan as :func:`load` reads it; ``load(plan.to_dict()) == plan``."""
        return json.loads(self.source, object_hook=_number_keys)

    @cached_property
    def fingerprint(self) -> int:
        """32-bit hash, by which ranks see whether they run the same plan."""
        return zlib.crc32(self.source.encode())

    def program_of(self, spec: TensorSpec) -> Program:
        """The program of one tensor, by the first rule that matches; its size is not looked at."""
        return next((rule.program for rule in self.rules if rule.match.holds(spec)), self.program)

    def units(self, specs: Iterable[TensorSpec]) -> list[Unit]:
        """The tensors sorted by name and grouped into what is exchanged together.

        Joined are: tensors below ``bucket_elements`` that have the same program, up to that size, if the method suits
        a bucket; if not, those of them that go dense; and all tensors of a method whose ``scope`` is "global". What
        then is below ``min_elements``, or of a shape that its method does not suit, goes dense.
        """
        units: list[Unit] = []
        open_units: dict[tuple[Program, str], list[TensorSpec]] = {}

        def close(key: tuple[Program, str]) -> None:
            units.append(self._unit(open_units.pop(key), key[0]))

        for spec in sorted(specs, key=lambda s: s.name):
            key = (self.program_of(spec), spec.dtype)
            main = key[0].main
            everything = getattr(main, "scope", "tensor") == "global"
            joins = main.id != "none"
            if joins and not everything and not main.suits(TensorSpec("bucket", (self.bucket_elements,))):
                joins = self._goes_dense(spec, main)
                key = (DENSE if joins else key[0], spec.dtype)
            if everything or (spec.size < self.bucket_elements and joins):
                open_units.setdefault(key, []).append(spec)
                if not everything and sum(s.size for s in open_units[key]) >= self.bucket_elements:
                    close(key)
            else:
                units.append(self._unit([spec], key[0]))
        for key in list(open_units):
            close(key)
        return sorted(units, key=lambda unit: unit.spec.name)

    def _unit(self, members: list[TensorSpec], program: Program) -> Unit:
        spec = members[0]
        if len(members) > 1:
            spec = TensorSpec(f"{spec.name}+{len(members) - 1}", (sum(s.size for s in members),), spec.dtype)
        return Unit(spec, tuple(members), DENSE if self._goes_dense(spec, program.main) else program)

    def _goes_dense(self, spec: TensorSpec, method: Method) -> bool:
        return spec.size < self.min_elements or not method.suits(spec)


def _number_keys(mapping: dict[str, Any]) -> dict[Any, Any]:
    """JSON has no numbers for keys, and a schedule's starts are numbers."""

    def number(key: str) -> Any:
        try:
            return int(key) if key.isdigit() else float(key)
        except ValueError:
            return key

    return {number(key): value for key, value in mapping.items()}


PLAN_KEYS = ("rules", "min_elements", "bucket_elements", "steps_per_epoch", "seed")
WHOLE = {"min_elements": 1024, "bucket_elements": 0, "seed": 0}  # whole numbers and their defaults
RULE_KEYS = ("method", "warmup", "schedule")
MATCH_KEYS = ("name", "ndim", "min_size", "max_size")


def load(source: str | Path | Mapping[str, Any]) -> Plan:
    """The plan in a YAML file, or in a dict with the same keys.

    Raises:
        PlanError: (a ``ValueError``) the message names the key, what is wrong with it and, for a file, the line.
        FileNotFoundError: there is no such file.
    """
    return _read(Document.open(source))


def plan_of(method: str | Method | Plan | Mapping[str, Any], **settings: Any) -> Plan:
    """What drivers take: a method id with hyper-parameters, a Method, a Plan or a plan's dict; ``settings`` override.

    Raises:
        ValueError: as :func:`load`; or settings were given that contradict a Plan.
    """
    if isinstance(method, Plan):
        return load({**method.to_dict(), **settings}) if settings else method
    if isinstance(method, Method):
        if classes().get(method.id) is not type(method):
            return _unregistered(method, settings)
        method = {"method": method.id, **method.hyperparameters()}
    return load({**(method if isinstance(method, Mapping) else {"method": method}), **settings})


def _unregistered(method: Method, settings: dict[str, Any]) -> Plan:
    """A plan of one method that no registry knows, such as one under development."""
    doc = Document({**settings})
    doc.known_keys(tuple(WHOLE))
    whole = {key: doc.whole(key, default, least=0) for key, default in WHOLE.items()}
    source = {"method": method.id or type(method).__qualname__, **method.hyperparameters(), **whole}
    return Plan(Program(((0, method),)), source=json.dumps(source, sort_keys=True, default=str), **whole)


def _read(doc: Document) -> Plan:
    if "method" not in doc.value:
        raise doc.error("method", "is missing: a plan names its default method")
    steps_per_epoch = doc.whole("steps_per_epoch", None, least=1)
    default_body = doc.without(*PLAN_KEYS)
    program, default = _program(default_body, {}, steps_per_epoch)
    filled = {**default, **get(default["method"], **_settings(default)).hyperparameters()}
    rules = []
    for body in doc.items("rules"):
        if "match" not in body.value:
            raise body.error("match", "is missing: a rule says which tensors it is for")
        match = body.child("match")
        match.known_keys(MATCH_KEYS)
        sizes = {key: match.whole(key, None, least=0) for key in MATCH_KEYS[1:]}
        own, inherited = body.without("match"), {} if "method" in body.value else default
        rules.append(Rule(Match(match.text("name"), **sizes), _program(own, inherited, steps_per_epoch)[0]))
    whole = {key: doc.whole(key, default, least=0) for key, default in WHOLE.items()}
    source = json.dumps({**doc.value, **filled, **whole}, sort_keys=True)
    return Plan(program=program, rules=tuple(rules), source=source, **whole)


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in RULE_KEYS}


def _program(body: Document, inherited: dict[str, Any], steps_per_epoch: int | None) -> tuple[Program, dict[str, Any]]:
    """The program that a plan's or a rule's keys describe, and its keys, for rules to inherit."""
    given = {**inherited, **body.value}
    method = _method(body, given["method"], _settings(given))
    stages = {0: method}
    for start, change in schedule.changes(body, given.get("schedule"), method, steps_per_epoch).items():
        earlier = stages[max(s for s in stages if s <= start)]
        stages[start] = replace(earlier, **change)
    if given.get("warmup") is not None:
        until = schedule.duration(body.child("warmup", given["warmup"]), steps_per_epoch)
        after = stages[max(s for s in stages if s <= until)]
        stages = {s: m for s, m in stages.items() if s > until}
        if until > 0:
            stages[0] = get("none")
        stages[until] = after
    return Program(tuple(sorted(stages.items(), key=lambda stage: stage[0]))), given


def _method(body: Document, id: Any, settings: dict[str, Any]) -> Method:
    for key in settings:
        if not isinstance(key, str):
            raise body.error(key, "unknown key: hyper-parameters have names")
    try:
        return get(id, **settings)
    except FieldError as error:
        key = error.field if error.field in body.value else "method"
        hint = suggest(error.field, [*PLAN_KEYS, *RULE_KEYS])
        also = f"{hint.replace('did you mean', 'or the plan key')}" if error.field in settings else ""
        raise body.error(key, f"{error}{also}") from None
