"""``python -m experiments compare``: error, cosine and bytes of methods on saved gradients, on the same data for all.

``python -m experiments save-gradients`` saves gradients. What is measured:

* *one_exchange*: ‖ĝ − ḡ‖/‖ḡ‖ of each step without error feedback, ḡ being the dense mean over ranks: what compression
  does to one gradient. The median over the *steps*; those that a method's own schedule sends dense are left out;
* *cosine*: the median of the cosine of the angle between ĝ and ḡ in these steps;
* *whole_run*: ‖Σ_t ĝ_t − Σ_t ḡ_t‖/‖Σ_t ḡ_t‖ with the method's own feedback: what it does to the sum of all updates,
  where what was held back comes later and what was lost never does. None for DGC, which sums gradients that went
  through momentum.

Errors are relative: where the norm of ḡ, whose least and largest are printed, gets small, there is hardly a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from experiments.configfile import MethodEntry, methods_of
from experiments.report import numbers, results, statistics, tables
from experiments.training.gradients import Gradients, load
from hvdcompress.loopback import Loopback

Vector = np.ndarray[Any, Any]


def measure(entry: MethodEntry, gradients: Gradients) -> dict[str, Any]:
    """Run one method over the gradients in loopback, with and without its feedback.

    Args:
        entry: the method.
        gradients: [step][rank]{name: array}.

    Returns:
        A record; the module says what is in it, besides ``num_bytes`` (per step and rank) and ``ratio``.
    """
    world_size, plan = len(gradients[0]), entry.plan
    means = [_flat(_mean(ranks)) for ranks in gradients]
    # Without feedback there is nothing for a low-pass to filter
    without: dict[str, Any] = {"feedback": "none", **({"beta": 1.0} if "beta" in entry.settings else {})}
    net, bare = Loopback(plan, world_size), Loopback(plan, world_size, **without)
    outs = [_flat(net.allreduce(ranks)[0]) for ranks in gradients]
    errors, cosines = [], []
    for ranks, mean in zip(gradients, means, strict=True):
        bare.ledger.reset()
        out = _flat(bare.allreduce(ranks)[0])
        compressed = bare.ledger.bytes_sent(world_size - 1) < bare.ledger.dense_bytes(world_size - 1)
        errors.append((statistics.relative_error(out, mean), compressed))
        cosines.append(_cosine(out, mean) if compressed else math.nan)
    some = any(compressed for _, compressed in errors)  # else the method sends everything, always
    each = [error for error, compressed in errors if compressed or not some]
    whole = None
    if plan.program.main.feedback != "momentum":
        whole = statistics.relative_error(np.sum(outs, axis=0), np.sum(means, axis=0))
    return {
        "method": entry.label,
        "one_exchange": float(np.nanmedian(each)),
        "steps": len(each),
        "cosine": float(np.nanmedian(cosines)) if some else 1.0,
        "whole_run": whole,
        "num_bytes": net.ledger.bytes_sent(world_size - 1) / len(gradients),
        "ratio": net.ledger.compression_ratio(world_size - 1),
    }


def _mean(ranks: Sequence[dict[str, Vector]]) -> dict[str, Vector]:
    return {name: np.asarray(np.mean([one[name] for one in ranks], axis=0, dtype=np.float64)) for name in ranks[0]}


def _flat(tensors: dict[str, Vector]) -> Vector:
    return np.concatenate([tensors[name].ravel().astype(np.float64) for name in sorted(tensors)])


def _cosine(found: Vector, expected: Vector) -> float:
    norms = np.linalg.norm(found) * np.linalg.norm(expected)
    return float(found @ expected / norms) if norms else math.nan


def compare(
    gradients: Annotated[Path, typer.Argument(help="A file of save-gradients.")],
    config: Annotated[
        str | None,
        typer.Option(help="An experiment: a YAML file or a packaged one's name. Default: every method as it comes."),
    ] = None,
    methods: Annotated[str | None, typer.Option(help="Only these: labels, with commas.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for one-exchange.json.")] = Path("runs"),
) -> None:
    """Show how each method performs on saved gradients: error, cosine, bytes and compression ratio.

    Example: python -m experiments compare gradients.safetensors --methods topk,scalecom
    """
    entries, given = methods_of(config, methods), load(gradients)
    records = [measure(entry, given) for entry in entries]
    written = results.save("one-exchange", records, out, gradients=str(gradients))
    shares = dict.fromkeys(("one_exchange", "whole_run"), lambda value: f"{100 * value:.2f} %")
    frame = results.load("one-exchange", out)
    tables.show(
        frame, str(gradients), **shares, cosine=numbers.number, num_bytes=numbers.num_bytes, ratio=numbers.rate_of
    )
    norms = [float(np.linalg.norm(_flat(_mean(ranks)))) for ranks in given]
    print(f"norm of the mean gradient: {min(norms):.3g} to {max(norms):.3g}")
    print(f"written: {written}")
