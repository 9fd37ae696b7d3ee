"""Commit of a step: keep all new states, or none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from hvdcompress.engine.exchange import Exchange
from hvdcompress.engine.state import NextStep, RankState
from hvdcompress.method import Array
from hvdcompress.ops.spec import Ops


@dataclass(frozen=True)
class Outcome:
    """Result of a step, equal on all ranks.

    Attributes:
        finite: whether no rank had an Inf or a NaN.
        triggered: whether the ranks agreed to restart the phases of their methods.
        unused: names of the tensors whose results no rank uses; their state is kept as it was.
    """

    finite: bool = True
    triggered: bool = False
    unused: Collection[str] = ()


def commit_step(
    local: RankState,
    exchanges: Collection[Exchange],
    without_exchange: Collection[NextStep],
    outcome: Outcome,
    per_bucket: bool = False,
    sent: Mapping[str, tuple[Ops, Array]] | None = None,
) -> None:
    """Replace the states by the new ones, or fill the results with NaN.

    Args:
        local: this rank's state.
        exchanges: exchanges in stage DELIVERED.
        without_exchange: buckets that have no exchange on this rank: the driver's framework has reduced their
            gradients, or another rank of this node exchanges them.
        outcome: the result of the step.
        per_bucket: whether a trigger restarts only these buckets. TensorFlow needs it, because there the ranks agree on
            each tensor separately.
        sent: with two levels, the elements of each sparse result that are not zero, by bucket, and their array ops.
    """
    # A tensor must be known from its first step on, even if this step has a NaN or is discarded: otherwise ranks would
    # disagree on which tensors exist.
    begun = [exchange.setup.state for exchange in exchanges]
    begun += [each.state for each in without_exchange if each.state]
    local.put(state for state in begun if state.bucket.spec.name not in local.states)
    for name in (*(each.name for each in exchanges), *(each.bucket.spec.name for each in without_exchange)):
        local.late.pop(name, None)  # in place: under TensorFlow, steps of other tensors take theirs meanwhile
    if not outcome.finite:
        for exchange in exchanges:
            exchange.abandon(fill=True)
        return
    sent = sent or {}
    # All new states are built before the first one is stored, so that an exception leaves the step without effect.
    new = {each.name: each.new_state(outcome.unused, sent.get(each.name, (None, None))[1]) for each in exchanges}
    late = {each.name: each.late for each in exchanges}
    for each in () if local.uncompressed else without_exchange:
        name = each.bucket.spec.name
        # A TensorFlow graph may contain several steps of one tensor, hence the lookup in ``new``.
        before = new.get(name) or local.states[name]
        flushed = local.is_flushed(before, outcome.unused)
        ops, index = sent.get(name, (None, None))
        indices = None if index is None else [index]
        late[name], arrived = local.note_sent(before, each.method, ops, outcome.unused, indices)
        new[name] = replace(before, step=before.step + 1, restart=each.restart, flushed=flushed, arrived=arrived)
    local.swap(new, min((exchange.setup.begun_in for exchange in exchanges), default=None))
    local.late |= {name: each for name, each in late.items() if each}
    for exchange in exchanges:
        exchange.close()
    for each in without_exchange:
        for observer in local.observers:
            observer.committed(local.rank, each.bucket.spec.name, {})
    if outcome.triggered:
        local.restart(new.keys() if per_bucket else local.states.keys())
