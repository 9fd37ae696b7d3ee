"""Benchmarks of exchanges: methods compared with stock Horovod and PyTorch's DDP, over links of chosen speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from experiments import nets
from experiments.cluster.hosts import Hosts
from experiments.cluster.rates import Rate, slow_hosts
from experiments.configfile import NAME, ConfigFile, Label, MethodEntry, Real, with_label
from experiments.output import gradients as saved
from experiments.output import jsonl
from experiments.report.numbers import number
from hvdcompress.registry import suggest

__all__ = ["BASELINES", "Bench", "Contender", "Turn", "read_turns"]

Over = Literal["ring", "mpi", "gloo", "ddp", "mpi4py"]
#: What methods are compared with, as KIND WHERE: dense and float16 over each transport, and DDP's PowerSGD of rank 1.
BASELINES = tuple(f"{kind} {where}" for where in ("ring", "mpi", "gloo", "ddp") for kind in ("none", "fp16"))
BASELINES += ("powersgd ddp",)
LOOPBACK = "loopback"  # stands for a rate where there are no emulated hosts


class GradientSet(BaseModel):
    """Gradients of a net's shapes (random numbers), or saved ones."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    net: str | None = None
    """A net in :mod:`experiments.nets`."""
    gradients: str | None = None
    """A file that ``lab.training.save_gradients`` or ``compare.save`` wrote."""
    label: Label
    """The name used in tables."""
    only: list[str] = Field([], max_length=100)
    """Only tensors whose names match one of these globs; all if there are none."""

    def tensors(self) -> nets.Shapes:
        """Names and shapes of what is exchanged.

        Raises:
            ValueError: neither a net nor gradients are given, or no tensor matches.
            FileNotFoundError: there is no such file.
        """
        if (self.net is None) == (self.gradients is None):
            raise ValueError("give either net or gradients")
        if self.net is not None:
            found = nets.get(self.net)
        else:
            assert self.gradients is not None
            first = saved.load(Path(self.gradients))[0][0]
            found = {name: tuple(array.shape) for name, array in first.items()}
        kept = {n: s for n, s in found.items() if not self.only or any(fnmatchcase(n, glob) for glob in self.only)}
        if not kept:
            raise ValueError(f"no tensor matches {', '.join(self.only)}; there are {', '.join(list(found)[:5])}, …")
        return kept

    def __str__(self) -> str:
        """``resnet50: 161 tensors, 25 557 032 elements, 102 MB``."""
        kept = self.tensors()
        whole = f" of {len(nets.get(self.net))}" if self.net and len(kept) < len(nets.get(self.net)) else ""
        elements = nets.total(kept)
        words = f"{len(kept)}{whole} tensors, {elements:,} elements, {number(elements * 4e-6)} MB".replace(",", " ")
        return f"{self.label}: {words.replace('  ', ', ')}"


class Entry(MethodEntry):
    """A method, as experiments have it, and how it is measured."""

    over: Over = "ring"
    """Horovod over MPI's ring, over MPI as Open MPI likes it, or over gloo; PyTorch's DDP over gloo, where tensors are
    called all.0, all.1, …; or the MPI driver, with MPI's ring."""
    warm_up: int = Field(3, ge=1)
    """Steps before the first that is measured."""
    alone: int = Field(0, ge=0)
    """Steps before that which each rank makes by itself, on gradients that are equal on all ranks, to reach the phase
    that is to be measured (gradiveq's dense phase takes hundreds of megabytes on the network)."""


@dataclass(frozen=True)
class Contender:
    """Something to measure: its label, the group of ranks that runs it, and what they need to know."""

    label: str
    where: str
    spec: dict[str, Any]

    @property
    def shown(self) -> str:
        """The label in tables: "Horovod none, ring", "DDP fp16"; a method of ours may be called fp16, too."""
        if self.spec["kind"] == "method":
            return self.label
        return f"DDP {self.spec['kind']}" if self.where == "ddp" else f"Horovod {self.spec['kind']}, {self.where}"

    @property
    def is_dense(self) -> bool:
        """Whether it is an uncompressed all-reduce, which the others are compared with."""
        return self.spec["kind"] == "none"


class Bench(ConfigFile):
    """A checked benchmark.

    A benchmark's YAML file (see ``configs/bench/``)::

        name: resnet50              # results go to runs/bench-resnet50/
        hosts: 4                    # emulated ones, with a rank on each
        rates: [100mbit, 1gbit]     # of their links; slow: [3=10mbit] for one host's, delay: 1ms for all of them
        rounds: 3                   # everything is measured in turns, so many times
        sets:
          - resnet50                # a net in experiments.nets
          - {net: gpt2, label: two blocks of GPT-2, only: ["h.0.*", "h.1.*"]}
          - {gradients: runs/digits.safetensors, label: digits}     # what compare.save() wrote
        methods:
          - {label: scalecom 100x, method: scalecom, density: 0.0087}
          - {label: gradiveq, method: gradiveq, alone: 97}      # 97 steps without a network before: see Entry
        awake: true                 # others are not stopped during a turn (default: false)
        device: cuda                # gradients on a GPU, over ddp only (default: cpu)
        pin: false                  # hosts do not keep to processors of their own (default: true)
        baselines: [none ring, none mpi, none gloo, none ddp]      # default: all of BASELINES

    ``experiments bench`` writes a line of ``results.jsonl`` for each turn; with ``--resume`` those that are there stay.
    """

    what = "benchmark"
    entries = {"sets": GradientSet}

    name: str = Field("bench", pattern=NAME)
    hosts: int = Field(4, ge=2, le=64)
    rates: list[str] = Field(["100mbit", "1gbit"], min_length=1)
    slow: list[str] = []
    """Hosts with a rate of their own: ``3=10mbit``."""
    delay: str | None = None
    """How much later each frame arrives, such as 1ms; needs netem in the kernel."""
    awake: bool = False
    """Whether the ranks of other transports go on running while a contender is measured. By default they are stopped
    (SIGSTOP), so that a turn has the machine for itself; awake ones are busy even while they wait (Horovod asks every
    millisecond whether there is something to do), and take processor time from whoever computes."""
    pin: bool = True
    """Whether what runs on an emulated host keeps to its share of the processors; otherwise the scheduler moves ranks
    among all of them, so that one that computes takes what others leave. Without emulated hosts nothing is pinned."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where gradients are. "cuda": on a GPU, which all ranks share, and collectives go over NCCL's sockets; over ddp
    only."""
    rounds: int = Field(3, ge=1)
    repeats: int = Field(5, ge=1)
    """Exchanges in a turn, at most. The first one counts only if it was the only one."""
    seconds: Real = Field(2.0, ge=0)
    """A turn ends with the exchange that makes it last so long."""
    sets: list[Annotated[GradientSet, with_label("net")]] = Field(min_length=1)
    methods: list[Annotated[Entry, with_label("method")]] = Field(min_length=1)
    baselines: list[str] = Field(list(BASELINES))

    def _check(self) -> None:
        for key in ("sets", "methods"):
            self._check_labels(key, taken=self.baselines)
        for at, one in enumerate(self.sets):
            try:
                one.tensors()
            except (ValueError, FileNotFoundError) as error:
                raise self.error(("sets", at), str(error)) from None
        for at, entry in enumerate(self.methods):
            if "train" in entry.settings:
                raise self.error(("methods", at, "train"), "nothing is trained here: remove the key")
            if entry.over == "ddp" and entry.alone:
                raise self.error(("methods", at, "alone"), "not over ddp: remove the key")
            if self.device == "cuda" and entry.over != "ddp":
                raise self.error(("methods", at, "over"), "must be ddp where device is cuda")
            self._check_plan(at, entry.settings)
        for at, rate in enumerate(self.rates):
            try:
                Rate.parse(rate)
            except ValueError as error:
                raise self.error(("rates", at), str(error)) from None
        for at, words in enumerate(self.slow):
            try:
                Hosts(self.hosts, self.rates[0], slow_hosts([words]))
            except ValueError as error:
                raise self.error(("slow", at), str(error)) from None
        for at, name in enumerate(self.baselines):
            if name not in BASELINES:
                hint = suggest(name, list(BASELINES))
                raise self.error(("baselines", at), f"unknown {name!r}{hint}; known: {', '.join(BASELINES)}")
            if self.device == "cuda" and not name.endswith(" ddp"):
                raise self.error(("baselines", at), "must be over ddp where device is cuda")

    def contenders(self) -> list[Contender]:
        """The contenders, in the order of the tables."""
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
        """A copy with the command line's options applied; ``methods`` and ``sets`` are labels to keep.

        Raises:
            ValueError: there is no such label, or a rate is not a rate.
        """
        for rate in rates:
            Rate.parse(rate)
        changes = {
            "hosts": hosts or self.hosts,
            "rates": list(rates) or self.rates,
            "rounds": rounds or self.rounds,
            "methods": self._pick("methods", methods, "method"),
            "sets": self._pick("sets", sets, "set"),
        }
        return self.model_copy(update=changes)

    def joined(self, earlier: Bench) -> Bench:
        """A copy with what else was measured earlier, so that a part can be measured again, or more be added."""
        changes: dict[str, Any] = {"rates": list(dict.fromkeys([*earlier.rates, *self.rates]))}
        changes["baselines"] = list(dict.fromkeys([*earlier.baselines, *self.baselines]))
        changes["rounds"] = max(earlier.rounds, self.rounds)
        for key in ("sets", "methods"):
            entries = {entry.label: entry for one in (earlier, self) for entry in getattr(one, key)}
            changes[key] = list(entries.values())
        return self.model_copy(update=changes)

    def conditions(self, loopback: bool) -> str:
        """How the processors are shared, such as "others stopped, ranks pinned"; without hosts nothing is pinned."""
        pinned = "" if loopback else f", ranks {'pinned' if self.pin else 'on any processor'}"
        where = "gradients on one GPU that all ranks share, " if self.device == "cuda" else ""
        return f"{where}others {'awake' if self.awake else 'stopped'}{pinned}"

    def hosts_at(self, rate: str) -> Hosts:
        """The emulated hosts with links of that rate, not up yet."""
        return Hosts(self.hosts, rate, slow_hosts(self.slow), self.delay, self.pin)

    def turns(self, rates: Sequence[str]) -> list[Turn]:
        """Every turn, in the order in which they are taken.

        All contenders have one, then all have the next, so that what disturbs the machine for a while disturbs them
        alike. Each round begins with another contender.
        """
        found = []
        for rate in rates:
            for one in self.sets:
                for round in range(self.rounds):
                    order = self.contenders()
                    first = round * len(order) // self.rounds
                    found += [Turn(rate, one, each, round) for each in order[first:] + order[:first]]
        return found


@dataclass(frozen=True)
class Turn:
    """A few exchanges of one contender, one after the other."""

    rate: str
    set: GradientSet
    contender: Contender
    round: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Its key in ``results.jsonl``."""
        return self.rate, self.set.label, self.contender.label, self.round

    def __str__(self) -> str:
        at = "" if self.rate == LOOPBACK else f" at {Rate.parse(self.rate)}"
        return f"{self.contender.label} on {self.set.label}{at}, round {self.round + 1}"


def read_turns(folder: Path) -> list[dict[str, Any]]:
    """The turns in ``results.jsonl``, the last of each key; a line cut off by a kill is left out."""
    turns = jsonl.read(folder / "results.jsonl")
    return list({(turn["rate"], turn["set"], turn["contender"], turn["round"]): turn for turn in turns}.values())
