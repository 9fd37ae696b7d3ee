"""A plan: which method each tensor uses in which steps, and how tensors are grouped into buckets."""

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
from hvdcompress.registry import get_method


@dataclass(frozen=True)
class Match:
    """Conditions on a tensor. A condition that is None always holds."""

    name: str | None = None  #: glob pattern for the name of the parameter, case-sensitive
    ndim: int | None = None  #: number of dimensions
    min_size: int | None = None  #: minimum number of elements
    max_size: int | None = None  #: maximum number of elements

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

    periods: tuple[tuple[int, Method], ...]  #: (first step, method), ascending; the first period starts at step 0

    def at(self, step: int) -> Method:
        """Return the method in effect at ``step``."""
        return self.periods[self.period(step)][1]

    def period(self, step: int) -> int:
        """Return the index of the period in effect at ``step``."""
        return sum(start <= step for start, _ in self.periods) - 1 if len(self.periods) > 1 else 0

    def since(self, step: int) -> int:
        """Return the first step of the consecutive periods around ``step`` that use the same method id."""
        if len(self.periods) == 1:  # fast path: drivers call this for every tensor in every step
            return 0
        changes = (now[0] for before, now in itertools.pairwise(self.periods) if before[1].id != now[1].id)
        return max((start for start in changes if start <= step), default=0)

    @property
    def main(self) -> Method:
        """The method of the last period."""
        return self.periods[-1][1]

    def __str__(self) -> str:
        periods = [(start, describe_method(method)) for start, method in self.periods]
        return "; ".join(text if start == 0 else f"from step {start}: {text}" for start, text in periods)


def describe_method(method: Method) -> str:
    """Return a method as text: its id, its density, and the hyper-parameters that differ from their defaults.

    Those that all methods have come last.
    """
    default = {f.name: f.default for f in fields(method)}
    changed = {k: v for k, v in method.hyperparameters().items() if v != default[k] or k == "density"}
    common = {f.name for f in fields(Method)}
    changed = dict(sorted(changed.items(), key=lambda item: item[0] in common))
    return " ".join([method.id, *(f"{key}={value}" for key, value in changed.items())])


@dataclass(frozen=True)
class Rule:
    """A program, and the conditions on the tensors that use it."""

    match: Match
    program: Program


@dataclass(frozen=True)
class Bucket:
    """Tensors that are exchanged in one go: one tensor, or several in the order of their names."""

    spec: TensorSpec  #: the spec of the tensor, or of the concatenated one-dimensional vector
    members: tuple[TensorSpec, ...]  #: the tensors, in the order of their names
    program: Program
    automatic: bool = False  #: grouped only for speed: the result of each tensor is the same as without grouping

    def runs_per_tensor(self, method: Method) -> bool:
        """Return whether the method runs on each tensor, so that only the payloads are combined."""
        return self.automatic and method.granularity != "part"

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """(start, stop) of each member in the concatenated vector."""
        stops = itertools.accumulate(member.size for member in self.members)
        return [(stop - member.size, stop) for stop, member in zip(stops, self.members, strict=True)]


DENSE = Program(((0, get_method("none")),))


@dataclass(frozen=True)
class Grouping:
    """Rules for automatic buckets, used if the plan does not set ``bucket_elements``.

    Attributes:
        bucket_elements: tensors with fewer elements are grouped, until a bucket has this size.
        per_tensor_elements: the same limit for methods that run on each tensor, where a bucket saves only collectives.
        dense: whether uncompressed tensors are grouped, too.
    """

    bucket_elements: int
    per_tensor_elements: int
    dense: bool


FULL = 6_500_000  #: elements of a bucket: 25 MB in float32, the size of DistributedDataParallel's buckets
#: For networks that match collectives by name and fuse small ones
BY_NAME = Grouping(bucket_elements=FULL, per_tensor_elements=150_000, dense=False)
#: For networks that run collectives in order: each of them costs a round through all ranks, whatever its size
IN_ORDER = Grouping(bucket_elements=FULL, per_tensor_elements=FULL, dense=True)


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares numbers in names by value: "layer.9" precedes "layer.10", as in the model."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d+)", name)] + [(-2, name)]


@dataclass(frozen=True)
class Plan:
    """Which method each tensor uses, from which step on. :func:`hvdcompress.load_plan` creates plans."""

    program: Program  #: for tensors that no rule matches
    rules: tuple[Rule, ...] = ()  #: the first rule that matches a tensor applies
    min_elements: int = 1024  #: smaller tensors are sent uncompressed
    bucket_elements: int | None = None  #: smaller tensors are grouped into buckets; 0: none; None: the driver decides
    seed: int = 0  #: seed of the methods' random numbers
    watchdog: bool = True  #: whether to report and end steps that wait too long
    warn_after: int = 120  #: seconds after which a waiting step is reported, with the missing ranks; 0: never
    end_after: int | None = None  #: seconds after which it ends; 0: never; None: 1800, or the process group's timeout
    verify_every: int = 0  #: interval in steps between comparisons of the ranks' parameters and shared state; 0: never
    fallback: bool = False  #: whether to give up compression if the first steps show that it saves no time
    nodes: int | str = 0  #: number of nodes for an exchange with two levels; "auto": ask the launcher; 0: one level
    source: str = "{}"  #: the plan as JSON, with defaults filled in

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dict, such that ``load_plan(plan.to_dict()) == plan``."""
        return json.loads(self.source, object_hook=_number_keys)

    @cached_property
    def fingerprint(self) -> int:
        """A 32-bit hash, with which ranks check that they use the same plan."""
        return zlib.crc32(self.source.encode())

    def program_of(self, spec: TensorSpec) -> Program:
        """Return the program of the first matching rule, or the default program. ``min_elements`` is not applied."""
        rule = self._rule_of(spec)
        return rule.program if rule else self.program

    def unused_rules(self, specs: Iterable[TensorSpec]) -> list[Rule]:
        """Return the rules that apply to none of these tensors: none matches, or an earlier rule does."""
        applied = [self._rule_of(spec) for spec in specs]
        return [rule for rule in self.rules if not any(rule is one for one in applied)]

    def _rule_of(self, spec: TensorSpec) -> Rule | None:
        return next((rule for rule in self.rules if rule.match.holds(spec)), None)

    @property
    def methods(self) -> list[Method]:
        """The methods of all periods: of tensors to which no rule applies, then of each rule."""
        programs = [self.program, *(rule.program for rule in self.rules)]
        return [method for program in programs for _, method in program.periods]

    @cached_property
    def stateless(self) -> bool:
        """Whether no tensor has state from step to step."""
        spec = TensorSpec("any", (8, 8, 3, 3))
        single_stage = len(self.methods) == 1 + len(self.rules)
        return single_stage and all(method.feedback == "none" and not method.state(spec) for method in self.methods)

    def buckets(
        self,
        specs: Iterable[TensorSpec],
        grouping: Grouping | None = None,
        ages: Mapping[str, object] | None = None,
    ) -> list[Bucket]:
        """Group tensors into buckets that are exchanged in one go.

        With ``bucket_elements``, tensors with fewer elements are grouped if they have the same program and dtype, until
        the bucket has that size. If the method does not support a bucket (a vector), only tensors that are sent
        uncompressed are grouped. A method whose ``scope`` is "global" gets all its tensors of one dtype in one bucket.
        Buckets that have fewer than ``min_elements`` elements, or a shape that the method does not support, are sent
        uncompressed.

        Without ``bucket_elements``, tensors are grouped by ``grouping``, and the result of each tensor is the same as
        without grouping.

        Args:
            specs: the tensors, in any order.
            grouping: the rules of the network, if these tensors are exchanged in every step; None: no grouping.
            ages: {tensor name: progress}, if it differs between tensors. Only tensors of equal age are grouped.

        Returns:
            The buckets, sorted by name.

        Raises:
            ValueError: the name of a tensor looks like that of a bucket: it ends in "+" and a number.
        """
        specs = list(specs)
        for spec in specs:
            if re.search(r"\+\d+$", spec.name):
                raise ValueError(f"tensor {spec.name!r}: a name that ends in + and a number is reserved for buckets")
        buckets: list[Bucket] = []
        open_buckets: dict[tuple[Program, str, object], list[TensorSpec]] = {}
        ages = ages or {}
        rules = (grouping or Grouping(0, 0, False)) if self.bucket_elements is None else None
        limit = rules.bucket_elements if rules else self.bucket_elements or 0
        for spec in sorted(specs, key=lambda s: natural_key(s.name)):
            program, may_share = self._program_in_bucket(spec, rules, limit)
            key = (program, spec.dtype, ages.get(spec.name))
            unlimited = _is_global(program.main)
            if unlimited or (may_share and spec.size < limit):
                open_buckets.setdefault(key, []).append(spec)
                if not unlimited and sum(s.size for s in open_buckets[key]) >= limit:
                    buckets.append(self._bucket(open_buckets.pop(key), program))
            else:
                buckets.append(self._bucket([spec], program))
        buckets += [self._bucket(members, key[0]) for key, members in open_buckets.items()]
        return sorted(buckets, key=lambda bucket: natural_key(bucket.spec.name))

    def _program_in_bucket(self, spec: TensorSpec, rules: Grouping | None, limit: int) -> tuple[Program, bool]:
        """Return the program of a tensor, and whether it may share a bucket with other tensors.

        Args:
            spec: the tensor.
            rules: the rules for automatic buckets; None if the plan sets ``bucket_elements``.
            limit: elements of a full bucket.
        """
        program = self.program_of(spec)
        if _is_global(program.main):
            return program, True
        is_dense = self._goes_dense(spec, program.main)
        if rules is None:
            if program.main.id == "none":
                return program, False
            if program.main.suits(TensorSpec("bucket", (limit,))):
                return program, True
            # The method does not support vectors, so only tensors that are uncompressed anyway can be grouped
            may_share = is_dense
        elif is_dense or program.main.id == "none":
            may_share = rules.dense
        else:
            runs_on_parts = all(method.granularity == "part" for _, method in program.periods)
            return program, runs_on_parts or spec.size < rules.per_tensor_elements
        return DENSE if is_dense and may_share else program, may_share

    def _bucket(self, members: list[TensorSpec], program: Program) -> Bucket:
        spec = members[0]
        automatic = len(members) > 1 and self.bucket_elements is None and not _is_global(program.main)
        if len(members) > 1:
            size = sum(member.size for member in members)
            spec = TensorSpec(f"{spec.name}+{len(members) - 1}", (size,), spec.dtype, members=tuple(members))
        dense = not automatic and self._goes_dense(spec, program.main)
        return Bucket(spec, tuple(members), DENSE if dense else program, automatic)

    def _goes_dense(self, spec: TensorSpec, method: Method) -> bool:
        return spec.size < self.min_elements or not method.suits(spec)


def _is_global(method: Method) -> bool:
    """Return whether a method needs all its tensors in one bucket."""
    return getattr(method, "scope", "tensor") == "global"


def _number_keys(mapping: dict[str, Any]) -> dict[Any, Any]:
    """Convert keys back to numbers. JSON writes them as text, and a schedule has steps as keys."""

    def number(key: str) -> Any:
        try:
            return int(key) if key.isdigit() else float(key)
        except ValueError:
            return key

    return {number(key): value for key, value in mapping.items()}
