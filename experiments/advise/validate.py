"""Predicted and measured steps on emulated hosts, and whether verdicts were right: `hvdcompress advise --validate`.

Every case, a net over links of one speed, measures a profile, asks for advice, and then measures real steps of dense
training, of every method and of the advised plan in turns. Results are kept case by case, so an attempt that was
interrupted goes on; the tables are made again from them, with the predictions of the present code.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from experiments.advise import run
from experiments.advise.choose import DENSE
from experiments.advise.job import Found, Job
from experiments.advise.launching import launch
from experiments.advise.outcome import Outcome
from experiments.advise.workload import Named, of
from experiments.cluster.hosts import Hosts
from experiments.cluster.rates import Rate
from experiments.configfile import NAME, ConfigFile, Label, MethodEntry, Real, with_label
from experiments.output import jsonl
from experiments.output.folder import write_files
from experiments.output.table import Column, Table
from experiments.report import numbers
from hvdcompress.plan import load

__all__ = ["CLOSE", "Validation", "measure", "outcomes", "tables", "write"]

UNSHAPED, FASTEST = "unshaped", "100gbit"  # a token bucket of a rate that these hosts do not reach
CLOSE = 0.05  # of the best measured step: as good as the best


class Net(BaseModel):
    """A net to train; see :class:`workload.Named`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    label: Label
    shapes: str | None = None
    backward: Real = 0.0
    task: str | None = None
    batch_size: int = Field(32, ge=1)

    @property
    def named(self) -> Named:
        """As ranks take it."""
        return Named(self.shapes, self.backward, self.task, self.batch_size)


class Validation(ConfigFile):
    """A checked file of cases (see ``configs/bench/advise_truth.yaml``)."""

    what: ClassVar[str] = "validation"
    entries: ClassVar[dict[str, type[BaseModel]]] = {"nets": Net}

    name: str = Field("advise", pattern=NAME)
    hosts: int = Field(4, ge=2, le=64)
    rates: list[str] = Field(min_length=1)
    """Of the hosts' links; "unshaped" for as fast as this machine goes."""
    rounds: int = Field(2, ge=1)
    seconds: Real = Field(1.0, ge=0)
    """How long a turn lasts."""
    nets: list[Net] = Field(min_length=1)
    methods: list[Annotated[MethodEntry, with_label("method")]] = Field(min_length=1)

    def _check(self) -> None:
        for key in ("nets", "methods"):
            self._check_labels(key, taken=[DENSE])
        for at, rate in enumerate(self.rates):
            try:
                Rate.parse(word(rate))
            except ValueError as error:
                raise self.error(("rates", at), str(error)) from None
        for at, net in enumerate(self.nets):
            try:
                of(net.named)
            except (ValueError, FileNotFoundError) as error:
                raise self.error(("nets", at), str(error)) from None
        for at, entry in enumerate(self.methods):
            self._check_plan(at, entry.settings)

    def override(self, rates: Sequence[str] = (), nets: Sequence[str] = ()) -> Validation:
        """A copy with these rates and nets alone.

        Raises:
            ValueError: the file has no such rate or net.
        """
        if wrong := [rate for rate in rates if rate not in self.rates]:
            raise ValueError(f"the validation has no rate {wrong[0]!r}; it has: {', '.join(self.rates)}")
        kept = {"rates": list(rates) or self.rates, "nets": self._pick("nets", nets, "net")}
        return self.model_copy(update=kept)


def word(rate: str) -> str:
    """The rate of the token bucket."""
    return FASTEST if rate == UNSHAPED else rate


def prepare(folder: Path, asked: Validation, resume: bool) -> None:
    """Make the folder ready: empty, or with the cases of an earlier attempt.

    Raises:
        ValueError: these were measured with other settings.
    """
    config = folder / "config.yaml"
    if resume and config.exists():
        before = Validation.open(config)
        for key in ("hosts", "rounds", "seconds", "methods"):
            if getattr(before, key) != getattr(asked, key):
                raise ValueError(f"{folder} was measured with other {key}: resume with the same, or leave out --resume")
        rates, nets = {**dict.fromkeys(before.rates), **dict.fromkeys(asked.rates)}, {n.label: n for n in before.nets}
        nets |= {net.label: net for net in asked.nets}
        asked.model_copy(update={"rates": list(rates), "nets": list(nets.values())}).save(config)
        return
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    asked.save(config)


def measure(
    asked: Validation, folder: Path, error: float, say: Callable[[str], None], note: Callable[[str], None]
) -> None:
    """Measure every case that has no result yet.

    Args:
        asked: the cases.
        folder: each case is appended to ``results.jsonl`` in it.
        error: of an exchange's predicted time, relative.
        say: called with what is done next.
        note: called with each case's verdict and measured steps.

    Raises:
        HostsError: the hosts cannot be set up.
        LaunchError: the ranks could not be started, or failed.
    """
    file = folder / "results.jsonl"
    jsonl.end_line(file)
    done = {(line["rate"], line["net"]) for line in jsonl.read(file)}
    codecs: dict[str, Any] = {}
    for line in jsonl.read(file):
        codecs = codecs or line["case"]["profile"]["codecs"]
    entries = [{"label": entry.label, **entry.settings} for entry in asked.methods]
    for rate in asked.rates:
        left = [net for net in asked.nets if (rate, net.label) not in done]
        if not left:
            continue
        with Hosts(asked.hosts, word(rate)) as hosts:
            for net in left:
                say(f"{net.label}, {rate}")
                job = Job([net.named], entries, error, "all", asked.rounds, asked.seconds, codecs)
                [case] = launch(job, asked.hosts, hosts, lambda words: say(f"{net.label}, {rate}: {words}"), folder)  # noqa: B023
                jsonl.append(file, {"rate": rate, "net": net.label, "case": case.to_dict()})
                codecs = case.to_dict()["profile"]["codecs"]
                steps = {label: numbers.seconds_of(statistics.median(each)) for label, each in case.measured.items()}
                words = ", ".join(f"{label} {middle}" for label, middle in steps.items())
                note(f"{net.label}, {rate}: {case.verdict} ({case.advised}); measured: {words}")


def outcomes(folder: Path) -> list[Outcome]:
    """Every measured plan of every case, with the prediction that the present code makes from the case's profile.

    Raises:
        ValueError: the folder holds no validation.
    """
    found = []
    lines = {(line["rate"], line["net"]): line["case"] for line in jsonl.read(folder / "results.jsonl")}
    if not lines:
        raise ValueError(f"{folder} holds no validation: it has no results.jsonl")
    for (rate, net), given in lines.items():
        one = Found.from_dict(given)
        case = run.case_of(one.profile)
        for label, seconds in one.measured.items():
            predicted = case.predict(load(one.plans[label])).seconds
            middle = statistics.median(seconds)
            found.append(Outcome(rate, net, label, one.advised, one.verdict, predicted, middle, len(seconds)))
    return found


def cases(found: Sequence[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    """Outcomes by net and rate."""
    grouped: dict[tuple[str, str], list[Outcome]] = {}
    for one in found:
        grouped.setdefault((one.net, one.rate), []).append(one)
    return grouped


def _is_right(group: Sequence[Outcome]) -> bool:
    best = min(one.measured for one in group)
    advised = next(one for one in group if one.label == one.advised)
    return advised.measured <= best * (1 + CLOSE)


def tables(found: Sequence[Outcome]) -> tuple[Table[list[Outcome]], Table[Outcome]]:
    """A line per case, with its verdict; and a line per plan, with its predicted and measured step."""

    def least(group: list[Outcome]) -> Outcome:
        return min(group, key=lambda one: one.measured)

    def chosen(group: list[Outcome]) -> Outcome:
        return next(one for one in group if one.label == one.advised)

    def off(group: list[Outcome]) -> float:
        return statistics.fmean(abs(one.error) for one in group)

    verdicts: list[Column[list[Outcome]]] = [
        Column("net", "net", lambda group: group[0].net, align="left"),
        Column("link", "link", lambda group: rate_of(group[0].rate), align="left"),
        Column("verdict", "verdict", lambda group: group[0].verdict, align="left"),
        Column("advised", "advised", lambda group: group[0].advised, align="left"),
        Column("its", "its step", lambda g: numbers.seconds_of(chosen(g).measured), lambda g: chosen(g).measured, "s"),
        Column("best", "best measured", lambda group: least(group).label, align="left"),
        Column("least", "its step", lambda g: numbers.seconds_of(least(g).measured), lambda g: least(g).measured, "s"),
        Column("right", f"within {100 * CLOSE:.0f} %", lambda group: "yes" if _is_right(group) else "no"),
        Column("error", "mean error", lambda group: numbers.percent(round(off(group), 3)), off),
    ]
    steps: list[Column[Outcome]] = [
        Column("net", "net", lambda one: one.net, align="left"),
        Column("link", "link", lambda one: rate_of(one.rate), align="left"),
        Column("plan", "plan", lambda one: one.label, align="left"),
        Column("predicted", "predicted", lambda one: numbers.seconds_of(one.predicted), lambda one: one.predicted, "s"),
        Column("measured", "measured", lambda one: numbers.seconds_of(one.measured), lambda one: one.measured, "s"),
        Column("error", "error", lambda one: f"{100 * one.error:+.0f} %", lambda one: one.error),
        Column("count", "of", lambda one: str(one.count), lambda one: one.count),
    ]
    return Table(verdicts, list(cases(found).values())), Table(steps, found)


def rate_of(rate: str) -> str:
    """For a reader."""
    return rate if rate == UNSHAPED else str(Rate.parse(rate))


def summary(found: Sequence[Outcome]) -> str:
    """A sentence with the figures that the adviser is judged by."""
    groups = list(cases(found).values())
    right = sum(map(_is_right, groups))
    mean = statistics.fmean(abs(one.error) for one in found)
    return (
        f"The advised plan was the best, or within {100 * CLOSE:.0f} % of the best, in {right} of {len(groups)} cases; "
        f"predicted steps were off by {100 * mean:.0f} % on average ({len(found)} plans, median "
        f"{100 * statistics.median(abs(one.error) for one in found):.0f} %)."
    )


def write(folder: Path) -> list[Path]:
    """Write ``table.md`` and, with the extra "report", ``advise.svg``."""
    found = outcomes(folder)
    verdicts, steps = tables(found)
    text = f"{summary(found)}\n\n{verdicts.markdown()}\nPredicted and measured:\n\n{steps.markdown()}"

    def pages() -> dict[str, str]:
        from experiments.advise import picture  # it needs matplotlib

        return {"advise.svg": picture.truth(found)}

    return write_files(folder, {"table.md": text}, pages)
