"""Horovod's elastic loop, as its own code runs it: what is committed comes back, of another number of ranks, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdcompress import get
from hvdcompress.engine.saving import checkpoint
from hvdcompress.method import TensorSpec
from hvdcompress.testing import Trial, numbers

elastic = pytest.importorskip("horovod.common.elastic")
exceptions = pytest.importorskip("horovod.common.exceptions")

SPECS = [TensorSpec("a", (30, 40)), TensorSpec("b", (77,))]
STEPS, COMMIT, LOST = 12, 3, 7  #: a commit after every third step; a peer is lost in the eighth


def network(world_size: int) -> Trial:
    return Trial(get("topk", density=0.05), world_size)


def gradients(step: int, world_size: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    return [{spec.name: numbers(spec.shape, rank, step) for spec in SPECS} for rank in range(world_size)]


def test_training_goes_on_from_the_last_commit_with_the_ranks_that_are_left(tmp_path: Path) -> None:
    """Saved at each commit and loaded after a reset, nothing that was committed is lost, and nothing counts twice."""
    world_size = [3]
    sums = {spec.name: np.zeros(spec.shape) for spec in SPECS}  # given, less what was received, of committed steps

    def reset() -> None:
        world_size[0] = 2

    def train(state: Any) -> Trial:
        net = network(world_size[0])
        if state.step:
            net.restore([checkpoint.load(tmp_path, rank, world_size[0]) for rank in range(world_size[0])], SPECS)
        pending = {name: array.copy() for name, array in sums.items()}
        while state.step < STEPS:
            if state.step == LOST and world_size[0] == 3:
                raise exceptions.HorovodInternalError("a peer is gone")
            given = gradients(state.step, world_size[0])
            out = net.allreduce_many(given)[0]
            for name in pending:
                pending[name] += sum(one[name] for one in given) - world_size[0] * out[name]
            state.step += 1
            if state.step % COMMIT == 0:
                for saved in net.saved():
                    checkpoint.save(saved, tmp_path)
                state.commit()
                sums.update({name: array.copy() for name, array in pending.items()})
        return net

    state = elastic.ObjectState(lambda value: value, lambda: 0, step=0)
    net = elastic.run_fn(train, reset)(state)
    assert world_size == [2] and net.ranks[0].steps() == {"a": STEPS, "b": STEPS}
    for spec in SPECS:
        kept = sum(net.residual(spec.name, rank).astype(np.float64) for rank in range(2))
        assert np.abs(kept).max() > 0
        np.testing.assert_allclose(kept, sums[spec.name], 1e-4, 1e-4)


def test_a_state_in_horovods_state_is_refused_by_the_other_ranks() -> None:
    """Horovod's states have rank 0's values on every rank once they have synchronized; residuals differ."""
    net = network(2)
    net.allreduce_many(gradients(0, 2))
    first, second = net.saved()
    states = [elastic.ObjectState(lambda _: {"saved": first}, lambda: 0, saved=one) for one in (first, second)]
    for state in states:
        state.sync()
    net.ranks[0].load_state_dict(states[0].saved)
    with pytest.raises(ValueError, match="rank"):
        net.ranks[1].load_state_dict(states[1].saved)


def test_what_a_commit_has_is_a_copy() -> None:
    net = network(2)
    net.allreduce_many(gradients(0, 2))
    state = elastic.ObjectState(lambda value: value, lambda: 0, saved=net.saved())
    state.commit()
    kept = net.residual("a", 1)
    net.allreduce_many(gradients(1, 2))
    assert np.any(net.residual("a", 1) != kept)
    state.restore()
    net.restore(state.saved, SPECS)
    np.testing.assert_array_equal(net.residual("a", 1), kept)
