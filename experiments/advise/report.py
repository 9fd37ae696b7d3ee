"""What ``hvdcompress advise`` prints and writes: candidates, the verdict and its reasons, the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape

from experiments import nets
from experiments.advise.choose import Candidate, Case
from experiments.advise.profile import Profile
from experiments.advise.timeline import Link
from experiments.advise.verdict import Advice, evidence
from experiments.cluster.rates import speed
from experiments.output.table import MISSING, Column, Table, as_json
from experiments.report import numbers

__all__ = ["Report", "show", "table"]


@dataclass
class Report:
    """Advice, and what it was made from.

    ``measured``: real steps' seconds by label, if there was a check; ``untrained``: why that compared no losses.
    """

    profile: Profile
    link: Link
    ranks: int
    shared: float
    advice: Advice
    case: Case
    measured: Mapping[str, list[float]] = field(default_factory=dict)
    untrained: str = ""

    @property
    def heading(self) -> str:
        """Such as ``resnet50: 161 tensors, 25 557 032 elements; 16 ranks, link of 1 Gbit/s``."""
        shapes = self.profile.shapes
        about = f"{len(shapes)} tensors, {nets.total(shapes):,} elements".replace(",", " ").replace("  ", ", ")
        sharing = f", {numbers.number(self.shared, 2)} per processor" if self.shared > 1.05 else ""
        carries = f", which carries {speed(self.link.rate)}" if self.link.share < 1 else ""
        return f"{self.profile.name}: {about}; {self.ranks} ranks{sharing}, link of {speed(self.link.speed)}{carries}"

    def notes(self) -> list[str]:
        """The verdict and its reasons, a sentence or two each."""
        advice, dense = self.advice, self.advice.dense
        low, high = (numbers.seconds_of(each) for each in advice.interval(advice.best))
        found = [
            f"Verdict: {advice.verdict}. {advice.reason[:1].upper()}{advice.reason[1:]}.",
            f"Step: dense {numbers.seconds_of(dense.seconds)}, of which {numbers.seconds_of(dense.step.exposed)} "
            f"exposed; advised {numbers.seconds_of(advice.best.seconds)} "
            f"({f'{low} – {high}' if advice.best.measured is None else 'measured'}), "
            f"{numbers.seconds_of(advice.best.step.exposed)} exposed.",
            f"Ceiling: with an infinitely fast link a step takes {numbers.seconds_of(advice.alone)}"
            + (f", {numbers.rate_of(advice.ceiling)} as fast as dense." if advice.alone > 0 else "."),
        ]
        if advice.unsure:
            found.append(
                f"This verdict lies within its own error (±{100 * advice.error:.0f} % of what an exchange adds): "
                "--check measures it."
            )
        found += self._losses()
        if advice.best is not dense:
            found.append(f"Memory: {numbers.num_bytes(advice.best.memory)} of state on each rank{self._room()}.")
            found += self._accuracy(advice.best)
        return found

    def _losses(self) -> list[str]:
        """What trainings for the same seconds say, if there were some."""
        if self.untrained:
            return [f"The losses of trainings were not compared: {self.untrained}."]
        tried = [one for one in self.advice.candidates if one.trial]
        if not tried and self.profile.trials:
            return ["The losses of trainings do not count here: they were compared over the link that was measured."]
        return [note for one in tried if one.trial for note in one.trial.notes(one.label)]

    def _room(self) -> str:
        free, needed = self.profile.memory, self.advice.best.memory
        if free is None:
            return ""
        here = needed * max(1.0, self.shared)
        return f", of {numbers.num_bytes(free)} free" + (": too little" if here > free else "")

    def _accuracy(self, candidate: Candidate) -> list[str]:
        rows = evidence(candidate.method)
        if not rows:
            return [f"Accuracy: this project has no training with {candidate.method} in docs/results.md."]
        words = "; ".join(
            f"{row['label']} on {row['task']} at {row['rate']}: {row['held_out']} ({row['vs_none']}) {row['measure']}"
            for row in rows
        )
        return [
            f"Accuracy (docs/results.md, one seed; in brackets the difference to dense): {words}. Yours may differ."
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        advice = self.advice
        return {
            "heading": self.heading,
            "verdict": advice.verdict,
            "reason": advice.reason,
            "unsure": advice.unsure,
            "error": advice.error,
            "best": advice.best.label,
            "dense_seconds": advice.dense.seconds,
            "dense_exposed": advice.dense.step.exposed,
            "seconds": advice.best.seconds,
            "exposed": advice.best.step.exposed,
            "interval": list(advice.interval(advice.best)),
            "alone": advice.alone,
            "ceiling": advice.ceiling,
            "break_even": advice.best.break_even,
            "memory": advice.best.memory,
            "plan": advice.best.plan.to_dict(),
            "evidence": evidence(advice.best.method) if advice.best is not advice.dense else [],
            "link": vars(self.link),
            "trials": {one.label: one.trial.model_dump() for one in advice.candidates if one.trial},
            "candidates": table(self).records(),
        }


def table(report: Report) -> Table[Candidate]:
    """The candidates, the shortest step first."""
    advice = report.advice
    dense = advice.dense.seconds

    def measured(one: Candidate) -> float | None:
        found = sorted(report.measured.get(one.label, []))
        return found[len(found) // 2] if found else one.measured

    def even(one: Candidate) -> str:
        if one is advice.dense:
            return MISSING
        if one.break_even in (0.0, float("inf")):
            return "always" if one.break_even else "never"
        return f"below {speed(one.break_even)}"

    columns: list[Column[Candidate]] = [
        Column("candidate", "candidate", lambda one: one.label, align="left"),
        Column("step", "step", lambda one: numbers.seconds_of(one.step.seconds), lambda one: one.step.seconds, "s"),
        Column(
            "measured",
            "measured",
            lambda one: MISSING if (at := measured(one)) is None else numbers.seconds_of(at),
            measured,
            "s",
        ),
        Column(
            "exposed", "exposed", lambda one: numbers.seconds_of(one.step.exposed), lambda one: one.step.exposed, "s"
        ),
        Column(
            "gain",
            "× dense",
            lambda one: numbers.rate_of(dense / one.seconds),
            lambda one: dense / one.seconds,
        ),
        Column(
            "link", "link busy", lambda one: numbers.seconds_of(one.step.link), lambda one: one.step.link, "s", yields=1
        ),
        Column(
            "compressed",
            "tensors compressed",
            lambda one: f"{one.compressed} of {one.tensors}",
            lambda one: one.compressed,
            yields=2,
        ),
        Column("memory", "state", lambda one: numbers.num_bytes(one.memory), lambda one: one.memory, "B", yields=2),
        Column("break_even", "gains", even, lambda one: one.break_even, "bit/s"),
    ]
    rows = sorted(advice.candidates, key=lambda one: one.seconds)
    return Table(columns, rows, report.heading, lambda one: "best" if one is advice.best else "").filled()


def show(report: Report, console: Console, form: str = "text") -> None:
    """Print in one of the formats of tables; JSON holds everything, CSV the candidates alone."""
    if form == "json":
        console.out(as_json(report.to_dict()), end="", highlight=False)
        return
    found = table(report)
    found.print(console, form)
    if form == "csv":
        return
    console.print()
    for note in report.notes():
        console.print(escape(note), highlight=False, soft_wrap=True)
    if report.advice.best is not report.advice.dense:
        console.print(f"\n```yaml\n{escape(report.advice.plan_yaml())}```", highlight=False, soft_wrap=True)
