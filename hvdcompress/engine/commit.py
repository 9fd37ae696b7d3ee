"""The commit of a step: keep all new states, or none."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.state import RankState, Turn


@dataclass(frozen=True)
class Outcome:
    """How a step has ended on all ranks.

    Attributes:
        finite: whether no rank had an Inf or a NaN.
        triggered: whether the ranks agreed to restart their schedules.
        unused: tensors whose results no rank uses: they keep their state.
    """

    finite: bool = True
    triggered: bool = False
    unused: Collection[str] = ()


def conclude(
    local: RankState, exchanges: Collection[Exchange], passed: Collection[Turn], outcome: Outcome, alone: bool = False
) -> None:
    """Commit a step: swap the new states in, or fill the results with NaN.

    Args:
        local: this rank's state.
        exchanges: those whose results are written.
        passed: buckets whose gradients the driver's framework has reduced.
        outcome: how the step has ended.
        alone: a trigger restarts the schedules of these buckets only, as under TensorFlow, where the ranks agree for
            each tensor by itself.
    """
    # Tensors are known from their first step on, even if that has a NaN or is discarded
    first = [*(exchange.setup.state for exchange in exchanges), *(turn.state for turn in passed if turn.state)]
    local.put(state for state in first if state.bucket.spec.name not in local.states)
    if not outcome.finite:
        for exchange in exchanges:
            exchange.abandon(fill=True)
        return
    # All states are made before the first is kept, so an exception leaves the step without effect
    new = {exchange.name: exchange.new_state(outcome.unused) for exchange in exchanges}
    for turn in () if local.uncompressed else passed:
        name = turn.bucket.spec.name
        before = new.get(name) or local.states[name]  # a graph of TensorFlow may have several steps of a tensor
        new[name] = replace(before, step=before.step + 1, restart=turn.restart)
    local.swap(new, min((exchange.setup.begun_in for exchange in exchanges), default=None))
    for exchange in exchanges:
        exchange.close()
    for turn in passed:
        for observer in local.observers:
            observer.committed(local.rank, turn.bucket.spec.name, {})
    if outcome.triggered:
        local.restart(new.keys() if alone else local.states.keys())
