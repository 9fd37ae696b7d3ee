"""What each method makes of saved gradients: its error, its bytes, and its rate, on the same data for all.

Gradients are saved by :func:`save`, one dict a rank and step; ``launch/save_gradients.py`` does it for the
quickstart's tasks. Two errors are measured, both relative to the dense mean over ranks:

* *one exchange*: ‖ĝ − ḡ‖/‖ḡ‖ at the last step, without error feedback: what compression does to one gradient;
* *whole run*: ‖Σ_t ĝ_t − Σ_t ḡ_t‖/‖Σ_t ḡ_t‖ with the method's own feedback: what it does to the sum of all
  updates, where what was held back comes later, and what was lost never does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hvdcompress import registry
from hvdcompress.lab.output import numbers
from hvdcompress.lab.training.experiment import MethodEntry
from hvdcompress.loopback import Loopback

__all__ = ["Outcome", "load", "markdown", "measure", "save", "show"]

Gradients = list[list[dict[str, np.ndarray[Any, Any]]]]  # [step][rank][name]


def save(path: Path, gradients: Gradients) -> None:
    """Write gradients [step][rank]{name: array} to a safetensors file; keys are "step/rank/name"."""
    arrays = {
        f"{step}/{rank}/{name}": np.ascontiguousarray(array)
        for step, ranks in enumerate(gradients)
        for rank, one in enumerate(ranks)
        for name, array in one.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, path)


def load(path: Path) -> Gradients:
    """Read what :func:`save` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else, or not every step of every rank.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; python launch/save_gradients.py {path} makes one")
    found: dict[int, dict[int, dict[str, Any]]] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                step, rank, name = key.split("/", 2)
                found.setdefault(int(step), {}).setdefault(int(rank), {})[name] = file.get_tensor(key)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} holds no gradients saved by hvdcompress: {error}") from None
    gradients = [[found[step][rank] for rank in sorted(found[step])] for step in sorted(found)]
    kinds = {tuple(sorted((name, array.shape) for name, array in one.items())) for ranks in gradients for one in ranks}
    if len(kinds) != 1 or len({len(ranks) for ranks in gradients}) != 1:
        raise ValueError(f"{path}: not every step has the same tensors of every rank")
    return gradients


@dataclass(frozen=True)
class Outcome:
    """What one method did: errors (None where there is none to tell), bytes a step, and its formula for them."""

    label: str
    method: str
    settings: str
    one_exchange: float
    whole_run: float | None
    num_bytes: float
    rate: float
    formula: str


def measure(entry: MethodEntry, gradients: Gradients) -> Outcome:
    """Run one method over the gradients in loopback, with and without its feedback."""
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
    """What else must change where feedback is switched off: the low-pass factor means nothing then."""
    return {"beta": 1.0} if "beta" in entry.settings else {}


def _mean(ranks: Sequence[dict[str, np.ndarray[Any, Any]]]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(np.mean([one[name] for one in ranks], axis=0, dtype=np.float64)) for name in ranks[0]}


def _flat(tensors: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return np.concatenate([tensors[name].ravel().astype(np.float64) for name in sorted(tensors)])


def _error(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


TITLES = ("method", "one exchange", "whole run", "bytes a step", "rate", "bytes by the formula")


def _cells(outcome: Outcome) -> tuple[str, ...]:
    whole = "–" if outcome.whole_run is None else f"{100 * outcome.whole_run:.2f} %"
    name = outcome.label  # one of its own says what matters
    if name == outcome.method and outcome.settings:
        name = f"{name} {outcome.settings}"
    sent, rate = numbers.num_bytes(outcome.num_bytes), numbers.rate_of(outcome.rate)
    return name, f"{100 * outcome.one_exchange:.2f} %", whole, sent, rate, outcome.formula


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the table."""
    table = Table(box=None, header_style="bold")
    for number, title in enumerate(TITLES):
        table.add_column(title, justify="left" if number in (0, 5) else "right", overflow="fold")
    for outcome in outcomes:
        table.add_row(*map(escape, _cells(outcome)))
    console.print(table)


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The table as Markdown."""
    rows = [f"| {' | '.join(_cells(outcome))} |" for outcome in outcomes]
    return "\n".join([f"| {' | '.join(TITLES)} |", "|---|---:|---:|---:|---:|---|", *rows]) + "\n"
