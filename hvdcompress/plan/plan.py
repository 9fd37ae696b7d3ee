"""A plan: which method each tensor gets, from which step on, and which tensors are exchanged together."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from hvdcompress.method import Method, TensorSpec
from hvdcompress.registry import get


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
class Bucket:
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

    def buckets(self, specs: Iterable[TensorSpec]) -> list[Bucket]:
        """The tensors sorted by name and grouped into what is exchanged together.

        Joined are: tensors below ``bucket_elements`` that have the same program, up to that size, if the method suits
        a bucket; if not, those of them that go dense; and all tensors of a method whose ``scope`` is "global". What
        then is below ``min_elements``, or of a shape that its method does not suit, goes dense.
        """
        buckets: list[Bucket] = []
        open_buckets: dict[tuple[Program, str], list[TensorSpec]] = {}

        def close(key: tuple[Program, str]) -> None:
            buckets.append(self._bucket(open_buckets.pop(key), key[0]))

        for spec in sorted(specs, key=lambda s: s.name):
            key = (self.program_of(spec), spec.dtype)
            main = key[0].main
            everything = getattr(main, "scope", "tensor") == "global"
            joins = main.id != "none"
            if joins and not everything and not main.suits(TensorSpec("bucket", (self.bucket_elements,))):
                joins = self._goes_dense(spec, main)
                key = (DENSE if joins else key[0], spec.dtype)
            if everything or (spec.size < self.bucket_elements and joins):
                open_buckets.setdefault(key, []).append(spec)
                if not everything and sum(s.size for s in open_buckets[key]) >= self.bucket_elements:
                    close(key)
            else:
                buckets.append(self._bucket([spec], key[0]))
        for key in list(open_buckets):
            close(key)
        return sorted(buckets, key=lambda bucket: bucket.spec.name)

    def _bucket(self, members: list[TensorSpec], program: Program) -> Bucket:
        spec = members[0]
        if len(members) > 1:
            spec = TensorSpec(f"{spec.name}+{len(members) - 1}", (sum(s.size for s in members),), spec.dtype)
        return Bucket(spec, tuple(members), DENSE if self._goes_dense(spec, program.main) else program)

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
