"""A benchmark's YAML file: whose gradients, over links of which rates, by which methods and baselines.

``configs/bench/resnet50.yaml`` is an example; the keys are the fields of :class:`Bench`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from experiments import nets
from experiments.cluster.hosts import Hosts
from experiments.cluster.rates import Rate
from experiments.configfile import NAME, ConfigFile, Label, MethodEntry, Real, with_label
from experiments.report.numbers import number
from experiments.training import gradients as saved
from hvdcompress.registry import suggest

__all__ = ["BASELINES", "LOOPBACK", "Bench", "Contender", "Turn"]

Over = Literal["ring", "mpi", "gloo", "ddp", "mpi4py"]
#: What methods are compared with, as KIND WHERE: dense and float16 over each transport, and DDP's PowerSGD of rank 1
BASELINES = tuple(f"{kind} {where}" for where in ("ring", "mpi", "gloo", "ddp") for kind in ("none", "fp16"))
BASELINES += ("powersgd ddp",)
LOOPBACK = "loopback"  #: the rate of a benchmark without emulated hosts


def known_baseline(name: str, device: str) -> None:
    """Check a baseline's name.

    Raises:
        ValueError: it is unknown, or cannot have gradients on that device.
    """
    if name not in BASELINES:
        raise ValueError(f"unknown {name!r}{suggest(name, list(BASELINES))}; known: {', '.join(BASELINES)}")
    if device == "cuda" and not name.endswith(" ddp"):
        raise ValueError("must be over ddp where device is cuda")


class GradientSet(BaseModel):
    """Gradients of a net's shapes (random numbers), or saved gradients."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    net: str | None = None
    """A net in :mod:`experiments.nets`."""
    gradients: str | None = None
    """A file of ``python -m experiments.training.save_gradients``."""
    label: Label
    """The name in tables."""
    only: list[str] = Field([], max_length=100)
    """Only tensors whose names match one of these globs; all tensors if the list is empty."""

    def tensors(self) -> nets.Shapes:
        """Return names and shapes of the tensors to exchange.

        Raises:
            ValueError: neither a net nor gradients are given, or no tensor matches.
            FileNotFoundError: there is no such file.
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


class Entry(MethodEntry):
    """A method, as in an experiment, and how it is measured."""

    over: Over = "ring"
    """Horovod over MPI's ring, over MPI with Open MPI's own choice, or over gloo; DDP over gloo; or the MPI driver."""
    warm_up: int = Field(3, ge=1)
    """Steps before the first measured one."""
    alone: int = Field(0, ge=0)
    """Steps before these, which each rank makes without the network, to reach the phase that is to be measured
    (GradiVeQ's dense phase takes hundreds of megabytes on the network)."""


@dataclass(frozen=True)
class Contender:
    """What is measured: its label, the group of ranks that runs it, and what these ranks need to know."""

    label: str
    where: str
    spec: dict[str, Any]

    @property
    def kind(self) -> str:
        """Return "dense" for an uncompressed all-reduce of the framework, "baseline" or "method"."""
        return {"none": "dense", "method": "method"}.get(self.spec["kind"], "baseline")


class Bench(ConfigFile):
    """A checked benchmark."""

    what = "benchmark"
    entries = {"sets": GradientSet}

    name: str = Field("bench", pattern=NAME)
    hosts: int = Field(4, ge=2, le=64)
    """Emulated hosts, with one rank each."""
    rates: list[str] = Field(["100mbit", "1gbit"], min_length=1)
    """Of their links; "loopback": no emulated hosts."""
    awake: bool = False
    """Whether the ranks of other transports run while a contender is measured. By default they are stopped (SIGSTOP):
    Horovod and MPI poll even while they wait, and take CPU time from the ranks that compute."""
    pin: bool = True
    """Whether what runs on an emulated host keeps to its share of the cores."""
    device: Literal["cpu", "cuda"] = "cpu"
    """"cuda": gradients are on a GPU, which all ranks share; collectives use NCCL's sockets. Over ddp only."""
    rounds: int = Field(3, ge=1)
    repeats: int = Field(5, ge=1)
    """Exchanges in a turn, at most. The first one counts only if it is the only one."""
    seconds: Real = Field(2.0, ge=0)
    """A turn ends with the exchange that makes it last so long."""
    sets: list[Annotated[GradientSet, with_label("net")]] = Field(min_length=1)
    methods: list[Annotated[Entry, with_label("method")]] = Field(min_length=1)
    baselines: list[str] = Field(list(BASELINES))

    def _check(self) -> None:
        def check(key: tuple[str | int, ...], call: Any, *arguments: Any) -> None:
            try:
                call(*arguments)
            except (ValueError, FileNotFoundError) as error:
                raise self.error(key, str(error)) from None

        for labels in ("sets", "methods"):
            self._check_labels(labels, taken=self.baselines)
        for at, one in enumerate(self.sets):
            check(("sets", at), one.tensors)
        for at, entry in enumerate(self.methods):
            if self.device == "cuda" and entry.over != "ddp":
                raise self.error(("methods", at, "over"), "must be ddp where device is cuda")
            self._check_plan(at, entry.settings)
        for at, rate in enumerate(self.rates):
            if rate != LOOPBACK:
                check(("rates", at), Rate.parse, rate)
        for at, name in enumerate(self.baselines):
            check(("baselines", at), known_baseline, name, self.device)

    def contenders(self) -> list[Contender]:
        """Return the contenders, in the order of the tables."""
        found = []
        for name in self.baselines:
            kind, where = name.split()
            rank = {"matrix_rank": 1} if kind == "powersgd" else {}
            found.append(Contender(name, where, {"kind": kind, "warm_up": 3 if rank else 1, **rank}))
        for entry in self.methods:
            spec = {"kind": "method", "settings": entry.settings, "warm_up": entry.warm_up, "alone": entry.alone}
            found.append(Contender(entry.label, entry.over, spec))
        return found

    def override(
        self,
        hosts: int | None = None,
        rates: Sequence[str] = (),
        methods: Sequence[str] = (),
        sets: Sequence[str] = (),
        rounds: int | None = None,
    ) -> Bench:
        """Return a copy with the options of the command line; ``methods`` and ``sets`` are labels to keep.

        Raises:
            ValueError: there is no such label, or a rate is malformed.
        """
        changes = {
            "hosts": hosts or self.hosts,
            "rates": list(rates) or self.rates,
            "rounds": rounds or self.rounds,
            "methods": self._pick("methods", methods, "method"),
            "sets": self._pick("sets", sets, "set"),
        }
        changed = self.model_copy(update=changes)
        changed._check()
        return changed

    def hosts_at(self, rate: str) -> Hosts | None:
        """Return the emulated hosts with links of that rate, not up yet; None for loopback."""
        return None if rate == LOOPBACK else Hosts(self.hosts, rate, pin=self.pin)

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


@dataclass(frozen=True)
class Turn:
    """A few exchanges of one contender, one after the other."""

    KEY: ClassVar = ("rate", "set", "contender", "round")  #: what identifies a turn among the results

    rate: str
    set: GradientSet
    contender: Contender
    round: int

    @property
    def key(self) -> dict[str, Any]:
        """Return the values of :data:`KEY`."""
        return dict(zip(self.KEY, (self.rate, self.set.label, self.contender.label, self.round), strict=True))

    def __str__(self) -> str:
        return f"{self.contender.label} on {self.set.label} at {self.rate}, round {self.round + 1}"
