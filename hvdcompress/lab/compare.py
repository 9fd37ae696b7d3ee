"""Compare methods on saved gradients: error, bytes and compression ratio, on the same data for all.

:func:`save` writes gradients, one dict a rank and step; ``python -m hvdcompress.lab.training.save_gradients`` does so
for the quickstart's tasks. Two errors are measured, both relative to the dense mean over ranks:

* *one exchange*: ‖ĝ − ḡ‖/‖ḡ‖ at the last step, without error feedback: what compression does to one gradient;
* *whole run*: ‖Σ_t ĝ_t − Σ_t ḡ_t‖/‖Σ_t ḡ_t‖ with the method's own feedback: what it does to the sum of all
  updates, where what was held back comes later, and what was lost never does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdcompress import registry
from hvdcompress.lab.configfile import MethodEntry
from hvdcompress.lab.output import numbers
from hvdcompress.lab.output.gradients import Gradients, load, save
from hvdcompress.lab.output.table import MISSING, Column, Table
from hvdcompress.loopback import Loopback

__all__ = ["Gradients", "Outcome", "load", "measure", "save", "table"]


@dataclass(frozen=True)
class Outcome:
    """One method's results.

    Relative errors (None where undefined), bytes a step, dense bytes ÷ bytes sent, and the formula of its bytes.
    """

    label: str
    method: str
    settings: str
    one_exchange: float
    whole_run: float | None
    num_bytes: float
    rate: float
    formula: str


def measure(entry: MethodEntry, gradients: Gradients) -> Outcome:
    """Run one method over the gradients in loopback, with and without its feedback.

    Args:
        entry: the method.
        gradients: [step][rank]{name: array}, as :func:`load` gives them.
    """
    world = len(gradients[0])
    plan = entry.plan
    net = Loopback(plan, world=world)
    means = [_flat(_mean(ranks)) for ranks in gradients]
    outs = [_flat(net.allreduce_many(ranks)[0]) for ranks in gradients]
    bare, last = Loopback(plan, world=world, feedback="none", **_without_feedback(entry)), means[-1]
    for ranks in gradients:
        alone = _flat(bare.allreduce_many(ranks)[0])
    method = plan.program.main
    sums = _error(np.sum(outs, axis=0), np.sum(means, axis=0)) if method.feedback != "momentum" else None
    hidden = ("beta", "momentum", "feedback")
    default = {name: value for name, value in type(method)().hyperparameters().items()}
    changed = [f"{k}={v}" for k, v in method.hyperparameters().items() if v != default[k] or k == "density"]
    settings = " ".join(text for text in changed if not text.startswith(hidden) or entry.settings.get("feedback"))
    sent, rate = net.ledger.bytes_sent(world - 1) / len(gradients), net.ledger.rate(world - 1)
    once = _error(alone, last)
    return Outcome(entry.label, method.id, settings, once, sums, sent, rate, registry.formula(type(method)))


def _without_feedback(entry: MethodEntry) -> dict[str, Any]:
    """Further settings where feedback is switched off: without it there is nothing for a low-pass to filter."""
    return {"beta": 1.0} if "beta" in entry.settings else {}


def _mean(ranks: Sequence[dict[str, np.ndarray[Any, Any]]]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(np.mean([one[name] for one in ranks], axis=0, dtype=np.float64)) for name in ranks[0]}


def _flat(tensors: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return np.concatenate([tensors[name].ravel().astype(np.float64) for name in sorted(tensors)])


def _error(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _label(outcome: Outcome) -> str:
    """The entry's label; a method's id is followed by its settings, which a label of its own already tells."""
    if outcome.label == outcome.method and outcome.settings:
        return f"{outcome.label} {outcome.settings}"
    return outcome.label


def _percent(error: float | None) -> str:
    return MISSING if error is None else f"{100 * error:.2f} %"


COLUMNS: tuple[Column[Outcome], ...] = (
    Column("method", "method", _label, align="left", wrap=True),
    Column("one_exchange", "one exchange", lambda row: _percent(row.one_exchange), lambda row: row.one_exchange),
    Column("whole_run", "whole run", lambda row: _percent(row.whole_run), lambda row: row.whole_run),
    Column("num_bytes", "bytes a step", lambda row: numbers.num_bytes(row.num_bytes), lambda row: row.num_bytes, "B"),
    Column("rate", "rate", lambda row: numbers.rate_of(row.rate), lambda row: row.rate),
    Column("formula", "bytes by the formula", lambda row: row.formula, align="left", wrap=True),
)


def table(outcomes: Sequence[Outcome]) -> Table[Outcome]:
    """The outcomes as a table, a row a method."""
    return Table(COLUMNS, outcomes)
