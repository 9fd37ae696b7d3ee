"""Horovod's elastic loop, run by its own code: committed states are restored, also for another number of ranks."""

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
STEPS, COMMIT, LOST = 12, 3, 7  #: a commit after every third step; a rank is lost in the eighth


def network(world_size: int) -> Trial:
    return Trial(get("topk", density=0.05), world_size)


def gradients(step: int, world_size: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    return [{spec.name: numbers(spec.shape, rank, step) for spec in SPECS} for rank in range(world_size)]


def object_state(**values: Any) -> Any:
    """An elastic state of Horovod on one rank."""
    return elastic.ObjectState(lambda value: value, lambda: 0, **values)


def test_training_continues_from_the_last_commit_with_the_remaining_ranks(tmp_path: Path) -> None:
    """The sum of gradients minus the sum of results equals the residuals: nothing is lost, and nothing counts twice."""
    world_sizes = [3]
    unsent = {spec.name: np.zeros(spec.shape) for spec in SPECS}  # at the last commit

    def train(state: Any) -> Trial:
        world_size = world_sizes[-1]
        net = network(world_size)
        if state.step:
            net.restore([checkpoint.load(tmp_path, rank, world_size) for rank in range(world_size)], SPECS)
        pending = {name: array.copy() for name, array in unsent.items()}
        while state.step < STEPS:
            if state.step == LOST and world_size == 3:
                raise exceptions.HorovodInternalError("a rank is lost")
            given = gradients(state.step, world_size)
            out = net.allreduce_many(given)[0]
            for name in pending:
                pending[name] += sum(one[name] for one in given) - world_size * out[name]
            state.step += 1
            if state.step % COMMIT == 0:
                for saved in net.saved():
                    checkpoint.save(saved, tmp_path)
                state.commit()
                unsent.update({name: array.copy() for name, array in pending.items()})
        return net

    net = elastic.run_fn(train, lambda: world_sizes.append(2))(object_state(step=0))
    assert world_sizes == [3, 2] and net.ranks[0].steps() == {"a": STEPS, "b": STEPS}
    for spec in SPECS:
        kept = sum(net.residual(spec.name, rank).astype(np.float64) for rank in range(2))
        assert np.abs(kept).max() > 0
        np.testing.assert_allclose(kept, unsent[spec.name], 1e-4, 1e-4)


def test_a_state_of_rank_0_is_refused_by_the_other_ranks() -> None:
    """Horovod's ``sync`` gives rank 0's values to every rank, but residuals differ."""
    net = network(2)
    net.allreduce_many(gradients(0, 2))
    first, second = net.saved()
    state = elastic.ObjectState(lambda _: {"saved": first}, lambda: 0, saved=second)
    state.sync()
    net.ranks[0].load_state_dict(state.saved)
    with pytest.raises(ValueError, match="rank"):
        net.ranks[1].load_state_dict(state.saved)


def test_a_commit_keeps_a_copy() -> None:
    net = network(2)
    net.allreduce_many(gradients(0, 2))
    state = object_state(saved=net.saved())
    state.commit()
    kept = net.residual("a", 1)
    net.allreduce_many(gradients(1, 2))
    assert np.any(net.residual("a", 1) != kept)
    state.restore()
    net.restore(state.saved, SPECS)
    np.testing.assert_array_equal(net.residual("a", 1), kept)
