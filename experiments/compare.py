"""Compare methods on saved gradients: error, bytes and compression ratio, on the same data for all.

:func:`save` writes gradients, one dict per rank and step; ``python -m experiments.training.save_gradients`` does so
for the quickstart's tasks. Two errors are measured, both relative to the dense mean over ranks:

* *one exchange*: ‖ĝ − ḡ‖/‖ḡ‖ of each step, without error feedback: what compression does to one gradient. Shown are
  the median over steps with quartiles, and the medians of the first, second and last third of the steps (*early*,
  *middle*, *late*). Steps that a method sends dense by its own schedule are left out; *steps* says how many are left;
* *whole run*: ‖Σ_t ĝ_t − Σ_t ḡ_t‖/‖Σ_t ḡ_t‖ with the method's own feedback: what it does to the sum of all
  updates, where what was held back comes later, and what was lost never does.

Both are relative: where the gradient itself is about to vanish, :func:`warning` says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments import phases
from experiments.configfile import MethodEntry
from experiments.output.gradients import Gradients, load, save
from experiments.output.table import MISSING, Column, Table
from experiments.report import numbers
from hvdcompress import registry
from hvdcompress.loopback import Loopback

__all__ = ["Gradients", "Outcome", "load", "measure", "save", "table", "warning"]


@dataclass(frozen=True)
class Outcome:
    """One method's results.

    Relative errors (None where undefined), bytes per step, dense bytes ÷ bytes sent, and the formula of its bytes.

    Attributes:
        errors: of one exchange without feedback, for each step; NaN where the method sent everything dense, or where
            the mean gradient is zero.
    """

    label: str
    method: str
    settings: str
    errors: list[float]
    whole_run: float | None
    num_bytes: float
    rate: float
    formula: str

    @property
    def one_exchange(self) -> phases.Spread | None:
        """Median and quartiles of ``errors``."""
        return phases.spread(self.errors)

    @property
    def by_phase(self) -> dict[str, phases.Spread | None]:
        """The same for each phase of the training."""
        return phases.by_phase(self.errors)

    @property
    def steps(self) -> int:
        """How many of the errors there are."""
        return len([error for error in self.errors if error == error])


def measure(entry: MethodEntry, gradients: Gradients) -> Outcome:
    """Run one method over the gradients in loopback, with and without its feedback.

    Args:
        entry: the method.
        gradients: [step][rank]{name: array}, as :func:`load` gives them.
    """
    world_size = len(gradients[0])
    plan = entry.plan
    net = Loopback(plan, world_size=world_size)
    means = [_flat(_mean(ranks)) for ranks in gradients]
    outs = [_flat(net.allreduce_many(ranks)[0]) for ranks in gradients]
    bare = Loopback(plan, world_size=world_size, feedback="none", **_without_feedback(entry))
    errors = _errors(bare, gradients, means)
    method = plan.program.main
    sums = _error(np.sum(outs, axis=0), np.sum(means, axis=0)) if method.feedback != "momentum" else None
    hidden = ("beta", "momentum", "feedback")
    default = {name: value for name, value in type(method)().hyperparameters().items()}
    changed = [f"{k}={v}" for k, v in method.hyperparameters().items() if v != default[k] or k == "density"]
    settings = " ".join(text for text in changed if not text.startswith(hidden) or entry.settings.get("feedback"))
    sent, rate = net.ledger.bytes_sent(world_size - 1) / len(gradients), net.ledger.compression_ratio(world_size - 1)
    return Outcome(entry.label, method.id, settings, errors, sums, sent, rate, registry.formula(type(method)))


def _errors(net: Loopback, gradients: Gradients, means: Sequence[np.ndarray[Any, Any]]) -> list[float]:
    """The relative error of each step; NaN for the dense steps of a method that has others, too."""
    errors, compressed, rank = [], [], net.world_size - 1
    for ranks, mean in zip(gradients, means, strict=True):
        dense, sent = net.ledger.dense_bytes(rank), net.ledger.bytes_sent(rank)
        errors.append(_error(_flat(net.allreduce_many(ranks)[0]), mean))
        compressed.append(net.ledger.bytes_sent(rank) - sent < net.ledger.dense_bytes(rank) - dense)
    return [e if c or not any(compressed) else math.nan for e, c in zip(errors, compressed, strict=True)]


def warning(gradients: Gradients) -> str | None:
    """A sentence for readers of the table if the gradients' norm collapses on the way, or None."""
    return phases.collapse([float(np.linalg.norm(_flat(_mean(ranks)))) for ranks in gradients])


def _without_feedback(entry: MethodEntry) -> dict[str, Any]:
    """Further settings where feedback is switched off: without it there is nothing for a low-pass to filter."""
    return {"beta": 1.0} if "beta" in entry.settings else {}


def _mean(ranks: Sequence[dict[str, np.ndarray[Any, Any]]]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(np.mean([one[name] for one in ranks], axis=0, dtype=np.float64)) for name in ranks[0]}


def _flat(tensors: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return np.concatenate([tensors[name].ravel().astype(np.float64) for name in sorted(tensors)])


def _error(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    norm = np.linalg.norm(expected)
    return float(np.linalg.norm(found - expected) / norm) if norm else math.nan


def _label(outcome: Outcome) -> str:
    """The entry's label; a method's id is followed by its settings, which a label of its own already tells."""
    if outcome.label == outcome.method and outcome.settings:
        return f"{outcome.label} {outcome.settings}"
    return outcome.label


def _percent(error: float | None) -> str:
    return MISSING if error is None else f"{100 * error:.2f} %"


def _phase(name: str) -> Column[Outcome]:
    """The column of one phase's median."""

    def median(row: Outcome) -> float | None:
        found = row.by_phase[name]
        return found.median if found else None

    return Column(name, name, lambda row: _percent(median(row)), median, yields=1)


def _quartile(which: str) -> Column[Outcome]:
    def value(row: Outcome) -> float | None:
        return getattr(row.one_exchange, which, None)

    return Column(
        which, {"low": "quartile 1", "high": "quartile 3"}[which], lambda row: _percent(value(row)), value, yields=3
    )


COLUMNS: tuple[Column[Outcome], ...] = (
    Column("method", "method", _label, align="left", wrap=True),
    Column(
        "one_exchange",
        "one exchange",
        lambda row: _percent(row.one_exchange and row.one_exchange.median),
        lambda row: row.one_exchange and row.one_exchange.median,
    ),
    _quartile("low"),
    _quartile("high"),
    *map(_phase, phases.PHASES),
    Column("steps", "steps", lambda row: str(row.steps), lambda row: row.steps, yields=2),
    Column("whole_run", "whole run", lambda row: _percent(row.whole_run), lambda row: row.whole_run),
    Column("num_bytes", "bytes per step", lambda row: numbers.num_bytes(row.num_bytes), lambda row: row.num_bytes, "B"),
    Column("rate", "ratio", lambda row: numbers.rate_of(row.rate), lambda row: row.rate),
    Column("formula", "bytes by the formula", lambda row: row.formula, align="left", wrap=True, yields=4),
)


def table(outcomes: Sequence[Outcome]) -> Table[Outcome]:
    """The outcomes as a table, a row per method."""
    return Table(COLUMNS, outcomes)
