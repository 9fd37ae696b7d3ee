"""Who takes part: what users have without this library, and its methods.

A contender is a baseline of :data:`BASELINES`, optionally with settings of the optimizer (``dense@mu=0,lr=10``), or a
method as in ``momentum/contenders.py`` (``topk@density=0.002``). The baseline ``fp16`` is PyTorch's or Horovod's own;
``fp16:plain`` is the method of this library.
"""

from __future__ import annotations

from dataclasses import replace

from experiments.attach import DENSE, FP16, NOOP, POWERSGD
from experiments.momentum import contenders
from experiments.momentum.contenders import Contender
from experiments.training.experiment import Task

BASELINES = (NOOP, DENSE, FP16, *(f"{POWERSGD}{rank}" for rank in (1, 2, 4)))  #: Horovod has dense and fp16 alone


def baseline_of(name: str) -> str | None:
    """Return the baseline of a contender; None if it is a method of this library."""
    base = name.partition("@")[0]
    return base if base in BASELINES else None


def parse(name: str, task: Task | None = None) -> Contender:
    """Read a contender.

    Raises:
        ValueError: a method or a setting does not exist, or a baseline has settings beyond those of the optimizer.

    >>> parse("dense@mu=0,lr=10").momentum
    0.0
    """
    baseline = baseline_of(name)
    if baseline is None:
        return contenders.parse(name, task)
    dense = contenders.parse(f"none{name.removeprefix(baseline)}", task)
    if dense.settings != {"method": "none"} or dense.form != "default":
        raise ValueError(f"{name}: {baseline} takes lr, mu and beta1 only")
    return replace(dense, name=name)
