"""A benchmark's YAML file: whose gradients, over links of which rates, by which methods and baselines.

``configs/bench/resnet50.yaml`` is an example; the keys are the fields of :class:`Bench`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from experiments import nets
from experiments.attach import DENSE, POWERSGD
from experiments.configfile import NAME, ConfigFile, Entry, MethodEntry, Real
from experiments.report.numbers import number
from experiments.training import gradients as saved
from hvdcompress.cli.numbers import bits_of
from hvdcompress.registry import suggest

Over = Literal["ring", "mpi", "gloo", "ddp", "mpi4py"]
#: What methods are compared with, as KIND WHERE: dense and float16 over each transport, and DDP's PowerSGD of rank 1
BASELINES = tuple(f"{kind} {where}" for where in ("ring", "mpi", "gloo", "ddp") for kind in ("none", "fp16"))
NOOP = "noop ddp"  #: DDP without communication: the lower bound
BASELINES += ("powersgd ddp", NOOP)
LOOPBACK = "loopback"  #: the rate of a benchmark without emulated hosts


def _known(baseline: str) -> str:
    if baseline not in BASELINES:
        raise ValueError(f"unknown{suggest(baseline, list(BASELINES))}; known: {', '.join(BASELINES)}")
    return baseline


def _rate(text: str) -> str:
    if text != LOOPBACK:
        bits_of(text)
    return text


class GradientSet(Entry):
    """Gradients of a net's shapes (random numbers), or saved gradients."""

    named_by = "net"
    net: str | None = None
    """A net in :mod:`experiments.nets`."""
    gradients: str | None = None
    """A file of ``python -m experiments save-gradients``."""
    only: list[str] = Field([], max_length=100)
    """Only tensors whose names match one of these globs; all tensors if the list is empty."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.tensors()
        return self

    def tensors(self) -> nets.Shapes:
        """Return names and shapes of the tensors to exchange.

        Raises:
            ValueError: neither a net nor gradients are given, there is no such file, or no tensor matches.
        """
        if (self.net is None) == (self.gradients is None):
            raise ValueError("give either net or gradients")
        if self.gradients is not None:
            found = {name: tuple(array.shape) for name, array in saved.load(Path(self.gradients))[0][0].items()}
        else:
            found = nets.get(self.net or "")
        kept = {n: s for n, s in found.items() if not self.only or any(fnmatchcase(n, glob) for glob in self.only)}
        if not kept:
            raise ValueError(f"no tensor matches {', '.join(self.only)}; there are {', '.join(list(found)[:5])}, …")
        return kept

    def __str__(self) -> str:
        """Return such as ``resnet50: 161 tensors, 25,557,032 elements, 102 MB``."""
        kept = self.tensors()
        elements = nets.total(kept)
        return f"{self.label}: {len(kept)} tensors, {elements:,} elements, {number(elements * 4e-6)} MB"


class Measured(MethodEntry):
    """A method, as in an experiment, and how it is measured."""

    over: Over = "ring"
    """Horovod over MPI's ring, over MPI with Open MPI's own choice, or over gloo; DDP over gloo; or the MPI driver."""
    two_level: bool = False
    """Exchange with two levels, the hosts being the nodes."""
    alone: int = Field(0, ge=0)
    """Steps that each rank makes without the network before its first exchange, to reach the phase that is to be
    measured (GradiVeQ's dense phase takes hundreds of megabytes on the network)."""


class Contender(NamedTuple):
    """What is measured: its label, the group of ranks that runs it, and what these ranks need to know."""

    label: str
    where: str
    spec: dict[str, Any]

    @property
    def kind(self) -> str:
        """Return "dense" for an uncompressed all-reduce of the framework, "baseline" or "method"."""
        how = self.spec["how"]
        return "method" if not isinstance(how, str) else "dense" if how == DENSE else "baseline"


class Bench(ConfigFile):
    """A checked benchmark."""

    name: str = Field("bench", pattern=NAME)
    hosts: int = Field(4, ge=2, le=64)
    """Emulated hosts."""
    ranks_per_host: int = Field(1, ge=1)
    rates: list[Annotated[str, AfterValidator(_rate)]] = Field(["100mbit", "1gbit"], min_length=1)
    """Of their links; "loopback": no emulated hosts."""
    awake: bool = False
    """Whether the ranks of other transports run while a contender is measured, and all of them on any core. By default
    the others are stopped (SIGSTOP), and hosts keep to their share of the cores: Horovod and MPI poll even while they
    wait, and take CPU time from the ranks that compute."""
    device: Literal["cpu", "cuda"] = "cpu"
    """"cuda": gradients are on a GPU, which all ranks share; collectives use NCCL's sockets. Over ddp only."""
    rounds: int = Field(3, ge=1)
    repeats: int = Field(5, ge=1)
    """Exchanges in a turn, at most. The first one counts only if it is the only one."""
    seconds: Real = Field(2.0, ge=0)
    """A turn ends with the exchange that makes it last so long."""
    sets: list[GradientSet] = Field(min_length=1)
    methods: list[Measured] = Field(min_length=1)
    baselines: list[Annotated[str, AfterValidator(_known)]] = Field(list(BASELINES))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if twice := {entry.label for entry in self.methods} & set(self.baselines):
            raise ValueError(f"methods: {twice.pop()!r} is a baseline, too: give it a label: of its own")
        if self.device == "cuda" and any(contender.where != "ddp" for contender in self.contenders()):
            raise ValueError("device: cuda: methods and baselines must be over ddp")
        return self

    def contenders(self) -> list[Contender]:
        """Return the contenders, in the order of the tables."""
        found = []
        for name in self.baselines:
            kind, where = name.split()
            how = {"none": DENSE, "powersgd": f"{POWERSGD}1"}.get(kind, kind)
            found.append(Contender(name, where, {"how": how, "warm_up": 3 if kind == "powersgd" else 1}))
        for entry in self.methods:
            settings = entry.settings | ({"nodes": self.hosts} if entry.two_level else {})
            found.append(Contender(entry.label, entry.over, {"how": settings, "warm_up": 3, "alone": entry.alone}))
        return found

    def override(self, methods: Sequence[str] = (), sets: Sequence[str] = (), **changes: Any) -> Bench:
        """Return a copy with the options of the command line: labels to keep, and values of keys, if not empty.

        Raises:
            ValueError: there is no such label, or a value is wrong.
        """
        changes["methods"] = [one.model_dump() for one in self.pick("methods", methods)]
        changes["sets"] = [one.model_dump(exclude_none=True) for one in self.pick("sets", sets)]
        return self.open(self.model_dump() | {key: value for key, value in changes.items() if value})

    def turns(self) -> list[Turn]:
        """Return every turn in the order in which they are taken.

        All contenders have one turn, then all have the next, so that whatever disturbs the machine for a while disturbs
        all of them. Each round begins with another contender.
        """
        found = []
        for rate in self.rates:
            for one in self.sets:
                for round in range(self.rounds):
                    order = self.contenders()
                    first = round * len(order) // self.rounds
                    found += [Turn(rate, one, each, round) for each in order[first:] + order[:first]]
        return found


class Turn(NamedTuple):
    """A few exchanges of one contender, one after the other."""

    rate: str
    set: GradientSet
    contender: Contender
    round: int

    @property
    def key(self) -> dict[str, Any]:
        """Return what identifies the turn among the results."""
        return self._asdict() | {"set": self.set.label, "contender": self.contender.label}

    def __str__(self) -> str:
        return f"{self.contender.label} on {self.set.label} at {self.rate}, round {self.round + 1}"
