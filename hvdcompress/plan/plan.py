"""A plan: which method each tensor gets, from which step on, and which tensors are exchanged together."""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from hvdcompress.method import Method, TensorSpec
from hvdcompress.registry import get


@dataclass(frozen=True)
class Match:
    """Conditions on a tensor. Conditions that are None always hold."""

    name: str | None = None  #: a glob for the parameter's name; case matters
    ndim: int | None = None  #: number of dimensions
    min_size: int | None = None  #: least number of elements
    max_size: int | None = None  #: largest number of elements

    def holds(self, spec: TensorSpec) -> bool:
        """Return whether all conditions hold for a tensor."""
        return (
            (self.name is None or fnmatchcase(spec.name, self.name))
            and (self.ndim is None or len(spec.shape) == self.ndim)
            and (self.min_size is None or spec.size >= self.min_size)
            and (self.max_size is None or spec.size <= self.max_size)
        )

    def __str__(self) -> str:
        conditions = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{key}: {value}" for key, value in conditions.items() if value is not None)


@dataclass(frozen=True)
class Program:
    """The methods of one tensor over the course of training."""

    stages: tuple[tuple[int, Method], ...]  #: (first step, method), ascending, the first from step 0

    def at(self, step: int) -> Method:
        """Return the method in effect at ``step``."""
        return self.stages[self.stage(step)][1]

    def stage(self, step: int) -> int:
        """Return the index of the stage in effect at ``step``."""
        return sum(start <= step for start, _ in self.stages) - 1 if len(self.stages) > 1 else 0

    def since(self, step: int) -> int:
        """Return the first step of the run of stages around ``step`` that have the same method id."""
        if len(self.stages) == 1:  # a shortcut: drivers call this for every tensor in every step
            return 0
        first = step
        for start, method in reversed([stage for stage in self.stages if stage[0] <= step]):
            if method.id != self.at(step).id:
                break
            first = start
        return first

    @property
    def main(self) -> Method:
        """The method of the last stage."""
        return self.stages[-1][1]

    def __str__(self) -> str:
        stages = [(start, in_words(method)) for start, method in self.stages]
        return "; ".join(text if start == 0 else f"from step {start}: {text}" for start, text in stages)


def in_words(method: Method) -> str:
    """A method's id, its density, and what else is not at its default."""
    default = {f.name: f.default for f in fields(method)}
    changed = {k: v for k, v in method.hyperparameters().items() if v != default[k] or k == "density"}
    return " ".join([method.id, *(f"{key}={value}" for key, value in changed.items())])


@dataclass(frozen=True)
class Rule:
    """A program, and the conditions on the tensors that get it."""

    match: Match
    program: Program


@dataclass(frozen=True)
class Bucket:
    """What is exchanged together: one tensor, or several tensors joined in name order."""

    spec: TensorSpec  #: the tensor, or the joined tensor of one dimension
    members: tuple[TensorSpec, ...]  #: the tensors, in name order
    program: Program
    unasked: bool = False  #: joined for speed alone: each tensor gets what it would get alone

    def apart(self, method: Method) -> bool:
        """Whether the method runs on each tensor, and only their payloads travel together."""
        return self.unasked and method.granularity != "part"

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """(start, stop) of each member in the joined vector."""
        stops = itertools.accumulate(member.size for member in self.members)
        return [(stop - member.size, stop) for stop, member in zip(stops, self.members, strict=True)]


DENSE = Program(((0, get("none")),))


@dataclass(frozen=True)
class Grouping:
    """Which tensors travel together where the plan does not say ``bucket_elements``.

    Attributes:
        joined: elements below which tensors are joined, and of a group that is full.
        apart: the same where the method runs on each tensor, and a group saves its collectives alone.
        dense: whether tensors that are sent uncompressed are joined, too.
    """

    joined: int
    apart: int
    dense: bool


FULL = 6_500_000  #: elements of a group: the 25 MB after which DistributedDataParallel closes a bucket, too
#: Collectives go by name, and the network joins small ones.
BY_NAME = Grouping(joined=FULL, apart=150_000, dense=False)
#: One collective after another: each costs a round through all ranks, whatever its size.
IN_ORDER = Grouping(joined=FULL, apart=FULL, dense=True)


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key of a name in which numbers count as such: "layer.9" comes before "layer.10", as in the model."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d+)", name)] + [(-2, name)]


@dataclass(frozen=True)
class Plan:
    """Which method each tensor gets, from which step on. Made by :func:`hvdcompress.load`."""

    program: Program  #: of tensors that no rule matches
    rules: tuple[Rule, ...] = ()  #: the first that matches applies
    min_elements: int = 1024  #: smaller tensors are sent uncompressed
    bucket_elements: int | None = None  #: smaller tensors are joined into buckets (0 means none)
    seed: int = 0  #: of the methods' random numbers
    watchdog: bool = True  #: whether a step that waits too long is reported and ended
    warn_after: int = 120  #: seconds after which a step that waits is reported, with the missing ranks; 0: never
    end_after: int | None = None  #: seconds after which it ends; 0: never; None: 1800, or the process group's timeout
    verify_every: int = 0  #: steps from one comparison of the ranks' parameters and shared state to the next; 0: never
    clip_norm: float | None = None  #: norm that the reduced gradient of all tensors is clipped to; inf: measured only
    fallback: bool = False  #: whether compression is given up if the first steps show that it does not save time
    cosine_every: int = 0  #: steps from one comparison with the uncompressed average to the next; 0: never
    without_beta1: bool = False  #: whether beta1 of Adam and its relatives is set to 0 in optimizers that are given
    source: str = "{}"  #: what the plan was read from, with defaults filled in, as JSON

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dict that :func:`hvdcompress.load` reads: ``load(plan.to_dict()) == plan``."""
        return read_source(self.source)

    @cached_property
    def fingerprint(self) -> int:
        """A 32-bit hash, for ranks to check that they run the same plan."""
        return zlib.crc32(self.source.encode())

    def program_of(self, spec: TensorSpec) -> Program:
        """Return the program of the first rule that matches, or the default. ``min_elements`` is not considered."""
        rule = self._rule_of(spec)
        return rule.program if rule else self.program

    def idle_rules(self, specs: Iterable[TensorSpec]) -> list[Rule]:
        """Return the rules that apply to none of these tensors: none matches, or an earlier rule has all that do."""
        applied = [self._rule_of(spec) for spec in specs]
        return [rule for rule in self.rules if not any(rule is one for one in applied)]

    def _rule_of(self, spec: TensorSpec) -> Rule | None:
        return next((rule for rule in self.rules if rule.match.holds(spec)), None)

    @cached_property
    def stateless(self) -> bool:
        """Whether no tensor has anything that is kept from step to step."""
        programs = [self.program, *(rule.program for rule in self.rules)]
        stages = [stage for program in programs for stage in program.stages]
        spec = TensorSpec("any", (8, 8, 3, 3))
        alone = len(stages) == len(programs)
        return alone and all(method.feedback == "none" and not method.state(spec) for _, method in stages)

    def buckets(
        self,
        specs: Iterable[TensorSpec],
        grouping: Grouping | None = None,
        ages: Mapping[str, object] | None = None,
    ) -> list[Bucket]:
        """Group tensors into buckets that are exchanged together.

        Joined are tensors of fewer than ``bucket_elements`` elements with the same program and dtype, until the bucket
        has that size. If the method does not suit a bucket (a vector), only those of its tensors that are sent
        uncompressed are joined. A method whose ``scope`` is "global" gets all its tensors of one dtype in one
        bucket. Buckets of fewer than ``min_elements`` elements, and those whose shape the method does not suit, are
        sent uncompressed.

        Where the plan does not say ``bucket_elements``, tensors travel together by ``grouping``, and each gets what it
        would get alone.

        Args:
            specs: the tensors, in any order.
            grouping: the network's, if these tensors come together in every step. None: they stay alone.
            ages: where tensors are in their programs, if not all have come as often; only equal ones are joined.

        Returns:
            The buckets, sorted by name.

        Raises:
            ValueError: a tensor has the name of a bucket: it ends in "+" and a number.
        """
        specs = list(specs)
        for spec in specs:
            if re.search(r"\+\d+$", spec.name):
                raise ValueError(f"{spec.name!r} cannot be a tensor's name: a group's name ends in + and a number")
        buckets: list[Bucket] = []
        open_buckets: dict[tuple[Program, str, object], list[TensorSpec]] = {}
        ages = ages or {}

        def close(key: tuple[Program, str, object]) -> None:
            buckets.append(self._bucket(open_buckets.pop(key), key[0]))

        by = (grouping or Grouping(0, 0, False)) if self.bucket_elements is None else None
        most = by.joined if by else self.bucket_elements or 0
        for spec in sorted(specs, key=lambda s: natural(s.name)):
            key = (self.program_of(spec), spec.dtype, ages.get(spec.name))
            main = key[0].main
            everything = getattr(main, "scope", "tensor") == "global"
            joins = main.id != "none"
            if by and (not joins or self._goes_dense(spec, main)) and not everything:
                joins = by.dense
                key = (DENSE if joins and self._goes_dense(spec, main) else key[0], *key[1:])
            elif by:
                joins = spec.size < by.apart or all(method.granularity == "part" for _, method in key[0].stages)
            elif joins and not everything and not main.suits(TensorSpec("bucket", (most,))):
                joins = self._goes_dense(spec, main)
                key = (DENSE if joins else key[0], *key[1:])
            if everything or (spec.size < most and joins):
                open_buckets.setdefault(key, []).append(spec)
                if not everything and sum(s.size for s in open_buckets[key]) >= most:
                    close(key)
            else:
                buckets.append(self._bucket([spec], key[0]))
        for key in list(open_buckets):
            close(key)
        return sorted(buckets, key=lambda bucket: natural(bucket.spec.name))

    def _bucket(self, members: list[TensorSpec], program: Program) -> Bucket:
        spec = members[0]
        unasked = len(members) > 1 and self.bucket_elements is None and getattr(program.main, "scope", "") != "global"
        if len(members) > 1:
            sizes = tuple(member.size for member in members)
            spec = TensorSpec(f"{spec.name}+{len(members) - 1}", (sum(sizes),), spec.dtype, joined=sizes)
        dense = not unasked and self._goes_dense(spec, program.main)
        return Bucket(spec, tuple(members), DENSE if dense else program, unasked)

    def _goes_dense(self, spec: TensorSpec, method: Method) -> bool:
        return spec.size < self.min_elements or not method.suits(spec)


def read_source(source: str) -> dict[str, Any]:
    """Return the dict that a plan's ``source`` has as JSON."""
    return json.loads(source, object_hook=_number_keys)


def _number_keys(mapping: dict[str, Any]) -> dict[Any, Any]:
    """Turn keys back into numbers: JSON writes them as text, and a schedule has steps as keys."""

    def number(key: str) -> Any:
        try:
            return int(key) if key.isdigit() else float(key)
        except ValueError:
            return key

    return {number(key): value for key, value in mapping.items()}
